"""RoPE that changes with the length of the input, and slots that never turn, against the definitions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_convert.mla import MLAConfig
from mla_convert.mla.modeling_mla import MLARotaryEmbedding
from tests.mla.native import LAYERS, SIZES, native, tokens

ORIGINAL, DIM, THETA = 8, 8, 100.0
PAIRS = [[0, 2, 2], [3, 0, 1], [1, 1, 0]]
SHORT = [THETA ** (-2 * pair / DIM) for pair in range(DIM // 2)]
LONG = [0.5, 0.2, 0.07, 0.01]
LONGROPE = {"kind": "longrope", "original_positions": ORIGINAL, "inv_freq": LONG, "theta": 0.0, "factor": 1.0, "dim": 8}
DYNAMIC = {
    "kind": "dynamic",
    "original_positions": ORIGINAL,
    "inv_freq": [],
    "theta": THETA,
    "factor": 3.0,
    "dim": DIM,
}
# float32 angles of some tens of radians
TOLERANCE = 1e-5


def changes(update: dict[str, Any]) -> dict[str, Any]:
    return {
        "rope_update": update,
        "rope_pairs": PAIRS,
        "rope_inv_freq": [[SHORT[pair] for pair in row] for row in PAIRS],
    }


def frequency(update: dict[str, Any], pair: int, length: int) -> float:
    if length <= ORIGINAL:
        return SHORT[pair]
    if update["kind"] == "longrope":
        return LONG[pair]
    growth = update["factor"] * length / ORIGINAL - (update["factor"] - 1)
    return (THETA * growth ** (DIM / (DIM - 2))) ** (-2 * pair / DIM)


@pytest.mark.parametrize("scaling", [1.0, 1.3])
@pytest.mark.parametrize("update", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
def test_frequencies_are_those_of_the_longest_position(update: dict[str, Any], scaling: float) -> None:
    rotary = MLARotaryEmbedding(MLAConfig(**{**SIZES, **changes(update), "rope_attention_scaling": scaling}))
    for length in (1, ORIGINAL, ORIGINAL + 1, 20, ORIGINAL, 33):  # nothing is kept from one call to the next
        positions = torch.tensor([[0, 1], [length - 1, 0]])
        for row, (cos, sin) in zip(PAIRS, rotary(positions, torch.float32), strict=True):
            for slot, pair in enumerate(row):
                angle = (length - 1) * frequency(update, pair, length)
                assert cos[1, 0, slot].item() == pytest.approx(scaling * math.cos(angle), abs=TOLERANCE)
                assert sin[1, 0, slot].item() == pytest.approx(scaling * math.sin(angle), abs=TOLERANCE)


@pytest.mark.parametrize("update", [None, LONGROPE, DYNAMIC], ids=["fixed", "longrope", "dynamic"])
def test_slots_that_do_not_turn_are_left_alone(update: dict[str, Any] | None) -> None:
    fields = {} if update is None else {"rope_update": update, "rope_pairs": [[0, 3, 1]] * LAYERS}
    frequencies = [[1.0, 0.0, 0.5]] * LAYERS
    rotary = MLARotaryEmbedding(
        MLAConfig(**{**SIZES, **fields, "rope_inv_freq": frequencies, "rope_attention_scaling": 1.3})
    )
    for cos, sin in rotary(torch.arange(12)[None], torch.float32):
        assert torch.equal(cos[..., 1], torch.ones(1, 12))
        assert torch.equal(sin[..., 1], torch.zeros(1, 12))
        assert cos[0, 0, 0].item() == pytest.approx(1.3)


@torch.no_grad()
def without_cache(model: Any, ids: Tensor, mask: Tensor, count: int) -> Tensor:
    """Greedy continuations of a padded batch, the whole text read again for each token."""
    for _ in range(count):
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        ids = torch.cat((ids, logits[:, -1].argmax(-1, keepdim=True)), dim=1)
        mask = torch.cat((mask, torch.ones_like(mask[:, :1])), dim=1)
    return ids


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("mode", ["expanded", "absorbed", "auto"])
def test_a_longrope_generation_goes_beyond_the_original_length_as_if_it_read_all_again(mode: str, padding: int) -> None:
    """Keys cached before the border were turned by other frequencies; padding counts for no position."""
    model = native(**changes(LONGROPE))
    model.set_attention_mode(mode)
    ids = torch.cat((torch.ones(2, padding, dtype=torch.long), tokens(length=5)), dim=1)
    mask = (torch.arange(ids.shape[1]) >= padding).long().expand(2, -1).clone()
    mask[1, padding] = 0  # the second prompt is a token shorter
    expected = without_cache(model, ids, mask, 12)
    found = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=1)
    assert torch.equal(found, expected)


def test_the_border_is_crossed_once() -> None:
    """At the first token beyond the original length the model reads the whole text, and after it one token a step."""
    model, lengths = native(**changes(LONGROPE)), []
    model.model.register_forward_pre_hook(
        lambda _module, _args, given: lengths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    ids = tokens(batch=1, length=6)
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, pad_token_id=1)
    assert lengths == [6, 1, 1, 9, 1, 1]


def test_a_paged_cache_is_refused_with_the_reason() -> None:
    model = native(**changes(LONGROPE))
    assert not model.supports_paged_cache
    assert native().supports_paged_cache

    class Pages:
        def attend_latent(self) -> None: ...

    with pytest.raises(ValueError, match="frequencies change with the length"):
        model(tokens(), past_key_values=Pages())


def test_a_saved_model_keeps_its_change(tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    model, ids = native(**changes(DYNAMIC)), tokens()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(ids, use_cache=False).logits, model(ids, use_cache=False).logits)

"""A recipe that allocates sizes, from the source to a folder that decodes: layers differ, and nothing else does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from mla_convert.cli.convert import describe_plan
from mla_convert.decode import PagedLatentCache, attach_absorbed, generate_batch, save_absorbed
from mla_convert.evaluate.cache import cache_bytes_per_token
from mla_convert.evaluate.load import load_for_evaluation
from mla_convert.export.reload import verify_folder
from mla_convert.heal.healing import HealRequest, TextSettings, heal
from mla_convert.heal.layers import LayerSettings
from mla_convert.pipeline import ConvertRequest, convert, plan
from tests.tiny import VOCAB_SIZE, save_source, tiny_llama, tiny_qwen2

# float32 through three layers of logits of size ten
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return save_source(tiny_llama(num_hidden_layers=3), tmp_path_factory.mktemp("allocation") / "source")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("allocation-text") / "text.txt"
    file.write_text("".join(f"Line {i}: the cat sat on mat {i * i} and saw {i % 7} dogs.\n" for i in range(120)))
    return file


@pytest.fixture
def request_for(source: Path, text: Path, tmp_path: Path) -> Callable[..., ConvertRequest]:
    def make(*, factorise: dict[str, Any] | None = None, refit: Any = None, **changes: Any) -> ConvertRequest:
        recipe: dict[str, Any] = {
            "name": "allocating",
            "description": "Sizes by predicted loss.",
            "calibration": {"tokens": 1024, "context": 64},
            "decouple": {},
            "factorise": {"metric": "mixed", "prior": 0.02, **(factorise or {})},
            "allocation": {"split": "predicted", "layers": "waterfill", "step": 4, "spread": 16},
        }
        if refit is not None:
            recipe["refit"] = refit
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        fields: dict[str, Any] = {
            "source": str(source),
            "out": tmp_path / "out",
            "recipe": str(tmp_path / "recipe.yaml"),
            "cache": 0.5,
            "calibration": (str(text),),
        }
        return ConvertRequest(**fields | changes)

    return make


def prompt(length: int = 70) -> Tensor:
    return torch.randint(2, VOCAB_SIZE, (1, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def paged_logits(model: Any, ids: Tensor) -> Tensor:
    """The logits [S vocabulary] of a prefill and 6 decoded tokens on a paged cache."""
    cache, found = PagedLatentCache(model.config, 3), []
    cache.pool.fill_(float("nan"))
    tokens, at = ids[0].tolist(), ids.shape[1] - 6
    sequence = cache.open(tokens)
    with cache.prefilling(sequence, tokens[:at]) as view:
        found.append(model(ids[:, :at], position_ids=torch.arange(at)[None], cache=view, use_cache=True).logits[0])
    for i in range(at, len(tokens)):
        with cache.decoding([sequence], [[tokens[i]]]) as view:
            positions = torch.tensor([[i]])
            found.append(model(ids[:, i : i + 1], position_ids=positions, cache=view, use_cache=True).logits[0])
    return torch.cat(found)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"factorise": {"damping": [0.01, 0.1, 1.0]}},
        {"refit": {"tokens": 512, "inputs": 0.1, "outputs": 0.1}},
    ],
    ids=["plain", "dampings", "refit"],
)
def test_layers_of_unequal_sizes_are_written_recorded_and_decoded(request_for, sections) -> None:
    request = request_for(**sections)
    planned = plan(request)
    assert planned.provisional
    record = convert(request)
    assert record["verification"]["top1_agreement"] == 1.0

    layers = record["plan"]["layers"]
    assert len({(layer["kv_rank"], layer["rope_dim"]) for layer in layers}) > 1
    assert sum(layer["kv_rank"] + layer["rope_dim"] for layer in layers) == 3 * planned.layers[0].cached == 3 * 32
    assert record["plan"]["cache"]["ratio"] == 0.5
    config = json.loads((request.out / "config.json").read_text())
    assert config["kv_lora_ranks"] == [layer["kv_rank"] for layer in layers]
    assert config["qk_rope_head_dims"] == [layer["rope_dim"] for layer in layers]
    assert "Layers differ in their sizes" in (request.out / "README.md").read_text()
    assert record["recipe"]["allocation"]["layers"] == "waterfill"

    model, _ = load_for_evaluation(str(request.out), torch.float32)
    assert cache_bytes_per_token(model) == record["plan"]["cache"]["bytes_per_token"]
    ids = prompt()
    found = {}
    for mode in ("expanded", "absorbed"):
        model.set_attention_mode(mode)
        with torch.no_grad():
            found[mode] = model(ids, use_cache=False).logits[0]
    model.set_attention_mode("auto")
    found["paged"] = paged_logits(model, ids)
    for logits in found.values():
        torch.testing.assert_close(logits, found["expanded"], atol=TOLERANCE, rtol=0)
    verify_folder(request.out, ids, found["expanded"][None], tolerance=TOLERANCE, fresh_process=True)


def test_unequal_layers_heal_absorb_and_generate(request_for, source: Path, text: Path, tmp_path: Path) -> None:
    request = request_for()
    sizes = convert(request)["plan"]["layers"]
    healed = tmp_path / "healed"
    settings = {"text": TextSettings(tokens=512, context=32, held_out_share=0.2), "layers": LayerSettings(steps=5)}
    heal(HealRequest(request.out, healed, str(source), (str(text),), **settings))
    save_absorbed(healed, "auto")
    model, tokenizer = load_for_evaluation(str(healed), torch.float32)
    assert model.config.kv_lora_ranks == [size["kv_rank"] for size in sizes]
    prompts = ["Line 1: the cat", "Line 2: the cat sat on mat 4 and saw"]
    plain = generate_batch(model, tokenizer, prompts, max_new_tokens=8)
    attach_absorbed(model, healed)
    ready = generate_batch(model, tokenizer, prompts, max_new_tokens=8)
    for i, prompt in enumerate(prompts):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        alone = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=1
        )
        expected = alone[0, ids.shape[1] :].tolist()
        for batch in (plain, ready):
            assert list(batch.generations[i].token_ids) == expected


def test_the_whole_cache_is_exact(request_for, tmp_path: Path) -> None:
    """With biases, which allocation does not see."""
    model = tiny_qwen2(num_hidden_layers=3)
    request = request_for(source=str(save_source(model, tmp_path / "biased")), cache=1.0)
    convert(request)
    converted, _ = load_for_evaluation(str(request.out), torch.float32)
    with torch.no_grad():
        found, expected = (one(prompt(), use_cache=False).logits for one in (converted, model))
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)  # conditioning as in convert's own check


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cache": None, "kv_rank": 20, "rope_dim": 8}, "the sizes were given"),
        ({"format": "deepseek"}, "a deepseek folder has one size"),
    ],
    ids=["sizes", "deepseek"],
)
def test_where_sizes_are_not_open_a_note_says_so(request_for, changes: dict[str, Any], said: str) -> None:
    request = request_for(**changes)
    planned = plan(request)
    record = convert(request)
    assert record["plan"]["layers"] == [
        {name: getattr(shape, name) for name in ("kv_rank", "rope_dim", "nope_dim", "value_dim", "key_scales")}
        for shape in planned.layers
    ]
    assert any(said in note for note in record["notes"])
    assert said in (request.out / "README.md").read_text()


def test_the_dry_run_says_that_sizes_are_provisional(request_for) -> None:
    facts = describe_plan(plan(request_for()))
    assert facts["provisional"]
    assert facts["cached_per_token_layer"] == 32
    assert not describe_plan(plan(request_for(recipe="default")))["provisional"]

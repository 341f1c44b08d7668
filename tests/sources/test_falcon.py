from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from mla_convert.errors import UnsupportedArchitectureError
from mla_convert.sources import open_source
from tests.sources.conformance import AdapterConformance
from tests.tiny import save_source
from tests.tiny_families import tiny_falcon

NEW = {"new_decoder_architecture": True, "num_kv_heads": 2}
RW = {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}


class TestFalcon(AdapterConformance):
    attention_path = "transformer.h.{}.self_attention"
    output_path = "dense"
    stored_attention = "transformer.h.{}.self_attention."
    rotary_path = "transformer.rotary_emb"
    dropped = ("transformer.h.0.self_attention.maybe_rotary.inv_freq", (8,))
    variants: ClassVar = {
        "7b": tiny_falcon,
        "40b": lambda: tiny_falcon(**NEW),
        "11b": lambda: tiny_falcon(**NEW, num_ln_in_parallel_attn=1, tied=False),
        "rw": lambda: tiny_falcon(**RW),
        # Slopes that bfloat16 does not hold.
        "rw-16-heads": lambda: tiny_falcon(**RW, num_attention_heads=16, hidden_size=256),
        "sequential": lambda: tiny_falcon(parallel_attn=False, bias=True, activation="relu"),
        "bfloat16": lambda: tiny_falcon(dtype=torch.bfloat16),
    }


@pytest.mark.parametrize(
    ("fields", "kind", "shared"),
    [({}, "MQA", True), (NEW, "GQA", False), (NEW | {"num_ln_in_parallel_attn": 1}, "GQA", True), (RW, "MHA", False)],
    ids=["7b", "40b", "11b", "rw"],
)
def test_generations_differ_in_heads_and_norms(tmp_path: Path, fields: dict[str, Any], kind: str, shared: bool) -> None:
    spec = open_source(str(save_source(tiny_falcon(**fields), tmp_path))).spec
    assert spec.attention_kind == kind
    assert spec.block.shared_input_norm == shared
    assert spec.block.parallel_residual == (fields is not RW)


def test_biases_on_positions_are_scaled_with_the_scores(tmp_path: Path) -> None:
    spec = open_source(str(save_source(tiny_falcon(**RW), tmp_path))).spec
    # Four heads of 16 dims: 2^-2, 2^-4, 2^-6, 2^-8, over the root of 16.
    assert spec.alibi_slopes == (2.0**-4, 2.0**-6, 2.0**-8, 2.0**-10)
    assert spec.rope.dim == 0


def test_rounded_biases_are_followed_in_a_long_text_and_in_a_padded_one(tmp_path: Path) -> None:
    model = tiny_falcon(**RW, num_attention_heads=16, hidden_size=256)
    source = open_source(str(save_source(model, tmp_path)))
    decoder, reference = source.load_decoder(dtype=torch.float32), source.load_model(dtype=torch.float32)
    ids = torch.randint(0, 288, (2, 600), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[1, :37] = 0
    with torch.no_grad():
        expected = reference(ids, attention_mask=mask, use_cache=False).logits
        actual = decoder(ids, attention_mask=mask, use_cache=False).logits
    # Two float32 programs; without the rounding they differ by more than 1 here.
    assert (actual - expected)[mask.bool()].abs().max() < 2e-4


def test_biases_that_are_rounded_before_an_inexact_division_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedArchitectureError, match="root of 32"):
        open_source(str(save_source(tiny_falcon(**RW, num_attention_heads=2), tmp_path)))


@pytest.mark.parametrize(
    "fields",
    [NEW | {"parallel_attn": False}, {"num_ln_in_parallel_attn": 2}, RW | {"num_kv_heads": 2}],
    ids=["sequential", "two-norms", "grouped"],
)
def test_what_its_class_cannot_run_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedArchitectureError, match="cannot run"):
        open_source(str(save_source(tiny_falcon(**fields), tmp_path)))

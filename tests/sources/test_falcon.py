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
    dropped = None
    variants: ClassVar = {
        "7b": tiny_falcon,
        "40b": lambda: tiny_falcon(**NEW),
        "11b": lambda: tiny_falcon(**NEW, num_ln_in_parallel_attn=1, tied=False),
        "rw": lambda: tiny_falcon(**RW),
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


@pytest.mark.parametrize(
    "fields", [NEW | {"parallel_attn": False}, {"num_ln_in_parallel_attn": 2}], ids=["sequential", "two-norms"]
)
def test_what_its_class_cannot_run_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedArchitectureError, match="cannot run"):
        open_source(str(save_source(tiny_falcon(**fields), tmp_path)))

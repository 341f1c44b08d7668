from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch

from mla_convert.sources import open_source
from tests.sources.conformance import AdapterConformance
from tests.tiny import save_source
from tests.tiny_families import tiny_stablelm


class TestStableLm(AdapterConformance):
    variants: ClassVar = {
        "GQA": tiny_stablelm,
        "MHA-bias-tied": lambda: tiny_stablelm("MHA", tied=True, use_qkv_bias=True),
        "parallel": lambda: tiny_stablelm(use_parallel_residual=True),
        "qk-norm": lambda: tiny_stablelm(qk_layernorm=True, use_parallel_residual=True),
        "qk-norm-bias": lambda: tiny_stablelm("MQA", qk_layernorm=True, use_qkv_bias=True),
        "bfloat16": lambda: tiny_stablelm(dtype=torch.bfloat16),
    }


def test_a_quarter_of_a_head_turns(tmp_path: Path) -> None:
    assert open_source(str(save_source(tiny_stablelm(), tmp_path))).spec.rope.dim == 4


def test_the_mean_over_a_head_is_taken_out_of_queries_and_keys(tmp_path: Path) -> None:
    model = tiny_stablelm(qk_layernorm=True, use_qkv_bias=True)
    weights = open_source(str(save_source(model, tmp_path))).attention(0)
    assert weights.b_q is not None
    assert weights.b_k is not None
    # Sums of 16 float32 numbers of order one.
    for rows in (weights.w_q, weights.w_k, weights.b_q, weights.b_k):
        assert rows.sum(1).abs().max() < 1e-5

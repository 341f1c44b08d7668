from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch

from mla_convert.sources import open_source
from mla_convert.spec import BlockSpec, QKNormSpec
from tests.sources.conformance import AdapterConformance
from tests.tiny import save_source, tiny_olmo2


class TestOlmo2(AdapterConformance):
    variants: ClassVar = {
        "GQA": lambda: tiny_olmo2("GQA"),
        "MHA-bias": lambda: tiny_olmo2("MHA", attention_bias=True),
        "MQA-tied": lambda: tiny_olmo2("MQA", tied=True),
        "bfloat16": lambda: tiny_olmo2(dtype=torch.bfloat16),
    }


def test_norms_follow_what_they_normalise(tmp_path: Path) -> None:
    source = open_source(str(save_source(tiny_olmo2(), tmp_path)))
    assert source.spec.block == BlockSpec(input_norms=False, output_norms=True)
    targets = {name: part.target for name, part in source.copied(0) if "norm" in name}
    assert targets == {
        "model.layers.0.post_attention_layernorm.weight": "model.layers.0.attention_output_layernorm.weight",
        "model.layers.0.post_feedforward_layernorm.weight": "model.layers.0.mlp_output_layernorm.weight",
    }


def test_all_heads_share_one_root_mean_square(tmp_path: Path) -> None:
    source = open_source(str(save_source(tiny_olmo2("GQA"), tmp_path)))
    assert source.spec.qk_norm == QKNormSpec("all", 1e-5)
    assert source.spec.key_scales == 1
    stored, read = source.tensor("model.layers.0.self_attn.k_norm.weight"), source.attention(0).key_norm
    assert read is not None
    assert torch.equal(read.flatten(), stored)

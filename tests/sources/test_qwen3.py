from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import torch

from mla_convert.errors import UnsupportedArchitectureError
from mla_convert.sources import open_source
from mla_convert.spec import QKNormSpec
from tests.sources.conformance import AdapterConformance
from tests.tiny import save_source, tiny_qwen3


class TestQwen3(AdapterConformance):
    variants: ClassVar = {
        "GQA": lambda: tiny_qwen3("GQA"),
        "MHA-bias": lambda: tiny_qwen3("MHA", attention_bias=True),
        "MQA-tied": lambda: tiny_qwen3("MQA", tied=True),
        "window": lambda: tiny_qwen3("GQA", window=8),
        "head-dim": lambda: tiny_qwen3(head_dim=32),
        "bfloat16": lambda: tiny_qwen3(dtype=torch.bfloat16),
    }


def test_every_head_is_normalised(tmp_path: Path) -> None:
    source = open_source(str(save_source(tiny_qwen3(rms_norm_eps=1e-4), tmp_path)))
    assert source.spec.qk_norm == QKNormSpec("head", 1e-4)
    assert source.spec.key_scales == 2
    stored, read = source.tensor("model.layers.1.self_attn.k_norm.weight"), source.attention(1).key_norm
    assert read is not None
    assert torch.equal(read, stored.expand(2, 16))


def test_other_layer_types_are_refused(tmp_path: Path) -> None:
    model = tiny_qwen3()
    model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(UnsupportedArchitectureError, match="chunked_attention"):
        open_source(str(save_source(model, tmp_path)))

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch

from mla_convert.sources import open_source
from tests.sources.conformance import AdapterConformance
from tests.tiny import save_source
from tests.tiny_families import tiny_cohere


class TestCohere(AdapterConformance):
    variants: ClassVar = {
        "MHA": lambda: tiny_cohere("MHA"),
        "GQA-bias-untied": lambda: tiny_cohere(tied=False, attention_bias=True),
        "qk-norm": lambda: tiny_cohere(use_qk_norm=True),
        "qk-norm-bias": lambda: tiny_cohere(use_qk_norm=True, attention_bias=True),
        "bfloat16": lambda: tiny_cohere(dtype=torch.bfloat16),
    }


def test_neighbouring_dims_are_a_pair(tmp_path: Path) -> None:
    source = open_source(str(save_source(tiny_cohere("MHA"), tmp_path)))
    stored = source.tensor("model.layers.0.self_attn.q_proj.weight").view(4, 16, 64)
    queries = source.attention(0).w_q
    assert torch.equal(queries[:, :8], stored[:, 0::2])
    assert torch.equal(queries[:, 8:], stored[:, 1::2])

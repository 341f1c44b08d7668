from __future__ import annotations

from typing import ClassVar

import torch

from tests.sources.conformance import AdapterConformance
from tests.tiny_families import tiny_qwen3_moe


class TestQwen3Moe(AdapterConformance):
    variants: ClassVar = {
        "GQA": tiny_qwen3_moe,
        "MHA-bias-tied": lambda: tiny_qwen3_moe("MHA", tied=True, attention_bias=True, norm_topk_prob=True),
        "head-dim": lambda: tiny_qwen3_moe(head_dim=32),
        "mlp-only": lambda: tiny_qwen3_moe(mlp_only_layers=[0]),
        "window": lambda: tiny_qwen3_moe(use_sliding_window=True, sliding_window=8),
        "bfloat16": lambda: tiny_qwen3_moe(dtype=torch.bfloat16),
    }

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import torch

from mla_convert.errors import UnsupportedArchitectureError
from mla_convert.sources import open_source
from tests.sources.conformance import AdapterConformance
from tests.tiny import save_source
from tests.tiny_families import tiny_qwen2_moe

WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


class TestQwen2Moe(AdapterConformance):
    variants: ClassVar = {
        "GQA": tiny_qwen2_moe,
        "MHA-normalised-tied": lambda: tiny_qwen2_moe("MHA", tied=True, norm_topk_prob=True, qkv_bias=False),
        "every-second-layer": lambda: tiny_qwen2_moe(decoder_sparse_step=2),
        "mlp-only": lambda: tiny_qwen2_moe(mlp_only_layers=[1]),
        "window": lambda: tiny_qwen2_moe(**WINDOW),
        "bfloat16": lambda: tiny_qwen2_moe(dtype=torch.bfloat16),
    }


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (True, True, True, True)),
        ({"decoder_sparse_step": 2}, (False, True, False, True)),
        ({"mlp_only_layers": [0, 2]}, (False, True, False, True)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (False, True, False, False)),
    ],
)
def test_which_layers_have_experts(tmp_path: Path, fields: dict[str, object], expected: tuple[bool, ...]) -> None:
    spec = open_source(str(save_source(tiny_qwen2_moe(num_hidden_layers=4, **fields), tmp_path))).spec
    assert tuple(spec.block.has_experts(layer) for layer in range(4)) == expected


def test_other_layer_types_are_refused(tmp_path: Path) -> None:
    model = tiny_qwen2_moe()
    model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(UnsupportedArchitectureError, match="chunked_attention"):
        open_source(str(save_source(model, tmp_path)))

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import torch

from mla_convert.errors import UnsupportedArchitectureError
from mla_convert.sources import open_source
from tests.sources.conformance import AdapterConformance
from tests.tiny import save_source, tiny_qwen2


class TestQwen2(AdapterConformance):
    variants: ClassVar = {
        "GQA": lambda: tiny_qwen2("GQA"),
        "MHA": lambda: tiny_qwen2("MHA"),
        "MQA-tied": lambda: tiny_qwen2("MQA", tied=True),
        "window": lambda: tiny_qwen2("GQA", window=8),
        "yarn": lambda: tiny_qwen2(
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        ),
        "bfloat16": lambda: tiny_qwen2(dtype=torch.bfloat16),
    }


def test_windows_start_at_max_window_layers(tmp_path: Path) -> None:
    assert open_source(str(save_source(tiny_qwen2(window=8), tmp_path))).spec.windows == (None, 8)


def test_a_window_that_is_not_in_use_is_none(tmp_path: Path) -> None:
    model = tiny_qwen2(use_sliding_window=False, sliding_window=8, max_window_layers=0)
    assert open_source(str(save_source(model, tmp_path))).spec.windows == (None, None)


def test_biases_are_on_queries_keys_and_values_only(tmp_path: Path) -> None:
    attention = open_source(str(save_source(tiny_qwen2(), tmp_path))).attention(0)
    assert attention.b_q is not None
    assert attention.b_k is not None
    assert attention.b_v is not None
    assert attention.b_o is None
    assert attention.b_k.shape == (2, 16)


def test_other_layer_types_are_refused(tmp_path: Path) -> None:
    model = tiny_qwen2()
    model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(UnsupportedArchitectureError, match="chunked_attention"):
        open_source(str(save_source(model, tmp_path)))

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import torch

from mla_convert.sources import open_source
from tests.sources.conformance import AdapterConformance
from tests.tiny import save_source
from tests.tiny_families import tiny_granite


class TestGranite(AdapterConformance):
    variants: ClassVar = {
        "GQA": tiny_granite,
        "MHA-bias": lambda: tiny_granite("MHA", tied=False, attention_bias=True, mlp_bias=True),
        "bfloat16": lambda: tiny_granite("MQA", dtype=torch.bfloat16),
    }


def test_factors_are_said_as_factors(tmp_path: Path) -> None:
    spec = open_source(str(save_source(tiny_granite(), tmp_path))).spec
    assert spec.attention_scale == 0.2
    assert spec.block.embedding_scale == 3.0
    assert spec.block.residual_scale == 0.4
    assert spec.block.logits_scale == pytest.approx(1 / 1.7)

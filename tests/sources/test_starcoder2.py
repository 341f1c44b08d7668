from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch

from mla_convert.sources import open_source
from tests.sources.conformance import AdapterConformance
from tests.tiny import save_source
from tests.tiny_families import tiny_starcoder2


class TestStarcoder2(AdapterConformance):
    variants: ClassVar = {
        "GQA": tiny_starcoder2,
        "MHA-untied": lambda: tiny_starcoder2("MHA", tied=False),
        "window": lambda: tiny_starcoder2(sliding_window=8),
        "no-bias": lambda: tiny_starcoder2("MQA", use_bias=False),
        "bfloat16": lambda: tiny_starcoder2(dtype=torch.bfloat16),
    }


def test_the_block_is_plain_with_layer_norms(tmp_path: Path) -> None:
    block = open_source(str(save_source(tiny_starcoder2(), tmp_path))).spec.block
    assert (block.norm, block.norm_bias, block.mlp) == ("layer", True, "plain")

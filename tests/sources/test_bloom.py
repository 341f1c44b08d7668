from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import torch

from mla_convert.errors import UnsupportedArchitectureError
from mla_convert.sources import open_source
from tests.sources.conformance import AdapterConformance
from tests.tiny import save_source
from tests.tiny_families import tiny_bloom


class TestBloom(AdapterConformance):
    attention_path = "transformer.h.{}.self_attention"
    output_path = "dense"
    stored_attention = "transformer.h.{}.self_attention."
    rotary_path = None
    dropped = None
    variants: ClassVar = {
        "tied": tiny_bloom,
        "untied": lambda: tiny_bloom(tied=False),
        # Not a power of two.
        "six-heads": lambda: tiny_bloom(n_head=6, hidden_size=96),
        "bfloat16": lambda: tiny_bloom(dtype=torch.bfloat16),
    }


def test_norms_on_the_residual_stream_are_refused(tmp_path: Path) -> None:
    model = tiny_bloom(apply_residual_connection_post_layernorm=True)
    with pytest.raises(UnsupportedArchitectureError, match="apply_residual_connection_post_layernorm"):
        open_source(str(save_source(model, tmp_path)))

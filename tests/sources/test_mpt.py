from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from mla_convert.errors import UnsupportedArchitectureError
from mla_convert.sources import open_source
from tests.sources.conformance import AdapterConformance
from tests.tiny import save_source
from tests.tiny_families import tiny_mpt


class TestMpt(AdapterConformance):
    attention_path = "transformer.blocks.{}.attn"
    output_path = "out_proj"
    stored_attention = "transformer.blocks.{}.attn."
    rotary_path = None
    dropped = None
    variants: ClassVar = {
        "tied": tiny_mpt,
        "untied-scale": lambda: tiny_mpt(tied=False, attention={"softmax_scale": 0.2}),
        # Not a power of two.
        "six-heads": lambda: tiny_mpt(n_heads=6, d_model=96),
        "bfloat16": lambda: tiny_mpt(dtype=torch.bfloat16),
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alibi", False),
        ("alibi_bias_max", 16),
        ("attn_type", "multiquery_attention"),
        ("clip_qkv", 8.0),
        ("prefix_lm", True),
        ("qk_ln", True),
    ],
)
def test_other_forms_of_attention_are_refused_by_name(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(UnsupportedArchitectureError, match=f"attn_config.{field}"):
        open_source(str(save_source(tiny_mpt(attention={field: value}), tmp_path)))


@pytest.mark.parametrize(("field", "value"), [("no_bias", False), ("logit_scale", 0.5), ("logit_scale", "inv_sqrt")])
def test_what_the_class_leaves_out_is_refused_by_name(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(UnsupportedArchitectureError, match=field):
        open_source(str(save_source(tiny_mpt(**{field: value}), tmp_path)))


def test_mosaics_own_name_of_the_class_is_known(tmp_path: Path) -> None:
    folder = save_source(tiny_mpt(), tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["MPTForCausalLM"]}))
    assert open_source(str(folder)).spec.family == "mpt"

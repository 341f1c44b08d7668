from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from mla_convert.errors import UnsupportedArchitectureError
from mla_convert.sources import open_source
from tests.sources.conformance import AdapterConformance
from tests.tiny import save_source, tiny_gemma2


class TestGemma2(AdapterConformance):
    variants: ClassVar = {
        "GQA": lambda: tiny_gemma2("GQA"),
        "MHA-untied-bias": lambda: tiny_gemma2("MHA", tied=False, attention_bias=True),
        "MQA-uncapped": lambda: tiny_gemma2("MQA", attn_logit_softcapping=None, final_logit_softcapping=None),
        "head-dim": lambda: tiny_gemma2(head_dim=32),
        "bfloat16": lambda: tiny_gemma2(dtype=torch.bfloat16),
    }


def test_what_is_special_is_described(tmp_path: Path) -> None:
    spec = open_source(str(save_source(tiny_gemma2(), tmp_path))).spec
    assert spec.attention_softcap == 3.0
    assert spec.block.final_logit_softcap == 4.0
    assert spec.attention_scale == pytest.approx(24**-0.5)
    assert spec.block.embedding_scale == pytest.approx(8.0)
    assert spec.block.norm_offset == 1.0
    assert spec.windows == (8, None)


def test_norms_stand_where_the_native_class_has_them(tmp_path: Path) -> None:
    source = open_source(str(save_source(tiny_gemma2(), tmp_path)))
    targets = {name.split(".")[3]: part.target.split(".")[3] for name, part in source.copied(1) if "norm" in name}
    assert targets == {
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "attention_output_layernorm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "mlp_output_layernorm",
    }


def test_the_activation_is_the_one_the_class_uses(tmp_path: Path) -> None:
    model = tiny_gemma2(hidden_act="silu", hidden_activation="gelu_pytorch_tanh")
    assert open_source(str(save_source(model, tmp_path))).spec.hidden_act == "gelu_pytorch_tanh"


def test_attention_in_both_directions_is_refused(tmp_path: Path) -> None:
    folder = save_source(tiny_gemma2(), tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_bidirectional_attention": True}))
    with pytest.raises(UnsupportedArchitectureError, match="use_bidirectional_attention"):
        open_source(str(folder))

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers

from mla_convert.errors import UnsupportedArchitectureError
from mla_convert.features import features
from mla_convert.sources import open_source
from tests.sources.conformance import AdapterConformance
from tests.tiny import LLAMA3_ROPE, save_source
from tests.tiny_families import tiny_gemma

TANH = "gelu_pytorch_tanh"


class TestGemma(AdapterConformance):
    variants: ClassVar = {
        "MQA": tiny_gemma,
        "MHA-untied-bias": lambda: tiny_gemma("MHA", tied=False, attention_bias=True),
        "GQA-scaled-rope": lambda: tiny_gemma("GQA", head_dim=16, rope_parameters=dict(LLAMA3_ROPE)),
        "silu": lambda: tiny_gemma(hidden_act="silu"),
        "bfloat16": lambda: tiny_gemma(dtype=torch.bfloat16),
    }


def test_spec_says_what_sets_it_apart(tmp_path: Path) -> None:
    spec = open_source(str(save_source(tiny_gemma(), tmp_path))).spec
    assert (spec.attention_kind, spec.head_dim, spec.attention_scale) == ("MQA", 32, 32**-0.5)
    assert spec.hidden_act == TANH
    assert features(spec) == ("1 is added to the norms' weights", "embeddings are scaled by 8")


def test_the_name_that_google_gave_the_tanh_form_is_read_as_such_or_refused(tmp_path: Path) -> None:
    """Releases of transformers that take it for the exact gelu would make another model of Google's first files."""
    folder = _with_fields(tmp_path, hidden_act="gelu", hidden_activation=TANH)
    if transformers.GemmaConfig(hidden_act="gelu").hidden_act == TANH:
        assert open_source(str(folder)).spec.hidden_act == TANH
    else:
        with pytest.raises(UnsupportedArchitectureError, match="hidden_act"):
            open_source(str(folder))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"hidden_act": "silu", "hidden_activation": TANH}, "hidden_act is 'silu' and hidden_activation 'gelu_py"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
    ],
)
def test_what_would_be_another_model_is_refused(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = _with_fields(tmp_path, **fields)
    with pytest.raises(UnsupportedArchitectureError, match=said):
        open_source(str(folder))


def _with_fields(tmp_path: Path, **fields: Any) -> Path:
    folder = save_source(tiny_gemma(), tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder

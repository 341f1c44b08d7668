from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from mla_convert.errors import SourceError, UnsupportedArchitectureError
from mla_convert.sources import open_source
from tests.sources.conformance import AdapterConformance
from tests.tiny import save_source, tiny_gemma3

LOCAL = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}


class TestGemma3(AdapterConformance):
    variants: ClassVar = {
        "GQA": lambda: tiny_gemma3("GQA"),
        "MHA-untied-bias": lambda: tiny_gemma3("MHA", tied=False, attention_bias=True),
        "MQA-capped": lambda: tiny_gemma3("MQA", final_logit_softcapping=4.0),
        "head-dim": lambda: tiny_gemma3(head_dim=32),
        "bfloat16": lambda: tiny_gemma3(dtype=torch.bfloat16),
    }
    rotary_path = None  # by layer type; see below


def test_every_layer_has_the_rope_of_its_type(tmp_path: Path) -> None:
    spec = open_source(str(save_source(tiny_gemma3(), tmp_path))).spec
    assert spec.windows == (8, 8, None)
    for layer, (theta, factor) in enumerate([(1e4, 1.0), (1e4, 1.0), (1e6, 8.0)]):
        for pair, frequency in enumerate(spec.rope_of(layer).inv_freq):
            assert frequency == pytest.approx(theta ** (-2 * pair / 16) / factor, rel=1e-6)
    assert spec.rope == spec.rope_of(2)


def test_norms_of_heads_have_their_offset(tmp_path: Path) -> None:
    source = open_source(str(save_source(tiny_gemma3(), tmp_path)))
    stored, read = source.tensor("model.layers.0.self_attn.q_norm.weight"), source.attention(0).query_norm
    assert read is not None
    assert torch.equal(read, (stored + 1).expand(4, 16))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"attn_logit_softcapping": 50.0}, "attention scores are capped"),
        ({"layer_types": ["full_attention", "sliding_attention", "chunked_attention"]}, "chunked_attention"),
        ({"rope_parameters": {"sliding_attention": LOCAL, "full_attention": YARN}}, "scaled differently"),
        (
            {"rope_parameters": {"sliding_attention": LOCAL, "full_attention": LOCAL | {"partial_rotary_factor": 0.5}}},
            "a share of 0.5",
        ),
        (
            {"rope_parameters": {"sliding_attention": LOCAL, "full_attention": {**YARN, "rope_type": "dynamic"}}},
            "'dynamic'",
        ),
    ],
    ids=["both-directions", "scores-capped", "layer-types", "scaling", "partial", "dynamic"],
)
def test_what_cannot_be_expressed_is_refused(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    folder = save_source(tiny_gemma3(), tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    # transformers 5.17's config class is the first to stumble over a layer type without RoPE.
    with pytest.raises((SourceError, UnsupportedArchitectureError), match=said):
        open_source(str(folder))

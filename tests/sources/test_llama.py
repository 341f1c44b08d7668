from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file

from mla_convert.errors import UnsupportedArchitectureError
from mla_convert.sources import Dropped, open_source
from tests.sources.conformance import AdapterConformance
from tests.tiny import save_source, save_tensors, tiny_llama

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
# The second list holds beyond 16 tokens.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0 + 0.1 * pair for pair in range(8)],
    "long_factor": [2.0 + 0.5 * pair for pair in range(8)],
    "original_max_position_embeddings": 16,
}


class TestLlama(AdapterConformance):
    variants: ClassVar = {
        "MHA": lambda: tiny_llama("MHA"),
        "GQA-bias": lambda: tiny_llama("GQA", bias=True, mlp_bias=True),
        "MQA-tied": lambda: tiny_llama("MQA", tied=True),
        "llama3": lambda: tiny_llama("GQA", llama3=True, tied=True),
        "linear": lambda: tiny_llama(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
        "yarn": lambda: tiny_llama(rope_parameters=dict(YARN)),
        "dynamic": lambda: tiny_llama(rope_parameters=dict(DYNAMIC), max_position_embeddings=16),
        "longrope": lambda: tiny_llama(rope_parameters=dict(LONGROPE)),
        "head-dim": lambda: tiny_llama(head_dim=32),
        "bfloat16": lambda: tiny_llama(dtype=torch.bfloat16),
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("partial_rotary_factor", 0.5),
        ("attn_logit_softcapping", 50.0),
        ("use_qk_norm", True),
        ("quantization_config", {"quant_method": "gptq", "bits": 4}),
        ("num_key_value_heads", 3),
    ],
)
def test_attention_that_would_convert_wrongly_is_refused(tmp_path: Path, field: str, value: object) -> None:
    folder = save_source(tiny_llama(), tmp_path)
    _edit_config(folder, **{field: value})
    with pytest.raises(UnsupportedArchitectureError):
        open_source(str(folder))


def test_an_unknown_kind_of_rope_is_refused(tmp_path: Path) -> None:
    folder = save_source(tiny_llama(), tmp_path)
    _edit_config(folder, rope_parameters={"rope_type": "wavy", "rope_theta": 10000.0})
    with pytest.raises(UnsupportedArchitectureError, match="RoPE type 'wavy'"):
        open_source(str(folder))


def test_a_repeated_lm_head_is_dropped(tmp_path: Path) -> None:
    folder = save_source(tiny_llama(tied=True), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_tensors(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, folder)
    source = open_source(str(folder))
    assert source.spec.tie_word_embeddings
    assert isinstance(source.account()["lm_head.weight"], Dropped)
    assert [name for name, _ in source.copied(None)] == ["model.embed_tokens.weight", "model.norm.weight"]


def test_an_lm_head_of_its_own_unties_the_model(tmp_path: Path) -> None:
    folder = save_source(tiny_llama(tied=True), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_tensors(tensors | {"lm_head.weight": head}, folder)
    source = open_source(str(folder))
    assert not source.spec.tie_word_embeddings
    assert not source.config.tie_word_embeddings
    loaded = source.load_model(dtype=torch.float32)
    assert torch.equal(loaded.lm_head.weight, head)
    assert torch.equal(loaded.model.embed_tokens.weight, tensors["model.embed_tokens.weight"])


def test_an_older_rope_scaling_field_is_read(tmp_path: Path) -> None:
    folder = save_source(tiny_llama(), tmp_path)
    fields = json.loads((folder / "config.json").read_text())
    del fields["rope_parameters"]
    fields |= {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    (folder / "config.json").write_text(json.dumps(fields))
    rope = open_source(str(folder)).spec.rope
    assert rope.kind == "linear"
    assert rope.inv_freq[1] == pytest.approx(5000.0 ** (-2 / 16) / 4.0)


def _edit_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))

"""A converted folder read again: the layers that were written, and what is not one says so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mla_convert.errors import FormatError, SourceError
from mla_convert.export.converted import open_converted
from mla_convert.export.native import write_native
from mla_convert.mla.names import to_hf
from mla_convert.sources import open_source
from tests.export.exact import converted_layers, exact_layers, exact_shape
from tests.tiny import save_source, tiny_gemma2, tiny_llama, tiny_mistral, tiny_olmo2, tiny_qwen2, tiny_qwen3
from tests.tiny_families import tiny_bloom, tiny_gpt2, tiny_qwen2_moe

FAMILIES = {
    "llama": lambda: tiny_llama(),
    "bias": lambda: tiny_llama(bias=True, mlp_bias=True),
    "tied": lambda: tiny_llama(tied=True),
    "window": lambda: tiny_mistral(window=8),
    "qwen2": lambda: tiny_qwen2(window=8),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_and_description_are_those_that_were_written(tmp_path: Path, family: str) -> None:
    source = open_source(str(save_source(FAMILIES[family](), tmp_path / "source")))
    (tmp_path / "out").mkdir()
    layers = dict(exact_layers(source))
    write_native(source, layers.items(), exact_shape(source.spec), tmp_path / "out", dtype=torch.float32)
    model = open_converted(tmp_path / "out")
    for i, expected in layers.items():
        found, wanted = to_hf(model.layer(i)), to_hf(expected.to(torch.float32))
        assert found.keys() == wanted.keys()
        for name in wanted:
            torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=0)
        assert model.layer(i).inv_freq == pytest.approx(expected.inv_freq)
    for name in [
        "num_layers",
        "hidden_size",
        "intermediate_size",
        "vocab_size",
        "num_heads",
        "attention_scale",
        "rms_norm_eps",
        "hidden_act",
        "max_position_embeddings",
        "query_bias",
        "key_bias",
        "value_bias",
        "output_bias",
        "mlp_bias",
        "tie_word_embeddings",
        "windows",
        "dtype",
    ]:
        assert getattr(model.spec, name) == getattr(source.spec, name), name
    copied = [part.target for layer in (None, *range(source.spec.num_layers)) for _, part in source.copied(layer)]
    again = [part.target for layer in (None, *range(source.spec.num_layers)) for _, part in model.copied(layer)]
    assert sorted(again) == sorted(copied)


OTHERS = {
    "gemma2": tiny_gemma2,
    "qwen3": tiny_qwen3,
    "olmo2": tiny_olmo2,
    "qwen2-moe": tiny_qwen2_moe,
    "bloom": tiny_bloom,
    "gpt2": tiny_gpt2,
    "dynamic": lambda: tiny_llama(
        max_position_embeddings=24, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    ),
}


@pytest.mark.parametrize("family", OTHERS)
def test_other_decoders_are_described_as_they_were(tmp_path: Path, family: str) -> None:
    source = open_source(str(save_source(OTHERS[family](), tmp_path / "source")))
    (tmp_path / "out").mkdir()
    layers, shape = converted_layers(source)
    write_native(source, layers, shape, tmp_path / "out", dtype=torch.float32)
    model = open_converted(tmp_path / "out")
    assert model.shapes == (shape,) * source.spec.num_layers
    for name in ("block", "attention_softcap", "alibi_slopes", "qk_norm", "windows", "rms_norm_eps", "hidden_act"):
        assert getattr(model.spec, name) == getattr(source.spec, name), name
    update = source.spec.rope.update
    assert model.spec.rope.update == update
    for i, expected in layers:
        found, wanted = to_hf(model.layer(i)), to_hf(expected.to(torch.float32))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert model.layer(i).pairs == (None if update is None else expected.pairs)


def test_what_is_not_a_converted_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no config\.json"):
        open_converted(tmp_path)
    source = save_source(tiny_llama(), tmp_path / "source")
    with pytest.raises(FormatError, match="'llama' model"):
        open_converted(source)
    (source / "config.json").write_text("[")
    with pytest.raises(SourceError, match="not a JSON object"):
        open_converted(source)


def test_a_config_that_does_not_fit_the_weights_is_named(tmp_path: Path) -> None:
    source = open_source(str(save_source(tiny_llama(), tmp_path / "source")))
    (tmp_path / "out").mkdir()
    write_native(source, exact_layers(source), exact_shape(source.spec), tmp_path / "out", dtype=torch.float32)
    path = tmp_path / "out" / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"qk_nope_head_dim": fields["qk_nope_head_dim"] + 1}))
    with pytest.raises(SourceError, match=r"layers\.0\.self_attn\.kv_b_proj\.weight' is \[128, .*4 in all"):
        open_converted(tmp_path / "out")
    path.write_text(json.dumps(fields | {"rope_inv_freq": [[1.0]]}))
    with pytest.raises(SourceError, match="not a config of the native format"):
        open_converted(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("lm_head.weight", None),  # transformers would draw it at random
        ("model.layers.1.self_attn.kv_a_proj_with_mqa.bias", None),
        ("model.layers.0.post_attention_layernorm.weight", [65]),
        ("model.layers.0.mlp.gate.weight", [3]),
    ],
)
def test_tensors_that_are_not_those_of_the_config_are_named(tmp_path: Path, name: str, shape: list[int] | None) -> None:
    source = open_source(str(save_source(tiny_llama(bias=True), tmp_path / "source")))
    (tmp_path / "out").mkdir()
    write_native(source, exact_layers(source), exact_shape(source.spec), tmp_path / "out", dtype=torch.float32)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors.pop(name, None)
    if shape is not None:
        tensors[name] = torch.zeros(shape)
    save_file(tensors, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError, match=re.escape(f"'{name}' is {'absent' if shape is None else shape}")):
        open_converted(tmp_path / "out")

"""The source as the native model: it answers as transformers' class, and says so where a tensor has no place.

The conformance tests ask this of every family; here is what does not depend on one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mla_convert.errors import FormatError, SourceError, UnaccountedTensorError, VerificationError
from mla_convert.export.reading import checked_decoder
from mla_convert.pipeline import ConvertRequest, convert
from mla_convert.sources import Part, Source, open_source
from mla_convert.spec import BlockSpec
from tests.mla.native import cache_of
from tests.tiny import VOCAB_SIZE, save_source, tiny_gemma2, tiny_llama, tiny_mistral, tiny_qwen2, tiny_qwen3

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 24,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + pair for pair in range(8)],
}
MODELS = {
    "llama": lambda: tiny_llama(bias=True, mlp_bias=True, llama3=True),
    "mha": lambda: tiny_llama("MHA", tied=True),
    "mqa": lambda: tiny_llama("MQA"),
    "window": lambda: tiny_mistral(window=8),
    "qwen2": lambda: tiny_qwen2(window=8),
    "dynamic": lambda: tiny_llama(
        max_position_embeddings=24, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "longrope": lambda: tiny_llama(rope_parameters=LONGROPE),
}
# In units of the logits' standard deviation where that is above 1; float32, almost the same operations in one order.
TOLERANCE = 1e-5


def opened(model: Any, folder: Path) -> Source:
    return open_source(str(save_source(model, folder / "source")))


def prompt(length: int = 40, batch: int = 2) -> Tensor:
    return torch.randint(2, VOCAB_SIZE, (batch, length), generator=torch.Generator().manual_seed(1))


def difference(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return ((found - expected).abs().max() / expected.std().clamp_min(1.0)).item()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_its_logits_are_those_of_transformers(kind: str, implementation: str, tmp_path: Path) -> None:
    source = opened(MODELS[kind](), tmp_path)
    model, decoder = source.load_model(dtype=torch.float32), source.load_decoder(dtype=torch.float32)
    decoder.set_attn_implementation(implementation)
    for length in (20, 40):  # below and beyond windows and original lengths
        ids = prompt(length)
        expected = model(ids, use_cache=False).logits
        assert expected.std() > 0.5
        assert difference(decoder(ids, use_cache=False).logits, expected) <= TOLERANCE
        mask = torch.ones_like(ids)
        mask[1, :6] = 0
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        padded = [
            m(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, 6:] for m in (model, decoder)
        ]
        assert difference(*padded) <= TOLERANCE


@pytest.mark.parametrize("kind", ["llama", "window", "qwen2"])
@torch.no_grad()
def test_it_may_keep_keys_and_values(kind: str, tmp_path: Path) -> None:
    decoder, ids = opened(MODELS[kind](), tmp_path).load_decoder(dtype=torch.float32), prompt()
    outputs = decoder(ids[:, :30], use_cache=True)
    rest = decoder(ids[:, 30:], past_key_values=cache_of(outputs)).logits
    assert difference(rest, decoder(ids, use_cache=False).logits[:, 30:]) <= TOLERANCE


def test_it_has_what_works_on_layers_asks_for(tmp_path: Path) -> None:
    decoder = opened(tiny_llama(tied=True), tmp_path).load_decoder(dtype=torch.bfloat16)
    assert len(decoder.base_model.layers) == len(decoder.get_decoder().layers) == 2
    assert decoder.get_output_embeddings().weight is decoder.get_input_embeddings().weight
    assert not decoder.training
    assert {parameter.dtype for parameter in decoder.parameters()} == {torch.bfloat16}
    assert decoder.model.rotary_emb.inv_freq.dtype == torch.float32


@torch.no_grad()
def test_attention_functions_are_told_what_is_done_to_scores(tmp_path: Path) -> None:
    """Calibration puts one of its own in place of torch's."""
    told: list[dict[str, Any]] = []

    def attend(_module: Any, query: Tensor, *_: Any, **options: Any) -> tuple[Tensor, None]:
        told.append(options)
        return query.transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register("told", attend)
    for make, names in ((tiny_gemma2, {"softcap"}), (tiny_qwen3, {"key_scale"}), (tiny_llama, set())):
        source = opened(make(), tmp_path / make.__name__)
        decoder = source.load_decoder(dtype=torch.float32)
        decoder.config._attn_implementation = "told"
        told.clear()
        decoder(prompt(), use_cache=False)
        assert all(names == options.keys() & {"softcap", "key_scale", "score_bias"} for options in told)
        assert all(options["scaling"] == source.spec.attention_scale for options in told)
        assert len(told) == source.spec.num_layers


@pytest.mark.parametrize("target", ["model.layers.0.mlp.gate.weight", "model.layers.0.mlp.down_proj.weight"])
def test_a_tensor_without_a_place_is_named(target: str, tmp_path: Path) -> None:
    source = opened(tiny_llama(), tmp_path)
    source.copied = lambda layer: iter([("model.layers.0.mlp.up_proj.weight", Part(target))])  # type: ignore[method-assign]
    with pytest.raises(UnaccountedTensorError, match=rf"up_proj\.weight' is to be '{target}'"):
        source.load_decoder(dtype=torch.float32)


def test_a_parameter_without_a_tensor_is_named(tmp_path: Path) -> None:
    source = opened(tiny_llama(), tmp_path)
    source.spec = replace(source.spec, block=BlockSpec(output_norms=True))
    with pytest.raises(UnaccountedTensorError, match="attention_output_layernorm"):
        source.load_decoder(dtype=torch.float32)


def test_layers_that_the_native_class_cannot_tell_apart_are_refused(tmp_path: Path) -> None:
    source = opened(tiny_llama(), tmp_path)
    rope = source.spec.rope
    source.spec = replace(source.spec, layer_ropes=(rope, replace(rope, attention_scaling=1.5)))
    with pytest.raises(FormatError, match="differ in their scaling"):
        source.load_decoder(dtype=torch.float32)


def test_a_source_that_is_read_as_it_is_has_no_difference(tmp_path: Path) -> None:
    assert 0 <= checked_decoder(opened(tiny_llama(), tmp_path), prompt()).difference <= TOLERANCE


@pytest.mark.parametrize(
    "wrong",
    [
        lambda spec: replace(spec, attention_scale=1.02 * spec.attention_scale),
        lambda spec: replace(spec, rms_norm_eps=10 * spec.rms_norm_eps),
        lambda spec: replace(spec, attention_softcap=30.0),
        lambda spec: replace(spec, rope=replace(spec.rope, inv_freq=(*spec.rope.inv_freq[:-1], 0.0))),
        lambda spec: replace(spec, windows=(None, 8)),
        lambda spec: replace(spec, hidden_act="gelu"),
        lambda spec: replace(spec, block=BlockSpec(residual_scale=0.99)),
        lambda spec: replace(spec, block=BlockSpec(parallel_residual=True)),
    ],
    ids=["scale", "eps", "softcap", "rope", "window", "activation", "residuals", "parallel"],
)
def test_a_wrong_reading_is_caught(wrong: Any, tmp_path: Path) -> None:
    source = opened(tiny_llama(), tmp_path)
    source.spec = wrong(source.spec)
    with pytest.raises(VerificationError, match="LlamaForCausalLM otherwise than transformers"):
        checked_decoder(source, prompt())


def test_nothing_is_converted_after_a_wrong_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_convert.sources.llama import LlamaAdapter

    source = save_source(tiny_llama(), tmp_path / "source")
    monkeypatch.setattr(LlamaAdapter, "norm_eps", lambda _self, config: 100 * config.rms_norm_eps)
    with pytest.raises(VerificationError, match="otherwise than transformers"):
        convert(ConvertRequest(source=str(source), out=tmp_path / "out", recipe="exact"))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_weights_that_are_not_finite_are_the_sources_fault(tmp_path: Path) -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(SourceError, match="infinite or not a number"):
        checked_decoder(opened(model, tmp_path), prompt())

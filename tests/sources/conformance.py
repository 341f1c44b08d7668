"""What every source adapter must do. A family's test module subclasses :class:`AdapterConformance`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import mla_convert.sources.safetensors_reader as reader
from mla_convert.errors import UnaccountedTensorError
from mla_convert.sources import AttentionWeights, Converted, Copied, Source, open_source
from mla_convert.spec import SourceSpec
from tests.tiny import save_source, save_tensors


class Case:
    """A tiny model, the folder it was saved in, and that folder opened as a source."""

    def __init__(self, model: PreTrainedModel, folder: Path) -> None:
        self.model = model
        self.folder = save_source(model, folder)
        self.source: Source = open_source(str(self.folder))


class AdapterConformance:
    """Inherited by each adapter's tests, which are run once for every entry of ``variants``.

    Attributes:
        variants: by name, functions that build a tiny model of the family.
    """

    variants: ClassVar[Mapping[str, Callable[[], PreTrainedModel]]]

    def pytest_generate_tests(self, metafunc: Any) -> None:
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", list(metafunc.cls.variants), indirect=True, scope="class")

    @pytest.fixture(scope="class")
    @classmethod
    def case(cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
        return Case(cls.variants[request.param](), tmp_path_factory.mktemp(request.param))

    def test_every_tensor_has_a_role(self, case: Case) -> None:
        roles = case.source.account()
        assert set(roles) == set(load_file(case.folder / "model.safetensors"))
        for name, role in roles.items():
            if ".self_attn." in name:
                assert role == Converted(int(name.split(".")[2]))
            else:
                assert isinstance(role, Copied)
                assert [part.target for part in role.parts] == [name]

    def test_copied_covers_what_is_not_converted(self, case: Case) -> None:
        layers = (None, *range(case.source.spec.num_layers))
        copied = {name for layer in layers for name, _ in case.source.copied(layer)}
        attention = {name for name in case.source.tensor_names() if ".self_attn." in name}
        assert copied | attention == set(case.source.tensor_names())
        assert not copied & attention
        assert all(name.startswith("model.layers.1.") for name, _ in case.source.copied(1))

    def test_an_unknown_tensor_is_an_error_that_names_it(self, case: Case, tmp_path: Path) -> None:
        folder = save_source(case.model, tmp_path / "extra")
        tensors = load_file(folder / "model.safetensors")
        save_tensors(tensors | {"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}, folder)
        with pytest.raises(UnaccountedTensorError, match=r"unknown: model\.layers\.0\.self_attn\.q_norm\.weight"):
            open_source(str(folder))

    def test_a_missing_tensor_is_an_error_that_names_it(self, case: Case, tmp_path: Path) -> None:
        folder = save_source(case.model, tmp_path / "short")
        tensors = load_file(folder / "model.safetensors")
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_tensors(tensors, folder)
        with pytest.raises(UnaccountedTensorError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
            open_source(str(folder))

    def test_a_tensor_of_another_shape_is_an_error(self, case: Case, tmp_path: Path) -> None:
        folder = save_source(case.model, tmp_path / "shape")
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(3, 64)
        save_tensors(tensors, folder)
        with pytest.raises(UnaccountedTensorError, match=r"k_proj\.weight is \[3, 64\]"):
            open_source(str(folder))

    def test_inv_freq_buffers_are_dropped_for_a_reason(self, case: Case, tmp_path: Path) -> None:
        folder = save_source(case.model, tmp_path / "buffers")
        tensors = load_file(folder / "model.safetensors")
        name = "model.layers.0.self_attn.rotary_emb.inv_freq"
        save_tensors(tensors | {name: torch.ones(8)}, folder)
        assert "recomputed" in open_source(str(folder)).account()[name].reason

    def test_spec_describes_the_model(self, case: Case) -> None:
        spec, model = case.source.spec, case.model
        attention = model.model.layers[0].self_attn
        assert spec.architecture == type(model).__name__
        assert spec.num_layers == len(model.model.layers)
        assert (spec.vocab_size, spec.hidden_size) == tuple(model.model.embed_tokens.weight.shape)
        assert spec.intermediate_size == model.model.layers[0].mlp.up_proj.out_features
        assert spec.head_dim == attention.head_dim
        assert spec.num_heads * spec.head_dim == attention.q_proj.out_features
        assert spec.num_kv_heads * spec.head_dim == attention.k_proj.out_features
        assert spec.attention_scale == attention.scaling
        assert spec.rms_norm_eps == model.model.norm.variance_epsilon
        assert spec.tie_word_embeddings == (model.lm_head.weight is model.model.embed_tokens.weight)
        assert spec.query_bias == (attention.q_proj.bias is not None)
        assert spec.key_bias == (attention.k_proj.bias is not None)
        assert spec.value_bias == (attention.v_proj.bias is not None)
        assert spec.output_bias == (attention.o_proj.bias is not None)
        assert spec.mlp_bias == (model.model.layers[0].mlp.up_proj.bias is not None)
        assert f"torch.{spec.dtype}" == str(model.dtype)

    def test_frequencies_are_the_models_own(self, case: Case) -> None:
        rotary = case.model.model.rotary_emb
        assert torch.equal(torch.tensor(case.source.spec.rope.inv_freq), rotary.inv_freq.float())
        assert case.source.spec.rope.attention_scaling == rotary.attention_scaling
        assert case.source.spec.rope.dim == case.source.spec.head_dim

    def test_opening_reads_no_weights(self, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*args: object, **options: object) -> None:
            raise AssertionError("weights were read")

        monkeypatch.setattr(reader.SafetensorsCheckpoint, "read", refuse)
        source = open_source(str(case.folder))
        source.account()
        with pytest.raises(AssertionError, match="weights were read"):
            source.tensor("model.norm.weight")

    def test_tensors_are_the_stored_ones(self, case: Case) -> None:
        for name, stored in load_file(case.folder / "model.safetensors").items():
            read = case.source.tensor(name)
            assert read.dtype == stored.dtype
            assert torch.equal(read, stored)

    def test_attention_weights_reproduce_the_attention_module(self, case: Case) -> None:
        spec = case.source.spec
        hidden = torch.randn(2, 24, spec.hidden_size, generator=torch.Generator().manual_seed(1))
        for layer in range(spec.num_layers):
            expected = _module_output(case, layer, hidden)
            actual = _attend(case.source.attention(layer), hidden.double(), spec, spec.windows[layer])
            # The module runs in float32 (or was stored in less, and read back up): sums of 64 terms of order one.
            assert torch.allclose(actual.float(), expected, rtol=0, atol=2e-5)

    def test_loaded_model_answers_exactly_as_from_pretrained(self, case: Case) -> None:
        ids = torch.randint(0, case.source.spec.vocab_size, (2, 40), generator=torch.Generator().manual_seed(2))
        for dtype in (torch.float32, torch.bfloat16):
            reference = AutoModelForCausalLM.from_pretrained(case.folder, dtype=dtype, attn_implementation="sdpa")
            loaded = case.source.load_model(dtype=dtype)
            assert type(loaded) is type(reference)
            assert loaded.dtype == dtype
            assert not loaded.training
            with torch.no_grad():
                assert torch.equal(loaded(ids).logits, reference(ids).logits)
            assert loaded.generation_config.eos_token_id == reference.generation_config.eos_token_id

    def test_tied_embeddings_are_one_parameter(self, case: Case) -> None:
        loaded = case.source.load_model(dtype=torch.float32)
        tied = loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert tied == case.source.spec.tie_word_embeddings
        copied = dict(case.source.copied(None))
        assert ("lm_head.weight" in copied) == (not tied)


def _module_output(case: Case, layer: int, hidden: torch.Tensor) -> torch.Tensor:
    """What transformers' eager attention module answers in float32, its mask built from the model's own window."""
    model = AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch.float32, attn_implementation="eager")
    positions = torch.arange(hidden.shape[1])[None]
    module = model.model.layers[layer].self_attn
    window = getattr(module, "sliding_window", getattr(module.config, "sliding_window", None))
    with torch.no_grad():
        cos_sin = model.model.rotary_emb(hidden, positions)
        mask = _mask(hidden.shape[1], window).to(hidden.dtype)[None, None]
        return module(hidden, position_embeddings=cos_sin, attention_mask=mask)[0]


def _mask(length: int, window: int | None) -> torch.Tensor:
    """0 where query row s may see key column t, minus infinity elsewhere."""
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    return torch.zeros(length, length, dtype=torch.float64).masked_fill(~seen, -torch.inf)


def _attend(weights: AttentionWeights, hidden: torch.Tensor, spec: SourceSpec, window: int | None) -> torch.Tensor:
    """Attention from its definition, in float64: pairs rotated as complex numbers, one head at a time."""
    length = hidden.shape[1]
    angles = torch.arange(length, dtype=torch.float64)[:, None] * torch.tensor(spec.rope.inv_freq, dtype=torch.float64)
    turn = torch.polar(torch.full_like(angles, spec.rope.attention_scaling), angles)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        turned = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * turn
        return torch.cat((turned.real, turned.imag), dim=-1)

    def project(weight: torch.Tensor, bias: torch.Tensor | None, head: int) -> torch.Tensor:
        out = hidden @ weight[head].double().T
        return out if bias is None else out + bias[head].double()

    result = torch.zeros_like(hidden)
    share = spec.num_heads // spec.num_kv_heads
    for head in range(spec.num_heads):
        query = rotate(project(weights.w_q, weights.b_q, head))
        key = rotate(project(weights.w_k, weights.b_k, head // share))
        value = project(weights.w_v, weights.b_v, head // share)
        scores = query @ key.transpose(-1, -2) * spec.attention_scale + _mask(length, window)
        result += torch.softmax(scores, dim=-1) @ value @ weights.w_o[:, head].double().T
    return result if weights.b_o is None else result + weights.b_o.double()

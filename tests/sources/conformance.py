"""What every source adapter must do. A family's test module subclasses :class:`AdapterConformance`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import mla_convert.sources.safetensors_reader as reader
from mla_convert.errors import UnaccountedTensorError
from mla_convert.sources import Converted, Copied, Dropped, Source, open_source
from tests.sources.attend import attend
from tests.sources.conversion import ConversionConformance
from tests.tiny import save_source, save_tensors

# Tokens of a text: the first is shorter than every window and original context in the variants, the second longer.
LENGTHS = (7, 40)


class Case:
    """A tiny model, the folder it was saved in, and that folder opened as a source."""

    def __init__(self, model: PreTrainedModel, folder: Path) -> None:
        self.model = model
        self.folder = save_source(model, folder)
        self.source: Source = open_source(str(self.folder))

    def stored(self) -> dict[str, Tensor]:
        """The tensors of the folder."""
        return load_file(self.folder / "model.safetensors")

    def load(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """The folder as transformers reads it; softcaps are what only its eager attention has in every release."""
        eager = self.source.spec.attention_softcap is not None or not type(self.model)._supports_sdpa
        implementation = "eager" if eager else "sdpa"
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype, attn_implementation=implementation)


class AdapterConformance(ConversionConformance):
    """Inherited by each adapter's tests, which are run once for every entry of ``variants``.

    Attributes:
        variants: by name, functions that build a tiny model of two layers or more of the family.
        attention_path: where the attention of a layer is in transformers' model.
        output_path: its last projection, below ``attention_path``: what it answers is what attention adds.
        stored_attention: what the names of a layer's stored attention tensors begin with, dot included.
        rotary_path: where transformers' model has its rotary module with ``inv_freq``; None where it has none, or
            several sets of frequencies.
        dropped: a tensor that old checkpoints of the family hold and that is not needed, and its shape; None for none.
    """

    variants: ClassVar[Mapping[str, Callable[[], PreTrainedModel]]]
    attention_path: ClassVar[str] = "model.layers.{}.self_attn"
    output_path: ClassVar[str] = "o_proj"
    stored_attention: ClassVar[str] = "model.layers.{}.self_attn."
    rotary_path: ClassVar[str | None] = "model.rotary_emb"
    dropped: ClassVar[tuple[str, tuple[int, ...]] | None] = ("model.layers.0.self_attn.rotary_emb.inv_freq", (8,))

    def pytest_generate_tests(self, metafunc: Any) -> None:
        if "case" not in metafunc.fixturenames:
            return
        first, *others = metafunc.cls.variants
        dear = getattr(metafunc.function, "dear", False)
        marks = (pytest.mark.slow,) if dear else ()
        variants = [first, *(pytest.param(variant, marks=marks) for variant in others)]
        metafunc.parametrize("case", variants, indirect=True, scope="class")

    @pytest.fixture(scope="class")
    @classmethod
    def case(cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
        return Case(cls.variants[request.param](), tmp_path_factory.mktemp(request.param))

    # --- Roles ------------------------------------------------------------------------------------------------------

    def test_every_tensor_has_a_role(self, case: Case) -> None:
        roles = case.source.account()
        assert set(roles) == set(case.stored()) == set(case.source.tensor_names())
        layers = range(case.source.spec.num_layers)
        for name, role in roles.items():
            owners = [layer for layer in layers if name.startswith(self.stored_attention.format(layer))]
            assert isinstance(role, Converted if owners else Copied | Dropped), name
            if owners:
                assert role == Converted(owners[0])

    def test_copied_parts_are_disjoint_and_cover_their_tensors(self, case: Case) -> None:
        targets: list[str] = []
        stored = case.stored()
        for layer in (None, *range(case.source.spec.num_layers)):
            taken: dict[str, int] = {}
            for name, part in case.source.copied(layer):
                assert layer is None or part.target.startswith(f"model.layers.{layer}.")
                targets.append(part.target)
                taken[name] = taken.get(name, 0) + part.take(stored[name]).numel()
            assert taken == {name: stored[name].numel() for name in taken}
        assert len(set(targets)) == len(targets)
        assert "model.embed_tokens.weight" in targets
        assert ("lm_head.weight" in targets) == (not case.source.spec.tie_word_embeddings)

    def test_copied_parts_are_the_native_parameters_outside_attention(self, case: Case) -> None:
        decoder = case.source.load_decoder(dtype=torch.float32)
        native = {name: parameter for name, parameter in decoder.named_parameters() if ".self_attn." not in name}
        stored = case.stored()
        layers = (None, *range(case.source.spec.num_layers))
        parts = {part.target: part.take(stored[name]) for layer in layers for name, part in case.source.copied(layer)}
        assert set(parts) == set(native)
        for name, parameter in native.items():
            assert torch.equal(parameter, parts[name].float()), name

    def test_an_unknown_tensor_is_an_error_that_names_it(self, case: Case, tmp_path: Path) -> None:
        name = self.stored_attention.format(0) + "unheard_of.weight"
        with pytest.raises(UnaccountedTensorError, match=rf"unknown: {name}"):
            _reopen(case, tmp_path, case.stored() | {name: torch.ones(16)})

    def test_a_missing_tensor_is_an_error_that_names_it(self, case: Case, tmp_path: Path) -> None:
        copied = [name for name, _ in case.source.copied(1)]
        converted = self._converted(case, 0)
        for name in (copied[0], copied[-1], converted[0], converted[-1]):
            tensors = case.stored()
            del tensors[name]
            with pytest.raises(UnaccountedTensorError, match=rf"missing: {name}"):
                _reopen(case, tmp_path, tensors)

    def test_a_tensor_of_another_shape_is_an_error(self, case: Case, tmp_path: Path) -> None:
        for name in (self._converted(case, 0)[0], next(name for name, _ in case.source.copied(0))):
            with pytest.raises(UnaccountedTensorError, match=rf"{name} is \[3, 5\]"):
                _reopen(case, tmp_path, case.stored() | {name: torch.zeros(3, 5)})

    def test_what_is_not_needed_is_dropped_for_a_reason(self, case: Case, tmp_path: Path) -> None:
        if self.dropped is None:
            pytest.skip("the family's checkpoints never held more than their weights")
        name, shape = self.dropped
        role = _reopen(case, tmp_path, case.stored() | {name: torch.ones(shape)}).account()[name]
        assert isinstance(role, Dropped)
        assert role.reason

    # --- The description --------------------------------------------------------------------------------------------

    def test_spec_describes_the_model(self, case: Case) -> None:
        spec, model = case.source.spec, case.model
        assert spec.architecture == type(model).__name__
        layers = range(spec.num_layers)
        assert all(self._attention_of(model, layer) is not None for layer in layers)
        with pytest.raises(AttributeError):
            self._attention_of(model, spec.num_layers)
        embeddings = model.get_input_embeddings().weight
        assert (spec.vocab_size, spec.hidden_size) == tuple(embeddings.shape)
        assert spec.tie_word_embeddings == (model.get_output_embeddings().weight is embeddings)
        assert f"torch.{spec.dtype}" == str(model.dtype)
        assert len(spec.windows) == spec.num_layers
        assert _norm_eps(model) == {spec.rms_norm_eps}

    def test_attention_weights_have_the_shapes_of_the_spec(self, case: Case) -> None:
        spec = case.source.spec
        heads, groups, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        for layer in range(spec.num_layers):
            weights = case.source.attention(layer)
            assert weights.w_q.shape == (heads, dim, spec.hidden_size)
            assert weights.w_k.shape == weights.w_v.shape == (groups, dim, spec.hidden_size)
            assert weights.w_o.shape == (spec.hidden_size, heads, dim)
            for bias, there in (
                (weights.b_q, spec.query_bias),
                (weights.b_k, spec.key_bias),
                (weights.b_v, spec.value_bias),
                (weights.b_o, spec.output_bias),
                (weights.query_norm, spec.qk_norm is not None),
                (weights.key_norm, spec.qk_norm is not None),
            ):
                assert (bias is not None) == there

    def test_frequencies_are_the_models_own(self, case: Case) -> None:
        rope = case.source.spec.rope
        assert len(rope.inv_freq) == case.source.spec.head_dim // 2
        assert not any(rope.inv_freq[rope.dim // 2 :])
        if self.rotary_path is None or rope.dim == 0:
            return
        rotary = case.model.get_submodule(self.rotary_path)
        assert torch.equal(torch.tensor(rope.inv_freq[: rope.dim // 2]), rotary.inv_freq.float())
        assert rope.attention_scaling == getattr(rotary, "attention_scaling", 1.0)

    # --- Reading ----------------------------------------------------------------------------------------------------

    def test_opening_reads_no_weights(self, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*args: object, **options: object) -> None:
            raise AssertionError("weights were read")

        monkeypatch.setattr(reader.SafetensorsCheckpoint, "read", refuse)
        source = open_source(str(case.folder))
        source.account()
        with pytest.raises(AssertionError, match="weights were read"):
            source.tensor(source.tensor_names()[0])

    def test_tensors_are_the_stored_ones(self, case: Case) -> None:
        for name, stored in case.stored().items():
            read = case.source.tensor(name)
            assert read.dtype == stored.dtype
            assert torch.equal(read, stored)

    @pytest.mark.parametrize("length", LENGTHS)
    def test_attention_weights_reproduce_the_attention_module(self, case: Case, length: int) -> None:
        spec = case.source.spec
        for layer, (hidden, expected) in enumerate(self._attention_calls(case.load(), length)):
            actual = attend(case.source.attention(layer), hidden.double(), spec, layer)
            # transformers runs in float32, of weights stored in it or in less: rounding of sums of order one to ten.
            assert torch.allclose(actual.float(), expected, rtol=1e-5, atol=5e-5)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    def test_loaded_model_answers_exactly_as_from_pretrained(self, case: Case, dtype: torch.dtype) -> None:
        ids, reference = _ids(case, LENGTHS[-1]), case.load(dtype)
        loaded = case.source.load_model(dtype=dtype)
        assert type(loaded) is type(reference)
        assert loaded.dtype == dtype
        assert loaded.config._attn_implementation == reference.config._attn_implementation
        assert not loaded.training
        with torch.no_grad():
            assert torch.equal(loaded(ids).logits, reference(ids).logits)
        assert loaded.generation_config.eos_token_id == reference.generation_config.eos_token_id
        tied = loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
        assert tied == case.source.spec.tie_word_embeddings

    def test_decoder_answers_as_transformers(self, case: Case) -> None:
        decoder, reference = case.source.load_decoder(dtype=torch.float32), case.load()
        for length in LENGTHS:
            ids = _ids(case, length)
            with torch.no_grad():
                expected, actual = reference(ids).logits, decoder(ids, use_cache=False).logits
            # Two float32 programs of the same model: rounding, grown by a few layers.
            assert (actual - expected).abs().max() <= 1e-4

    # --- Of the family ----------------------------------------------------------------------------------------------

    def _attention_of(self, model: PreTrainedModel, layer: int) -> nn.Module:
        return model.get_submodule(self.attention_path.format(layer))

    def _converted(self, case: Case, layer: int) -> list[str]:
        return [name for name, role in case.source.account().items() if role == Converted(layer)]

    def _attention_calls(self, model: PreTrainedModel, length: int) -> Iterator[tuple[Tensor, Tensor]]:
        """What each layer's attention is given, and what it adds, while ``model`` reads a text."""
        given: list[Tensor] = []
        added: list[Tensor] = []
        for layer in range(model.config.num_hidden_layers):
            module = self._attention_of(model, layer)
            module.register_forward_pre_hook(
                lambda _, args, named: given.append(args[0] if args else named["hidden_states"]), with_kwargs=True
            )
            module.get_submodule(self.output_path).register_forward_hook(lambda _, args, out: added.append(out))
        ids = torch.randint(0, model.config.vocab_size, (2, length), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            model(ids, use_cache=False)
        return zip(given, added, strict=True)


def _reopen(case: Case, folder: Path, tensors: dict[str, Tensor]) -> Source:
    """The case with other tensors, opened again."""
    save_source(case.model, folder)
    save_tensors(tensors, folder)
    return open_source(str(folder))


def _ids(case: Case, length: int) -> Tensor:
    return torch.randint(0, case.source.spec.vocab_size, (2, length), generator=torch.Generator().manual_seed(2))


def _norm_eps(model: PreTrainedModel) -> set[float]:
    """The eps of every norm of the model."""
    norms = [module for module in model.modules() if "Norm" in type(module).__name__ and not list(module.children())]
    return {getattr(norm, "variance_epsilon", None) or norm.eps for norm in norms}

"""GGUF files: llama.cpp itself loads them and answers as the model does that they were made from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from transformers import PreTrainedModel

from mla_convert.errors import FormatError, VerificationError
from mla_convert.export import gguf_layer
from mla_convert.export.converted import ConvertedModel, open_converted
from mla_convert.export.native import write_native
from mla_convert.export.reload import reload_logits
from mla_convert.export.targets import gguf as target
from mla_convert.export.targets.gguf import GGUF
from mla_convert.export.targets.target import ExportOptions, ExportPlan
from mla_convert.export.verify import llamacpp_engine
from mla_convert.export.verify.answers import Answers, Difference, Probe, compare_answers
from mla_convert.progress import silent
from mla_convert.sources import open_source
from mla_convert.spec import MLAShape
from tests.export.exact import exact_layers, exact_shape, random_layers
from tests.export.test_native import prompt, source_logits
from tests.tiny import VOCAB_SIZE, save_source, tiny_llama, tiny_mistral

needs_llamacpp = pytest.mark.skipif(llamacpp_engine.version() is None, reason="xllamacpp is not installed")

# In float32 the two engines differ by rounding alone. A misplaced row or a wrong factor is off by more than 0.01.
ROUNDING = 1e-4

PROBE = Probe(tuple(prompt()[0].tolist()), new_tokens=8)

# Layers of their own sizes and slots, at every frequency at most one slot.
SHAPES = (MLAShape(24, 12, 16, 16), MLAShape(16, 6, 16, 16))
PLACES = ((0, 1, 2, 3, 5, 7), (4, 1, 6))


def exact(model: PreTrainedModel, folder: Path) -> ConvertedModel:
    """The native folder that holds the model's own attention."""
    source = open_source(str(save_source(model, folder / "source")))
    (folder / "native").mkdir()
    write_native(source, exact_layers(source), exact_shape(source.spec), folder / "native", dtype=torch.float32)
    return open_converted(folder / "native")


def uneven(folder: Path, **fields: Any) -> ConvertedModel:
    """A native folder whose layers use every part and differ in their sizes."""
    source = open_source(str(save_source(tiny_llama(**fields), folder / "source")))
    (folder / "native").mkdir()
    layers = {}
    for i, (shape, places) in enumerate(zip(SHAPES, PLACES, strict=True)):
        slots = tuple(source.spec.rope.inv_freq[place] for place in places)
        layers[i] = dict(random_layers(source.spec, shape, slots, biases=False))[i]
    write_native(source, layers.items(), SHAPES, folder / "native", dtype=torch.float32)
    return open_converted(folder / "native")


def export(model: ConvertedModel, folder: Path, **options: Any) -> tuple[ExportPlan, Path]:
    folder.mkdir()
    plan = GGUF.plan(model, ExportOptions(**options))
    assert plan.form == "gguf", plan.reasons
    GGUF.write(model, plan, ExportOptions(**options), folder, silent)
    return plan, folder


def difference(folder: Path, logits: torch.Tensor) -> Difference:
    """How llama.cpp's answers to the probe differ from logits [S vocabulary] of its prompt."""
    distributions = logits[:-1].double().log_softmax(-1)
    given = distributions.gather(1, torch.tensor(PROBE.prompt[1:])[:, None])[:, 0]
    first = int(logits[-1].argmax())
    found = llamacpp_engine.answer(folder, PROBE)
    assert found.distributions is not None
    return compare_answers(replace(found, continuation=found.continuation[:1]), Answers(given, (first,), distributions))


@needs_llamacpp
@pytest.mark.parametrize("fields", [{}, {"tied": True}, {"rms_norm_eps": 1e-6}], ids=["plain", "tied", "eps"])
def test_exact_weights_give_the_sources_answers(tmp_path: Path, fields: Mapping[str, Any]) -> None:
    model = tiny_llama("MQA", **fields)
    _, folder = export(exact(model, tmp_path), tmp_path / "out")
    found = difference(folder, source_logits(model, prompt())[0])
    assert found.max_logprob_difference <= ROUNDING
    assert found.kl is not None
    assert abs(found.kl) <= 1e-6
    assert found.agreed == 1


@needs_llamacpp
@pytest.mark.parametrize("sizes", [{}, {"kv_rank": 40, "rope_dim": 20}], ids=["smallest", "padded"])
def test_layers_of_different_sizes_answer_as_the_native_model(tmp_path: Path, sizes: Mapping[str, int]) -> None:
    model = uneven(tmp_path)
    plan, folder = export(model, tmp_path / "out", **sizes)
    assert (plan.kv_rank, plan.rope_dim) == ((40, 20) if sizes else (24, 16))
    assert plan.cache_bytes == 2 * 2 * (plan.kv_rank + plan.rope_dim)
    assert f"caches {plan.kv_rank + plan.rope_dim} numbers a token, where this model's layers need 29" in plan.notes[-1]
    assert difference(folder, reload_logits(model.folder, prompt())[0]).max_logprob_difference <= ROUNDING


@needs_llamacpp
def test_the_scale_of_scores_and_of_rotations_is_folded_in(tmp_path: Path) -> None:
    config = uneven(tmp_path).folder / "config.json"
    scales = {"attention_scale": 0.4, "rope_attention_scaling": 1.3}
    config.write_text(json.dumps(json.loads(config.read_text()) | scales))
    _, folder = export(open_converted(config.parent), tmp_path / "out")
    assert difference(folder, reload_logits(config.parent, prompt())[0]).max_logprob_difference <= ROUNDING


@needs_llamacpp
# An order of magnitude above what storing and computing in these types costs two layers of random weights.
@pytest.mark.parametrize(("dtype", "allowed"), [("float16", 1e-2), ("bfloat16", 5e-2), ("q8_0", 2e-1)])
def test_smaller_types_stay_close(tmp_path: Path, dtype: str, allowed: float) -> None:
    model = uneven(tmp_path)
    _, folder = export(model, tmp_path / "out", dtype=dtype)
    assert difference(folder, reload_logits(model.folder, prompt())[0]).mean_logprob_difference <= allowed


@needs_llamacpp
def test_a_file_with_another_eps_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = uneven(tmp_path)
    fields = target._fields
    key = "attention.layer_norm_rms_epsilon"
    monkeypatch.setattr(target, "_fields", lambda *given: {**fields(*given), key: 1e-6})
    _, folder = export(model, tmp_path / "out")
    assert difference(folder, reload_logits(model.folder, prompt())[0]).max_logprob_difference > 100 * ROUNDING


@needs_llamacpp
def test_rows_in_another_order_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = uneven(tmp_path)
    monkeypatch.setattr(gguf_layer, "interleaved", torch.arange)
    _, folder = export(model, tmp_path / "out")
    assert difference(folder, reload_logits(model.folder, prompt())[0]).max_logprob_difference > 100 * ROUNDING


@needs_llamacpp
def test_the_continuation_is_the_models_and_goes_on_past_the_end_of_a_text(tmp_path: Path) -> None:
    model = tiny_llama("MQA")
    with torch.no_grad():
        model.lm_head.weight[1] *= 3  # </s>, which is written now and then
    _, folder = export(exact(model, tmp_path), tmp_path / "out")
    found = llamacpp_engine.answer(folder, PROBE)
    tokens = list(PROBE.prompt)
    for token in found.continuation:
        assert token == int(source_logits(model, torch.tensor([tokens]))[0, -1].argmax())
        tokens.append(token)
    assert len(found.continuation) == PROBE.new_tokens
    assert 1 in found.continuation


@needs_llamacpp
def test_a_file_that_does_not_load_is_reported_in_llamacpps_words(tmp_path: Path) -> None:
    _, folder = export(uneven(tmp_path), tmp_path / "out")
    file = folder / target.FILE_NAME
    file.write_bytes(file.read_bytes().replace(b"attention.kv_lora_rank", b"attention.kv_lora_rink"))
    with pytest.raises(VerificationError, match=r"key not found in model: deepseek2\.attention\.kv_lora_rank"):
        llamacpp_engine.answer(folder, PROBE)


def test_a_folder_without_one_file_and_a_damaged_file_are_reported(tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match="holds 0 GGUF files"):
        llamacpp_engine.answer(tmp_path, PROBE)
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(VerificationError, match=r"model\.gguf"):
        llamacpp_engine.answer(tmp_path, PROBE)
    assert llamacpp_engine.version(tmp_path / "no-python") is None


def test_the_latent_is_what_is_cached_and_norms_stay_float32(tmp_path: Path) -> None:
    _, folder = export(uneven(tmp_path, tied=True), tmp_path / "out", dtype="q8_0")
    reader = GGUFReader(folder / target.FILE_NAME)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    values = {
        name: reader.fields[f"deepseek2.{name}"].contents()
        for name in ("attention.head_count_kv", "attention.key_length", "attention.value_length", "context_length")
    }
    assert values == {
        "attention.head_count_kv": 1,
        "attention.key_length": 24 + 16,
        "attention.value_length": 24,
        "context_length": 256,
    }
    types = {
        name: tensors[f"blk.0.{name}.weight"].tensor_type.name for name in ("attn_norm", "attn_kv_a_mqa", "attn_q")
    }
    assert types == {"attn_norm": "F32", "attn_kv_a_mqa": "F32", "attn_q": "Q8_0"}
    assert tensors["blk.0.attn_v_b.weight"].tensor_type.name == "F16"  # rows of 24, no block of 32
    assert "output.weight" not in tensors
    assert (folder / "tokenizer.json").is_file()


def test_scales_are_powers_of_two_which_round_nothing(tmp_path: Path) -> None:
    """In bfloat16 a row times a power of two is the rounded row times it."""
    model = uneven(tmp_path)
    layer = model.layer(0).to(torch.bfloat16)
    norm = torch.ones(64)
    parts = gguf_layer.attention_tensors(layer, norm, eps=1e-5, nope_factor=1.0, rope_factor=1.0)
    for name in ("attn_q.weight", "attn_kv_a_mqa.weight", "attn_output.weight"):
        assert torch.equal(parts[name].to(torch.bfloat16).double(), parts[name]), name


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: tiny_llama("MQA", bias=True), "have no biases, the model has some on queries, the latent"),
        (lambda: tiny_llama("MQA", mlp_bias=True), "some on the feed-forward layers"),
        (lambda: tiny_llama("MQA", hidden_act="gelu"), "compute SiLU, the model gelu"),
        (lambda: tiny_llama("GQA"), "Layer 0 has several RoPE slots at one frequency"),
        (lambda: tiny_llama("MQA", llama3=True), "not powers of one number"),
    ],
    ids=["bias", "mlp-bias", "gelu", "slots", "llama3"],
)
def test_what_llamacpp_would_compute_wrongly_is_refused(tmp_path: Path, model: Any, reason: str) -> None:
    plan = GGUF.plan(exact(model(), tmp_path), ExportOptions())
    assert plan.form is None
    assert any(reason in found for found in plan.reasons), plan.reasons


def test_sizes_that_are_too_small_are_refused(tmp_path: Path) -> None:
    plan = GGUF.plan(uneven(tmp_path), ExportOptions(kv_rank=20, rope_dim=14, form="stock"))
    assert plan.form is None
    assert len(plan.reasons) == 3


def test_a_window_becomes_the_context(tmp_path: Path) -> None:
    plan, folder = export(exact(tiny_mistral("MQA", window=48), tmp_path), tmp_path / "out")
    assert not plan.exact
    assert "no sliding window" in plan.notes[0]
    reader = GGUFReader(folder / target.FILE_NAME)
    assert reader.fields["deepseek2.context_length"].contents() == 48


def test_a_weight_that_float16_cannot_hold_is_named(tmp_path: Path) -> None:
    model = tiny_llama("MQA")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 4] = 1e6
    converted = exact(model, tmp_path)
    plan = GGUF.plan(converted, ExportOptions(dtype="float16"))
    with pytest.raises(FormatError, match=r"blk\.1\.ffn_down\.weight"):
        GGUF.write(converted, plan, ExportOptions(dtype="float16"), tmp_path, silent)


def test_the_tokens_of_the_file_are_the_embeddings_rows(tmp_path: Path) -> None:
    _, folder = export(uneven(tmp_path), tmp_path / "out")
    reader = GGUFReader(folder / target.FILE_NAME)
    assert len(reader.fields["tokenizer.ggml.tokens"].contents()) == VOCAB_SIZE
    table = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    assert np.asarray(table.data).shape[0] == VOCAB_SIZE

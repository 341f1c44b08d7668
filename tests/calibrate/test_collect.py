"""Calibration's forward moments against a decoder written out by hand and transformers' own; what it leaves behind."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mla_convert.calibrate.collect import collect
from mla_convert.calibrate.statistics import merge
from mla_convert.errors import SourceError
from mla_convert.sources import open_source
from mla_convert.spec import SourceSpec
from tests.calibrate.by_hand import Decoder, Layer
from tests.calibrate.models import Tiny, as_pairs, close, contexts, described, stacked
from tests.tiny import VOCAB_SIZE, save_source, tiny_llama

# The models compute in float32 (norms, rotary angles and softmax do whatever the weights' type); two layers of
# random weights amplify its 6e-8 to some 1e-6 of the activations, and sums of squares double that.
FORWARD = 2e-5


def test_the_decoder_by_hand_is_the_model(tiny: Tiny) -> None:
    """What the other tests lean on."""
    tokens = contexts(1)
    with torch.no_grad():
        expected = tiny.model(tokens).logits[0].double()
    close(Decoder(tiny.model, tiny.spec).run(tokens[0])[0].detach(), expected, FORWARD)


def test_forward_moments_are_sums_over_tokens(tiny: Tiny) -> None:
    tokens = contexts(3)
    found = collect(tiny.model, tiny.spec, tokens, gradients=False, seed=0)
    runs = [Decoder(tiny.model, tiny.spec).run(row)[1] for row in tokens]
    assert len(found) == tiny.spec.num_layers
    for i, statistics in enumerate(found):
        layers = [run[i] for run in runs]
        ys = [stacked(layer.key, layer.value).detach() for layer in layers]
        received = [layer.weights.detach().square().sum((0, 1)) for layer in layers]
        assert statistics.tokens == tokens.numel()
        assert statistics.gradients is None
        close(statistics.key_value, sum(y.T @ y for y in ys), FORWARD)
        close(statistics.attended, sum(y.T @ (w[:, None] * y) for y, w in zip(ys, received, strict=True)), FORWARD)
        assert statistics.attended_weight == pytest.approx(sum(w.sum().item() for w in received), rel=FORWARD)
        queries = torch.cat([layer.query.detach() for layer in layers], dim=1)
        close(statistics.query, queries.mT @ queries, FORWARD)
        close(statistics.query_energy, as_pairs(queries).abs().square().sum(1).double(), FORWARD)
        close(statistics.rotation, sum(mean_rotation_sum(layer, tiny.spec) for layer in layers), FORWARD)


def mean_rotation_sum(layer: Layer, spec: SourceSpec) -> Tensor:
    """Σ_t |a_t|² Σ_s p_ts e^{i theta (s - t)}, one query and one pair at a time."""
    total = torch.zeros(spec.num_heads, spec.rope.dim // 2, dtype=torch.complex128)
    energy, weights = as_pairs(layer.query.detach()).abs().square(), layer.weights.detach()
    positions = torch.arange(weights.shape[-1], dtype=torch.float64)
    for t in range(weights.shape[1]):
        for pair, frequency in enumerate(spec.rope.inv_freq):
            angles = frequency * (positions - t)
            turns = torch.complex(angles.cos(), angles.sin())
            total[:, pair] += energy[:, t, pair] * (weights[:, t].to(turns.dtype) @ turns)
    return total


def test_moments_are_those_of_the_projections_outputs(tiny: Tiny) -> None:
    """Independent of any code for attention: what k_proj and v_proj give, before RoPE."""
    tokens = contexts(2)
    seen: dict[str, list[Tensor]] = {}
    hooks = [
        m.register_forward_hook(lambda _m, _i, out, name=name: seen.setdefault(name, []).append(out[0].double()))
        for name, m in tiny.model.named_modules()
        if name.endswith(("k_proj", "v_proj"))
    ]
    with torch.no_grad():
        for row in tokens:
            tiny.model(row[None])
    for hook in hooks:
        hook.remove()
    found = collect(tiny.model, tiny.spec, tokens, gradients=False, seed=0)
    for i, statistics in enumerate(found):
        y = torch.cat([torch.cat(seen[f"model.layers.{i}.self_attn.{p}_proj"]) for p in "kv"], dim=1)
        close(statistics.key_value, y.T @ y, FORWARD)


def test_attention_is_what_eager_attention_reports(tiny: Tiny) -> None:
    """Sliding windows included: the contexts are longer than the window of six."""
    tokens = contexts(2)
    found = collect(tiny.model, tiny.spec, tokens, gradients=False, seed=0)
    before = tiny.model.config._attn_implementation
    tiny.model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            attentions = tiny.model(tokens, output_attentions=True).attentions
    finally:
        tiny.model.set_attn_implementation(before)
    for statistics, weights in zip(found, attentions, strict=True):
        assert statistics.attended_weight == pytest.approx(weights.double().square().sum().item(), rel=FORWARD)


def test_mean_rotation_lies_in_the_unit_disc_and_is_one_where_nothing_turns(gqa: Tiny) -> None:
    found = collect(gqa.model, gqa.spec, contexts(2), gradients=False, seed=0)
    for statistics in found:
        rotation = statistics.mean_rotation
        assert rotation.abs().max() <= 1 + 1e-6
        # the slowest pair turns by 14 · 10000^(-7/8) = 0.004 radians at most
        assert (rotation[:, -1] - 1).abs().max() <= 0.005
        assert (rotation[:, 0] - 1).abs().min() > 0.05


def test_two_halves_merge_to_the_whole(gqa: Tiny) -> None:
    tokens = contexts(6)
    whole = collect(gqa.model, gqa.spec, tokens, gradients=False, seed=0)
    halves = [collect(gqa.model, gqa.spec, part, gradients=False, seed=0) for part in (tokens[:2], tokens[2:])]
    for first, second, expected in zip(*halves, whole, strict=True):
        merged = merge(first, second)
        assert merged.tokens == expected.tokens
        assert merged.attended_weight == pytest.approx(expected.attended_weight, rel=1e-12)
        for name in ("key_value", "attended", "query", "rotation", "query_energy"):
            # the same float64 terms in another order of summation
            close(getattr(merged, name), getattr(expected, name), 1e-12)


def state(model: PreTrainedModel) -> tuple[object, ...]:
    return (
        model.config._attn_implementation,
        [layer.self_attn.config._attn_implementation for layer in model.model.layers],
        [parameter.requires_grad for parameter in model.parameters()],
        [parameter.grad is None for parameter in model.parameters()],
        [hasattr(layer.self_attn, "calibration_recorder") for layer in model.model.layers],
        model.training,
    )


@pytest.fixture
def partly_frozen(tmp_path: Path) -> Tiny:
    model = tiny_llama("GQA")
    model.model.embed_tokens.weight.requires_grad_(False)
    model.set_attn_implementation("eager")
    return described(model, tmp_path)


@pytest.mark.parametrize("gradients", [False, True])
def test_the_model_is_as_it_was(partly_frozen: Tiny, gradients: bool) -> None:
    model, tokens = partly_frozen.model, contexts(2)
    before, weights = state(model), {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        logits = model(tokens).logits
    collect(model, partly_frozen.spec, tokens, gradients=gradients, seed=0)
    assert state(model) == before
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, logits)


@pytest.mark.parametrize("gradients", [False, True])
def test_the_model_is_as_it_was_after_an_interruption(partly_frozen: Tiny, gradients: bool) -> None:
    before = state(partly_frozen.model)

    def stop(stage: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(partly_frozen.model, partly_frozen.spec, contexts(4), gradients=gradients, seed=0, progress=stop)
    assert state(partly_frozen.model) == before


def test_the_model_is_as_it_was_after_a_failure_inside_it(partly_frozen: Tiny, monkeypatch) -> None:
    before = state(partly_frozen.model)

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(partly_frozen.model.model.layers[1].mlp, "forward", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        collect(partly_frozen.model, partly_frozen.spec, contexts(2), gradients=True, seed=0)
    monkeypatch.undo()
    assert state(partly_frozen.model) == before


@pytest.mark.parametrize("gradients", [False, True])
def test_progress_counts_every_context_once(gqa: Tiny, gradients: bool) -> None:
    calls: list[tuple[str, int, int]] = []
    collect(gqa.model, gqa.spec, contexts(4), gradients=gradients, seed=0, progress=lambda *c: calls.append(c))
    assert calls == [("calibrate", done, 4) for done in (1, 2, 3, 4)]


def test_predictions_that_are_not_finite_are_an_error_of_the_source(partly_frozen: Tiny) -> None:
    with torch.no_grad():
        partly_frozen.model.model.norm.weight[3] = math.nan
    before = state(partly_frozen.model)
    with pytest.raises(SourceError, match="not finite"):
        collect(partly_frozen.model, partly_frozen.spec, contexts(2), gradients=True, seed=0)
    assert state(partly_frozen.model) == before


@pytest.mark.parametrize("gradients", [False, True])
def test_weights_that_are_not_finite_are_an_error_of_the_source(tmp_path: Path, gradients: bool) -> None:
    source = open_source(str(save_source(tiny_llama(), tmp_path)))
    model = source.load_model(dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = math.nan
    windows = torch.randint(VOCAB_SIZE, (2, 16), generator=torch.Generator().manual_seed(0))
    with pytest.raises(SourceError, match="not finite"):
        collect(model, source.spec, windows, gradients=gradients, seed=0)


@pytest.mark.parametrize("gradients", [False, True])
def test_noise_counts_in_its_own_moment_alone(gqa: Tiny, gradients: bool) -> None:
    tokens, noise = contexts(2), contexts(3, seed=9)
    plain = collect(gqa.model, gqa.spec, tokens, gradients=gradients, seed=0)
    noisy = collect(gqa.model, gqa.spec, tokens, gradients=gradients, seed=0, noise=noise)
    alone = collect(gqa.model, gqa.spec, noise, gradients=False, seed=0)
    for without, with_noise, reference in zip(plain, noisy, alone, strict=True):
        close(with_noise.noise_attended, reference.attended, FORWARD)
        assert with_noise.noise_weight == pytest.approx(reference.attended_weight, rel=FORWARD)
        assert without.noise_weight == 0.0
        for name in ("tokens", "key_value", "attended", "query", "rotation"):
            assert torch.equal(torch.as_tensor(getattr(with_noise, name)), torch.as_tensor(getattr(without, name)))

"""Calibration against a decoder written out by hand, against transformers' own attention, and what it leaves behind."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mla_convert.calibrate import collect as module
from mla_convert.calibrate.collect import PAIR_SHARE, collect
from mla_convert.calibrate.statistics import LayerStatistics, merge
from mla_convert.errors import SourceError
from mla_convert.maths.decouple import substitute_rotation
from mla_convert.sources import open_source
from mla_convert.spec import SourceSpec
from tests.calibrate.by_hand import Decoder, Layer, loss
from tests.tiny import VOCAB_SIZE, save_source, tiny_llama, tiny_mistral, tiny_qwen2

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

MODELS = {
    "mha": lambda: tiny_llama("MHA"),
    "gqa": lambda: tiny_llama("GQA"),
    "mqa": lambda: tiny_llama("MQA"),
    "bias": lambda: tiny_llama("GQA", bias=True),
    "llama3": lambda: tiny_llama("GQA", llama3=True),
    "yarn": lambda: tiny_llama("GQA", rope_parameters=dict(YARN)),
    "window": lambda: tiny_mistral(window=6),
    "qwen2": lambda: tiny_qwen2(window=6),
}

# The models compute in float32 (norms, rotary angles and softmax do whatever the weights' type); two layers of
# random weights amplify its 6e-8 to some 1e-6 of the activations, and sums of squares double that.
FORWARD = 2e-5
# Gradients pass the same way twice, and differences of probabilities cancel.
BACKWARD = 2e-4


@dataclass(frozen=True)
class Tiny:
    model: PreTrainedModel
    spec: SourceSpec


@pytest.fixture(scope="module", params=MODELS)
def tiny(request, tmp_path_factory) -> Tiny:
    model = MODELS[request.param]()
    return Tiny(model, open_source(str(save_source(model, tmp_path_factory.mktemp("calibrate") / "source"))).spec)


@pytest.fixture(scope="module")
def gqa(tmp_path_factory) -> Tiny:
    model = tiny_llama("GQA")
    return Tiny(model, open_source(str(save_source(model, tmp_path_factory.mktemp("gqa") / "source"))).spec)


def contexts(count: int, length: int = 14, seed: int = 0) -> Tensor:
    return torch.randint(2, VOCAB_SIZE, (count, length), generator=torch.Generator().manual_seed(seed))


def stacked(keys: Tensor, values: Tensor) -> Tensor:
    """Keys over values of each token, head by head: [S 2·G·K]."""
    return torch.cat((keys.transpose(0, 1).flatten(1), values.transpose(0, 1).flatten(1)), dim=1)


def as_pairs(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.complex(x[..., :half], x[..., half:])


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """The largest difference is a small share of the largest number."""
    assert found.shape == expected.shape
    assert found.dtype in (torch.float64, torch.complex128)
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


def same(first: LayerStatistics, second: LayerStatistics) -> bool:
    return all(
        torch.equal(getattr(first, name), getattr(second, name))
        for name in ("key_value", "attended", "query", "rotation", "query_energy")
    )


# -- forward moments -----------------------------------------------------------------------------------------------


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


# -- gradients -----------------------------------------------------------------------------------------------------


class Labels:
    """The labels that calibration samples, in the order of its backward passes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drawn: list[Tensor] = []
        draw = module._sample

        def record(*arguments, **options):
            labels = draw(*arguments, **options)
            self.drawn.append(labels[:, 0])
            return labels

        monkeypatch.setattr(module, "_sample", record)


def gradients_by_hand(
    decoder: Decoder, tokens: Tensor, labels: Tensor, factors: dict[int, Tensor] | None
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each layer, the loss's gradients at keys before RoPE, at values and at each head's unrotated keys."""
    logits, layers = decoder.run(tokens, factors)
    places = [place for layer in layers for place in (layer.shift_key, layer.shift_value, layer.shift_unrotated)]
    found = torch.autograd.grad(loss(logits, labels), places)
    return [found[3 * i : 3 * i + 3] for i in range(len(layers))]  # type: ignore[misc]


def test_gradient_moments_are_those_of_autograd_through_the_definition(tiny: Tiny, monkeypatch) -> None:
    tokens = contexts(6)
    labels = Labels(monkeypatch)
    found = collect(tiny.model, tiny.spec, tokens, gradients=True, seed=3)
    first = math.ceil(PAIR_SHARE * len(tokens))
    assert 0 < first < len(tokens)
    assert [len(drawn) for drawn in labels.drawn] == [tokens.shape[1]] * len(tokens)
    decoder = Decoder(tiny.model, tiny.spec)

    gradients = [statistics.gradients for statistics in found]
    assert all(g is not None for g in gradients)
    pairs = [torch.zeros_like(g.pairs) for g in gradients if g is not None]
    for row, drawn in zip(tokens[:first], labels.drawn[:first], strict=True):
        for i, (at_key, _, at_unrotated) in enumerate(gradients_by_hand(decoder, row, drawn, None)):
            u = as_pairs(torch.cat((at_key, at_unrotated)))  # [G+H S F]
            pairs[i] += torch.einsum("asl,bsl->lab", u, u.conj())
    factors = {i: g.constants.conj() for i, g in enumerate(gradients) if g is not None}
    content = [torch.zeros_like(g.content) for g in gradients if g is not None]
    group = tiny.spec.num_heads // tiny.spec.num_kv_heads
    for row, drawn in zip(tokens[first:], labels.drawn[first:], strict=True):
        for i, (_, at_value, at_unrotated) in enumerate(gradients_by_hand(decoder, row, drawn, factors)):
            shared = at_unrotated.unflatten(0, (-1, group)).sum(1)  # heads of a group read one content key
            g = stacked(shared, at_value)
            content[i] += g.T @ g

    for i, g in enumerate(gradients):
        assert g is not None
        assert (g.pair_tokens, g.content_tokens) == (tokens[:first].numel(), tokens[first:].numel())
        close(g.pairs, pairs[i], BACKWARD)
        close(g.content, content[i], BACKWARD)
        fitted = substitute_rotation(g.pair_moment, tiny.spec.num_kv_heads, damping=module.CONSTANT_DAMPING)
        assert torch.equal(g.constants, fitted.constants)


def test_gradients_by_hand_are_finite_differences(gqa: Tiny) -> None:
    """The autograd that the last test leans on, against differences of the loss in float64."""
    decoder, tokens = Decoder(gqa.model, gqa.spec), contexts(1, length=8)[0]
    labels = contexts(1, length=8, seed=1)[0]
    exact = gradients_by_hand(decoder, tokens, labels, None)
    generator = torch.Generator().manual_seed(0)
    for layer in range(gqa.spec.num_layers):
        for which, name in enumerate(("shift_key", "shift_value", "shift_unrotated")):
            direction = torch.randn(exact[layer][which].shape, generator=generator, dtype=torch.float64)
            step = 1e-4
            with torch.no_grad():
                after, before = (
                    loss(decoder.run(tokens, shifts={(layer, name): sign * step * direction})[0], labels).item()
                    for sign in (1, -1)
                )
            # central differences: an error of step² times a third derivative of order one to a hundred
            expected = (exact[layer][which] * direction).sum().item()
            assert (after - before) / (2 * step) == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_a_single_context_serves_both_stages(gqa: Tiny) -> None:
    tokens = contexts(1)
    for statistics in collect(gqa.model, gqa.spec, tokens, gradients=True, seed=0):
        assert statistics.gradients is not None
        assert statistics.gradients.pair_tokens == statistics.gradients.content_tokens == tokens.numel()
        assert statistics.gradients.content.abs().max() > 0


def test_labels_come_from_the_seed_alone(gqa: Tiny) -> None:
    tokens = contexts(4)
    runs = [collect(gqa.model, gqa.spec, tokens, gradients=True, seed=seed) for seed in (5, 5, 6)]
    for one, again, other in zip(*runs, strict=True):
        assert one.gradients is not None and again.gradients is not None and other.gradients is not None  # noqa: PT018
        assert same(one, again)
        assert same(one, other)
        for name in ("pairs", "constants", "content"):
            assert torch.equal(getattr(one.gradients, name), getattr(again.gradients, name))
            assert not torch.equal(getattr(one.gradients, name), getattr(other.gradients, name))


def test_the_global_generator_is_left_alone(gqa: Tiny) -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    collect(gqa.model, gqa.spec, contexts(2), gradients=True, seed=0)
    assert torch.equal(torch.rand(1), expected)


def test_labels_follow_the_models_own_predictions(gqa: Tiny, monkeypatch) -> None:
    """Sampled, not taken from the text: the mean log-likelihood of labels is minus the predictions' entropy."""
    labels = Labels(monkeypatch)
    tokens = contexts(24, length=32)
    collect(gqa.model, gqa.spec, tokens, gradients=True, seed=0)
    with torch.no_grad():
        log_p = gqa.model(tokens).logits.double().log_softmax(-1)
    drawn = torch.stack(labels.drawn)
    entropy = -(log_p.exp() * log_p).sum(-1)
    surprise = -log_p.gather(-1, drawn[..., None])[..., 0]
    # variance of -log p under p, summed over independent positions: five standard errors
    variance = (log_p.exp() * log_p.square()).sum(-1) - entropy.square()
    error = (surprise - entropy).mean().abs()
    assert error <= 5 * variance.sum().sqrt() / drawn.numel()
    assert (-log_p[:, :-1].gather(-1, tokens[:, 1:, None])).mean() > entropy.mean() + 1


# -- merging -------------------------------------------------------------------------------------------------------


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


# -- what calibration leaves behind --------------------------------------------------------------------------------


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
    return Tiny(model, open_source(str(save_source(model, tmp_path / "source"))).spec)


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

"""Calibration's gradients against autograd through a decoder written out by hand, and its labels."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mla_convert.calibrate import collect as module
from mla_convert.calibrate.collect import HELD_OUT_EVERY, PAIR_SHARE, collect
from mla_convert.calibrate.statistics import LayerStatistics
from mla_convert.errors import StatisticsError
from mla_convert.maths.decouple import substitute_rotation
from tests.calibrate.by_hand import Decoder, loss
from tests.calibrate.models import Tiny, as_pairs, close, contexts, stacked

# The models compute in float32: two layers of random weights amplify its 6e-8 to some 1e-6 of the activations.
# Gradients pass the same way twice, and differences of probabilities cancel.
BACKWARD = 2e-4


def same(first: LayerStatistics, second: LayerStatistics) -> bool:
    return all(
        torch.equal(getattr(first, name), getattr(second, name))
        for name in ("key_value", "attended", "query", "rotation", "query_energy")
    )


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

    forward = collect(tiny.model, tiny.spec, tokens[:first], gradients=False, seed=0)
    for i, g in enumerate(gradients):
        assert g is not None
        assert (g.pair_tokens, g.content_tokens) == (tokens[:first].numel(), tokens[first:].numel())
        close(g.pairs, pairs[i], BACKWARD)
        close(g.content, content[i], BACKWARD)
        fitted = substitute_rotation(
            g.pair_moment, tiny.spec.num_kv_heads, damping=module.CONSTANT_DAMPING, towards=forward[i].mean_rotation
        )
        close(g.constants, fitted.constants, BACKWARD)


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


@pytest.mark.parametrize("count", [1, 5])
def test_a_backward_pass_changes_no_forward_moment(tiny: Tiny, count: int) -> None:
    """Attention is computed again on the way back, and a single context is read twice; the means stay."""
    tokens = contexts(count)
    forward = collect(tiny.model, tiny.spec, tokens, gradients=False, seed=0)
    both = collect(tiny.model, tiny.spec, tokens, gradients=True, seed=0)
    for one, other in zip(forward, both, strict=True):
        if count > 1:
            assert (one.tokens, other.tokens) == (tokens.numel(), tokens.numel())
        # the score of a key gains a product with zeros, which the float32 sum may order differently
        close(other.plain_moment, one.plain_moment, 1e-6)
        close(other.attended_moment(), one.attended_moment(), 1e-6)
        close(other.query / other.tokens, one.query / one.tokens, 1e-6)
        close(other.mean_rotation, one.mean_rotation, 1e-6)


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


def test_contexts_set_aside_count_nowhere_else(gqa: Tiny, monkeypatch) -> None:
    tokens = contexts(12)
    labels = Labels(monkeypatch)
    found = collect(gqa.model, gqa.spec, tokens, gradients=True, held_out=True, seed=3)
    first = math.ceil(PAIR_SHARE * len(tokens))
    aside = [first, first + HELD_OUT_EVERY]
    others = [i for i in range(len(tokens)) if i not in aside]
    assert aside[-1] < len(tokens)
    kept = collect(gqa.model, gqa.spec, tokens[others], gradients=False, seed=0)
    held = collect(gqa.model, gqa.spec, tokens[aside], gradients=False, seed=0)
    decoder = Decoder(gqa.model, gqa.spec)
    factors = {i: s.gradients.constants.conj() for i, s in enumerate(found) if s.gradients is not None}
    sums = {True: [0.0] * len(found), False: [0.0] * len(found)}
    for place in range(first, len(tokens)):
        for i, (_, at_value, at_unrotated) in enumerate(
            gradients_by_hand(decoder, tokens[place], labels.drawn[place], factors)
        ):
            g = stacked(at_unrotated.unflatten(0, (gqa.spec.num_kv_heads, -1)).sum(1), at_value)
            sums[place in aside][i] = sums[place in aside][i] + g.T @ g
    for i, statistics in enumerate(found):
        assert statistics.held_out is not None
        assert statistics.gradients is not None
        assert statistics.tokens == tokens[others].numel()
        assert statistics.held_out.content_tokens == tokens[aside].numel()
        assert statistics.gradients.content_tokens == tokens[first:].numel() - tokens[aside].numel()
        for name in ("key_value", "attended", "query", "rotation", "query_energy"):
            # a key's score gains a product with zeros, which the float32 sum may order differently
            close(getattr(statistics, name), getattr(kept[i], name), 1e-5)
        close(statistics.held_out.attended, held[i].attended, 1e-5)
        assert statistics.held_out.attended_weight == pytest.approx(held[i].attended_weight, rel=1e-5)
        close(statistics.gradients.content, sums[False][i], BACKWARD)
        close(statistics.held_out.content, sums[True][i], BACKWARD)


@pytest.mark.parametrize("texts", range(1, 7))
def test_of_texts_that_take_turns_each_is_set_aside(texts: int) -> None:
    stages = module.stages_of(128, gradients=True, held_out=True)
    aside = [place for stage, place in stages if stage == "held_out"]
    assert {place % texts for place in aside} == set(range(texts))
    assert [place for _, place in stages] == list(range(128))
    assert len(aside) == pytest.approx(96 / HELD_OUT_EVERY, abs=1)


@pytest.mark.parametrize("count", [1, 2])
def test_too_few_contexts_to_set_one_aside(gqa: Tiny, count: int) -> None:
    with pytest.raises(StatisticsError, match="leaves none") as caught:
        collect(gqa.model, gqa.spec, contexts(count), gradients=True, held_out=True, seed=0)
    assert caught.value.remedy
    found = collect(gqa.model, gqa.spec, contexts(3), gradients=True, held_out=True, seed=0)
    assert all(s.held_out is not None and s.gradients is not None and s.gradients.content_tokens for s in found)

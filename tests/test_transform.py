"""One layer's conversion in float64: scores and values against grouped-query attention written out."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mla_convert.calibrate.statistics import HeldOutStatistics
from mla_convert.errors import StatisticsError
from mla_convert.recipe import CalibrationRecipe, DecoupleRecipe, FactoriseRecipe, Recipe, load_recipe
from mla_convert.spec import MLAShape
from mla_convert.transform import convert_layer, slot_costs, split_layer
from tests.layer_case import SAMPLES, Case, case, mla_answers, projected, relative, source_answers
from tests.maths.samples import complex_normal, normal


def recipe(**changes: Any) -> Recipe:
    """Every choice spelt out, so that a change of the shipped recipes is no change here."""
    decouple = {"mixing": "complex", "slots": "cost", "constants": "fisher", "rope_share": 0.25, "damping": 0.01}
    factorise = {"moment": "attended", "metric": "fisher", "damping": 0.01, "prior": 0.0, "noise": 0.0}
    for key, value in changes.items():
        part = decouple if key in ("mixing", "slots", "constants") else factorise
        part[key] = value
    return Recipe("test", "", CalibrationRecipe(1, 2), DecoupleRecipe(**decouple), FactoriseRecipe(**factorise))


RECIPES = {
    "fisher": recipe(),
    "attention": recipe(constants="attention", metric="attention_output"),
    "mixed": recipe(metric="mixed"),
    "real-balanced": recipe(mixing="real", constants="one", moment="plain", metric="balanced"),
    "identity": recipe(constants="one", moment="plain", metric="identity"),
}


def converted(c: Case, rank: int, rope_dim: int, how: Recipe, **options: Any):
    dim = c.sizes[2]
    shape = MLAShape(rank, rope_dim, dim, dim, key_scales(c))
    return convert_layer(c.weights, c.statistics, c.rope, shape, how, **options)


def key_scales(c: Case) -> int:
    if c.weights.key_norm is None:
        return 0
    return c.sizes[1] if c.weights.norm_scope == "head" else 1


def full_sizes(c: Case) -> tuple[int, int]:
    """C and R at which nothing is lost: a slot for all that turns, and the rest with all values in the latent."""
    _, groups, dim, width = c.sizes
    rope = groups * c.rope.dim
    width += int(c.weights.b_k is not None)
    return min(min(groups * dim - rope, width) + groups * dim, width), rope


SHAPES = {
    "mha": {"heads": 3, "groups": 3},
    "gqa": {"heads": 4, "groups": 2},
    "mqa": {"heads": 4, "groups": 1},
    "biased": {"heads": 4, "groups": 2, "biased": True},
    "yarn": {"heads": 4, "groups": 2, "scaling": 1.3},
    "narrow": {"heads": 4, "groups": 4, "dim": 6, "width": 10},  # K·G more than D: keys and values are dependent
    "narrow-biased": {"heads": 4, "groups": 4, "dim": 6, "width": 10, "biased": True},
    "partial": {"heads": 4, "groups": 2, "turning": 2, "scaling": 1.3, "biased": True},
    "no-rope": {"heads": 4, "groups": 2, "turning": 0},
    "normed": {"heads": 4, "groups": 2, "norms": "head"},
    "normed-mqa": {"heads": 4, "groups": 1, "norms": "head"},
    "normed-together": {"heads": 4, "groups": 2, "norms": "all", "biased": True, "turning": 2},
}


# Roots of moments with condition numbers up to 1e8 lose eight of sixteen digits, their inverses give some back.
EXACT = 1e-8


@pytest.mark.parametrize("how", RECIPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_with_all_slots_and_all_values_the_layer_is_the_source(shape: str, how: str) -> None:
    c = case(**SHAPES[shape])
    found = converted(c, *full_sizes(c), RECIPES[how])
    scores, values = source_answers(c, c.x[:20])
    mla_scores, mla_values = mla_answers(found.weights, c.rope, c.x[:20])
    assert relative(mla_scores, scores) <= EXACT
    assert relative(mla_values, values) <= EXACT
    assert found.errors == pytest.approx({"keys": 0, "values": 0, "truncated": 0, "moved": 0}, abs=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_exact_recipe_needs_weights_alone(shape: str) -> None:
    c = case(**SHAPES[shape])
    dim, width = c.sizes[2:]
    shape_of = MLAShape(*full_sizes(c), dim, dim, key_scales(c))
    found = convert_layer(c.weights, None, c.rope, shape_of, load_recipe("exact"))
    x = normal(15, width, seed=99)
    for mine, theirs in zip(mla_answers(found.weights, c.rope, x), source_answers(c, x), strict=True):
        assert relative(mine, theirs) <= 1e-12
    assert found.weights.shape == shape_of
    assert (found.weights.b_o is None) == (c.weights.b_o is None)


@pytest.mark.parametrize("how", ["fisher", "mixed", "attention"])
def test_any_input_is_answered_exactly_not_only_the_calibrations(how: str) -> None:
    c = case(biased=True)
    x = 3 * normal(10, c.sizes[3], seed=77)
    found = converted(c, 12, 12, RECIPES[how])
    for mine, theirs in zip(mla_answers(found.weights, c.rope, x), source_answers(c, x), strict=True):
        assert relative(mine, theirs) <= EXACT


@pytest.mark.parametrize("how", ["fisher", "attention", "identity"])
@pytest.mark.parametrize("scaling", [1.0, 1.3])
def test_without_slots_scores_are_turned_by_the_constants_alone(how: str, scaling: float) -> None:
    c = case(biased=True, scaling=scaling)
    heads, groups, dim, _ = c.sizes
    found = converted(c, 2 * groups * dim, 0, RECIPES[how])
    assert found.weights.w_kr.shape[0] == 0
    q, k = (projected(w, b, c.x[:12]) for w, b in ((c.weights.w_q, c.weights.b_q), (c.weights.w_k, c.weights.b_k)))
    a, z = (torch.complex(y[..., : dim // 2], y[..., dim // 2 :]) for y in (q, k))
    assert c.statistics.gradients is not None
    rho = torch.ones(heads, dim // 2) if how == "identity" else c.statistics.gradients.constants
    z = z.repeat_interleave(heads // groups, 1)
    expected = scaling**2 * torch.einsum("thl,hl,shl->hts", a.conj(), rho.to(a.dtype), z).real
    scores, values = mla_answers(found.weights, c.rope, c.x[:12])
    assert relative(scores, expected) <= EXACT
    assert relative(values, source_answers(c, c.x[:12])[1]) <= EXACT


@pytest.mark.parametrize("rope_dim", [2, 6, 10])
def test_at_no_distance_every_score_is_kept_whatever_has_slots(rope_dim: int) -> None:
    """With constants of 1, slots and content add up to the key where nothing has turned."""
    c = case()
    found = converted(c, 24, rope_dim, RECIPES["identity"])
    scores, _ = mla_answers(found.weights, c.rope, c.x[:10])
    expected, _ = source_answers(c, c.x[:10])
    same = torch.eye(10, dtype=torch.bool)
    assert relative(scores[:, same], expected[:, same]) <= EXACT
    assert relative(scores, expected) > 0.01


def test_mean_constants_beat_none_on_the_rotations_they_are_the_mean_of() -> None:
    """Scores drawn with random turns of mean rho are nearer to the constants' scores than to those without."""
    c = case(groups=4)
    heads, _, dim, _ = c.sizes
    pairs = dim // 2
    rho = c.statistics.mean_rotation
    spread = (1 - rho.abs().square()).sqrt()
    turns = rho + spread * complex_normal(200, heads, pairs, seed=3) / 2**0.5
    errors = {}
    for how in ("attention", "identity"):
        found = converted(c, 48, 0, RECIPES[how])
        scores, _ = mla_answers(found.weights, c.rope, c.x[:200])
        a, z = (
            torch.complex(y[..., :pairs], y[..., pairs:])
            for y in (projected(c.weights.w_q, None, c.x[:200]), projected(c.weights.w_k, None, c.x[:200]))
        )
        drawn = torch.einsum("nhl,nhl,nhl->hn", a.conj(), turns, z.roll(1, 0)).real
        before = torch.arange(200).roll(1)  # each query's score with the token before it
        errors[how] = (scores[:, torch.arange(200), before] - drawn).square().mean().item()
    assert errors["attention"] < 0.9 * errors["identity"]


def test_slots_keep_the_sources_frequencies() -> None:
    c = case()
    found = converted(c, 8, 8, RECIPES["fisher"])
    assert len(found.weights.inv_freq) == 4
    assert set(found.weights.inv_freq) <= set(c.rope.inv_freq)
    counts = [2, 0, 1]
    prescribed = converted(c, 8, 6, RECIPES["fisher"], counts=counts)
    assert prescribed.weights.inv_freq == (c.rope.inv_freq[0], c.rope.inv_freq[0], c.rope.inv_freq[2])


def test_one_slot_a_pair_mixes_heads_by_real_numbers_where_asked() -> None:
    c = case()
    how = recipe(mixing="real", slots="one_per_pair", constants="one", moment="plain", metric="balanced")
    found = converted(c, 12, 6, how)
    assert sorted(found.weights.inv_freq) == sorted(c.rope.inv_freq)
    for slot, frequency in enumerate(found.weights.inv_freq):
        pair = c.rope.inv_freq.index(frequency)
        for part, offset in ((slot, pair), (3 + slot, pair + 3)):  # real parts are mixtures of real parts alone
            rows = c.weights.w_k[:, offset]
            fit = torch.linalg.lstsq(rows.T, found.weights.w_kr[part][:, None]).solution
            assert relative(rows.T @ fit, found.weights.w_kr[part][:, None]) <= 1e-10


def test_costs_predict_what_is_moved() -> None:
    c = case(groups=4)
    costs = slot_costs(c.weights, c.statistics, c.rope, RECIPES["fisher"])
    assert costs.shape == (3, 4)
    assert (costs.diff(dim=1) <= 0).all()
    ranked = costs.flatten().sort(descending=True).values
    for slots in range(13):
        moved = converted(c, 8, 2 * slots, RECIPES["fisher"]).errors["moved"]
        assert moved == pytest.approx((ranked[slots:].sum() / ranked.sum()).item(), abs=1e-10)


@pytest.mark.parametrize("moment", ["plain", "attended"])
@pytest.mark.parametrize("biased", [False, True])
def test_lost_shares_are_those_of_the_samples(moment: str, biased: bool) -> None:
    c = case(biased=biased)
    _, groups, dim, _ = c.sizes
    weight = torch.ones(SAMPLES, dtype=torch.float64) if moment == "plain" else c.received
    v = projected(c.weights.w_v, c.weights.b_v, c.x)
    k = projected(c.weights.w_k, c.weights.b_k, c.x)
    group = c.sizes[0] // groups

    def share(found: Tensor, expected: Tensor) -> float:
        lost, whole = ((y.square().sum((1, 2)) * weight).sum() for y in (found - expected, expected))
        return (lost / whole).item()

    for rope_dim in (0, 6):
        found = converted(c, 7, rope_dim, recipe(moment=moment))
        w = found.weights
        latent = c.x @ w.w_dkv.T + (0 if w.b_dkv is None else w.b_dkv)
        values = torch.einsum("hvc,sc->shv", w.w_uv[::group], latent)
        assert found.errors["values"] == pytest.approx(share(values, v), rel=1e-6)
        assert 0.01 < found.errors["values"] < 1
        if rope_dim == 0:
            keys = torch.einsum("hvc,sc->shv", w.w_uk[::group], latent)
            assert found.errors["keys"] == pytest.approx(share(keys, k), rel=1e-6)
    assert dim == w.w_uv.shape[1]


@pytest.mark.parametrize("how", RECIPES)
def test_more_rank_never_truncates_more_and_more_slots_never_move_more(how: str) -> None:
    c = case()
    truncated = [converted(c, rank, 4, RECIPES[how]).errors["truncated"] for rank in range(1, 21)]
    assert all(after <= before + 1e-12 for before, after in itertools.pairwise(truncated))
    assert 1 > truncated[0] > 0.05
    assert truncated[-1] <= 1e-10
    moved = [converted(c, 4, rope_dim, RECIPES[how]).errors["moved"] for rope_dim in range(0, 13, 2)]
    assert all(after <= before + 1e-12 for before, after in itertools.pairwise(moved))
    assert (moved[0], moved[-1]) == (1.0, pytest.approx(0.0, abs=1e-12))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    groups=st.integers(1, 3),
    group=st.integers(1, 3),
    dim=st.sampled_from([2, 4, 6]),
    width=st.integers(4, 24),
    biased=st.booleans(),
    how=st.sampled_from(sorted(RECIPES)),
    data=st.data(),
)
def test_any_sizes_convert_to_the_sizes_asked_for(groups, group, dim, width, biased, how, data) -> None:
    c = case(groups * group, groups, dim, width, biased=biased, seed=data.draw(st.integers(0, 50)))
    rope_dim = 2 * data.draw(st.integers(0, groups * dim // 2))
    rank = data.draw(st.integers(1, 2 * groups * dim - rope_dim))
    found = converted(c, rank, rope_dim, RECIPES[how])
    assert found.weights.shape == MLAShape(rank, rope_dim, dim, dim)
    w = found.weights
    assert w.w_o.shape == (width, groups * group, dim)
    for tensor in (w.w_dkv, w.w_kr, w.w_uk, w.w_uv, w.w_uq, w.w_qr):
        assert tensor.dtype == torch.float64
        assert torch.isfinite(tensor).all()
    assert all(-1e-12 <= share <= 1 + 1e-9 for name, share in found.errors.items() if name in ("truncated", "moved"))
    assert (w.b_uq is None) == (not biased)
    assert (w.b_dkv is None) == (not biased)


@pytest.mark.parametrize("how", list(RECIPES))
def test_statistics_that_are_missing_are_asked_for(how: str) -> None:
    c = case()
    shape = MLAShape(8, 4, 6, 6)
    with pytest.raises(StatisticsError):
        convert_layer(c.weights, None, c.rope, shape, RECIPES[how])
    forward = replace(c.statistics, gradients=None)
    if RECIPES[how].needs_gradients:
        with pytest.raises(StatisticsError, match="gradients"):
            convert_layer(c.weights, forward, c.rope, shape, RECIPES[how])
    else:
        assert convert_layer(c.weights, forward, c.rope, shape, RECIPES[how]).weights.shape == shape


def test_the_source_is_left_as_it_was() -> None:
    c = case(biased=True)
    before = {name: t.clone() for name, t in vars(c.weights).items() if isinstance(t, Tensor)}
    converted(c, 8, 4, RECIPES["mixed"])
    assert all(torch.equal(t, before[name]) for name, t in vars(c.weights).items() if isinstance(t, Tensor))


def test_a_prior_is_the_gram_matrix_of_the_weights_at_its_share_of_the_trace() -> None:
    c = case(biased=True)
    rows = torch.cat((c.weights.w_k.flatten(0, 1), c.weights.w_v.flatten(0, 1)))
    assert c.weights.b_k is not None
    assert c.weights.b_v is not None
    rows = torch.cat((rows, torch.cat((c.weights.b_k.flatten(), c.weights.b_v.flatten()))[:, None]), dim=1)
    gram, moment = rows @ rows.T, c.statistics.plain_moment
    prior = replace(c.statistics, key_value=(moment + 0.3 * moment.trace() / gram.trace() * gram) * c.statistics.tokens)
    how = recipe(moment="plain", metric="identity", constants="one")
    expected = converted(replace(c, statistics=prior), 7, 6, how).weights
    found = converted(c, 7, 6, recipe(moment="plain", metric="identity", constants="one", prior=0.3)).weights
    x = normal(15, c.sizes[3], seed=5)
    for mine, theirs in zip(mla_answers(found, c.rope, x), mla_answers(expected, c.rope, x), strict=True):
        assert relative(mine, theirs) <= 1e-6  # the least prior is 1e-9 of the trace


def test_at_full_rank_directions_that_calibration_never_saw_are_kept() -> None:
    c = case()
    _, groups, dim, width = c.sizes
    seen = torch.zeros_like(c.statistics.attended)
    seen[0, 0] = 1.0  # one direction only
    narrow = replace(c, statistics=replace(c.statistics, attended=seen, attended_weight=1.0))
    found = converted(narrow, groups * dim, groups * dim, RECIPES["fisher"])
    x = normal(15, width, seed=5)
    for mine, theirs in zip(mla_answers(found.weights, c.rope, x), source_answers(c, x), strict=True):
        assert relative(mine, theirs) <= 1e-6


CANDIDATES = (0.001, 0.03, 0.3, 3.0, 100.0)


@pytest.mark.parametrize("seed", range(6))
def test_the_damping_chosen_has_the_least_error_on_what_was_held_out(seed: int) -> None:
    """Other inputs to the layer, with other gradients; errors are taken sample by sample."""
    c = case(seed=20 * seed, biased=seed % 2 == 0)
    heads, groups, _, width = c.sizes
    x, received = normal(SAMPLES, width, seed=900 + seed) + 0.1, normal(SAMPLES, seed=800 + seed).square()
    k, v = projected(c.weights.w_k, c.weights.b_k, x), projected(c.weights.w_v, c.weights.b_v, x)
    y = torch.cat((k.flatten(1), v.flatten(1)), dim=1)
    g = normal(SAMPLES, y.shape[1], seed=700 + seed) @ normal(y.shape[1], y.shape[1], seed=600 + seed)
    aside = HeldOutStatistics(y.T @ (received[:, None] * y), received.sum().item(), SAMPLES, g.T @ g)
    c = replace(c, statistics=replace(c.statistics, held_out=aside))
    content = y @ split_layer(c.weights, c.statistics, c.rope, 6, recipe()).residual.mT

    def energy(e: Tensor) -> Tensor:
        """Σ_n w_n mean over gradients of (g e_n)²."""
        return ((e @ g.mT).square().mean(1) * received).sum()

    shares = {}
    for damping in CANDIDATES:
        w = converted(c, 7, 6, recipe(damping=damping)).weights
        latent = x @ w.w_dkv.T + (0 if w.b_dkv is None else w.b_dkv)
        up = torch.cat((w.w_uk[:: heads // groups].flatten(0, 1), w.w_uv[:: heads // groups].flatten(0, 1)))
        shares[damping] = (energy(content - latent @ up.mT) / energy(content)).item()
    found = converted(c, 7, 6, recipe(damping=CANDIDATES))
    assert found.errors["held_out"] == pytest.approx(min(shares.values()), rel=1e-6)
    assert found.damping == min(shares, key=shares.__getitem__)
    assert max(shares.values()) > 1.01 * min(shares.values())
    alone = converted(c, 7, 6, recipe(damping=found.damping))
    assert torch.equal(alone.weights.w_dkv, found.weights.w_dkv)
    assert "held_out" not in alone.errors


def test_one_candidate_is_the_number() -> None:
    c = case()
    one, number = (converted(c, 7, 6, recipe(damping=damping)) for damping in ((0.3,), 0.3))
    assert torch.equal(one.weights.w_dkv, number.weights.w_dkv)
    assert torch.equal(one.weights.w_uk, number.weights.w_uk)
    assert one.errors == number.errors
    assert one.damping == number.damping == 0.3


def test_several_candidates_need_contexts_held_out() -> None:
    with pytest.raises(StatisticsError, match="hold no contexts out"):
        converted(case(), 7, 6, recipe(damping=CANDIDATES))

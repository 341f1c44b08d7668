"""Sizes by predicted loss: the prediction against what a conversion loses, the choice against all choices."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_convert.allocate import MOST_ROPE_DIMS, allocate, loss_curve, predict
from mla_convert.calibrate.statistics import HeldOutStatistics
from mla_convert.errors import StatisticsError
from mla_convert.maths.factorise import factorise_joint
from mla_convert.plan import ConversionPlan, largest_rank, make_plan
from mla_convert.recipe import AllocationRecipe, Recipe
from mla_convert.spec import MLAShape
from mla_convert.transform import convert_layer, split_layer
from tests.layer_case import Case, case
from tests.test_plan import spec
from tests.test_transform import recipe

DIM, GROUPS = 6, 2
CASES = [case(seed=100 * seed) for seed in range(3)]
SOURCE = replace(spec(heads=4, kv_heads=GROUPS, dim=DIM, hidden=30, layers=len(CASES)), rope=CASES[0].rope)


def allocating(**changes: Any) -> Recipe:
    how: dict[str, Any] = {"split": "predicted", "layers": "waterfill", "step": 2, "moved_weight": 0.5, "spread": 6}
    return replace(recipe(metric="mixed"), allocation=AllocationRecipe(**how | changes))


def sizes(how: Recipe, *, cache: float = 0.5, cases: list[Case] = CASES) -> tuple[ConversionPlan, tuple[MLAShape, ...]]:
    planned = make_plan(replace(SOURCE, num_layers=len(cases)), recipe=how, cache=cache)
    layers = [c.statistics for c in cases]
    return planned, allocate(planned, layers, lambda i: cases[i].weights)


def lost(c: Case, shape: MLAShape, how: Recipe) -> tuple[float, float]:
    """The moved cost, and tr(F (I - UD) E (I - UD)^T) of a conversion to that shape, written out."""
    assert c.statistics.gradients is not None
    split = split_layer(c.weights, c.statistics, c.rope, shape.rope_dim, how)
    damping = convert_layer(c.weights, c.statistics, c.rope, shape, how).damping
    factors = factorise_joint(split.content_moment, split.output_metric, shape.kv_rank, damping=damping)
    error = torch.eye(24, dtype=torch.float64) - factors.up @ factors.down
    fisher = c.statistics.gradients.content / c.statistics.gradients.content_tokens
    return split.slots.moved_cost, torch.trace(fisher @ error @ split.content_moment @ error.mT).item()


@pytest.mark.parametrize("dampings", [0.01, (0.0001, 0.1, 3.0)])
@pytest.mark.parametrize("rope_dim", [0, 4, 12])
def test_the_prediction_is_what_a_conversion_loses(rope_dim: int, dampings: Any) -> None:
    c = CASES[0]
    assert c.statistics.gradients is not None
    fresh = CASES[1].statistics
    assert fresh.gradients is not None
    held_out = HeldOutStatistics(fresh.attended, fresh.attended_weight, fresh.tokens, fresh.gradients.content)
    c = replace(c, statistics=replace(c.statistics, held_out=held_out))
    how = allocating()
    how = replace(how, factorise=replace(how.factorise, damping=dampings))
    curve = loss_curve(c.weights, c.statistics, c.rope, rope_dim, how)
    for rank in range(1, 24 - rope_dim + 1):
        moved, truncated = lost(c, MLAShape(rank, rope_dim, DIM, DIM), how)
        assert curve.moved == pytest.approx(max(moved, 0.0))
        # the truncation written out is a difference of numbers as large as the first
        assert curve.truncated[rank].item() == pytest.approx(truncated, abs=1e-10 * curve.truncated[0].item())
        assert curve.at(rank, 0.25) == pytest.approx(0.5 * (0.25 * curve.moved + curve.truncated[rank].item()))


def test_with_all_slots_and_values_nothing_is_lost() -> None:
    c = CASES[0]
    curve = loss_curve(c.weights, c.statistics, c.rope, 12, allocating())
    assert curve.at(12, 0.5) <= 1e-12 * curve.at(0, 0.5)
    moved = [loss_curve(c.weights, c.statistics, c.rope, dim, allocating()).moved for dim in range(0, 13, 2)]
    assert moved == sorted(moved, reverse=True)


def choices(budget: int, *, rope: int | None) -> list[MLAShape]:
    """Every size of C + R = `budget` that is allowed, with R = `rope` where it is given."""
    if rope is not None:
        fits = 1 <= budget - rope <= largest_rank(SOURCE, rope)
        return [MLAShape(budget - rope, rope, DIM, DIM)] if fits else []
    dims = range(0, budget // 2 + 1, 2)
    return [MLAShape(budget - r, r, DIM, DIM) for r in dims if r <= 12 and budget - r <= largest_rank(SOURCE, r)]


@pytest.mark.parametrize(
    ("layers", "split", "spread"),
    [
        ("uniform", "predicted", 6),
        *product(["waterfill"], ["share", "predicted"], [2, 6, 64]),
    ],
)
def test_no_other_sizes_of_that_sum_are_predicted_to_lose_less(layers: str, split: str, spread: int) -> None:
    how = allocating(layers=layers, split=split, spread=spread)
    planned, found = sizes(how)
    budget = planned.layers[0].cached
    assert budget == 12
    around = [budget] if layers == "uniform" else list(range(budget // 2, min(budget + spread, 24) + 1, 2))

    def cost(c: Case, shape: MLAShape) -> float:
        moved, truncated = lost(c, shape, how)
        return 0.5 * (0.5 * moved + truncated)

    rope = planned.layers[0].rope_dim if split == "share" else None
    least = [
        {b: min((cost(c, shape) for shape in choices(b, rope=rope)), default=math.inf) for b in around} for c in CASES
    ]
    best = min(
        sum(row[b] for row, b in zip(least, budgets, strict=True))
        for budgets in product(around, repeat=len(CASES))
        if sum(budgets) == len(CASES) * budget
    )
    assert sum(shape.cached for shape in found) == len(CASES) * budget
    assert all(shape.cached in around for shape in found)
    assert sum(cost(c, shape) for c, shape in zip(CASES, found, strict=True)) == pytest.approx(best)
    if split == "share":
        assert {shape.rope_dim for shape in found} == {rope}


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    cache=st.floats(0.15, 1.0),
    step=st.sampled_from([2, 4, 8]),
    spread=st.integers(0, 16),
    split=st.sampled_from(["share", "predicted"]),
    order=st.permutations(range(3)),
)
def test_the_total_is_the_plans_and_every_size_is_allowed(cache, step, spread, split, order) -> None:
    how = allocating(step=step, spread=spread, split=split)
    planned, found = sizes(how, cache=cache, cases=[CASES[i] for i in order])
    own = planned.layers[0]
    assert sum(shape.cached for shape in found) == 3 * own.cached
    for shape in found:
        assert (shape.cached - own.cached) % step == 0
        assert min(own.cached, max(2 * step, own.cached / 2)) <= shape.cached <= min(own.cached + spread, 24)
        assert 1 <= shape.kv_rank <= largest_rank(SOURCE, shape.rope_dim)
        assert split == "share" or shape.rope_dim % step == 0 or shape.rope_dim == own.rope_dim
        assert 0 <= shape.rope_dim <= 12
        assert (shape.nope_dim, shape.value_dim) == (DIM, DIM)
    converted = [
        convert_layer(CASES[i].weights, CASES[i].statistics, CASES[i].rope, s, how)
        for i, s in zip(order, found, strict=True)
    ]
    assert [layer.weights.shape for layer in converted] == list(found)


def test_the_whole_cache_stays_exact() -> None:
    _, found = sizes(allocating(spread=64), cache=1.0)
    assert found == (MLAShape(12, 12, DIM, DIM),) * 3


def test_what_weighs_on_lost_rotations_buys_slots() -> None:
    uniform = {"layers": "uniform"}
    _, light = sizes(allocating(moved_weight=0.0, **uniform))
    _, heavy = sizes(allocating(moved_weight=1e6, **uniform))
    assert [shape.rope_dim for shape in heavy] == [6] * 3  # half of C + R, as many as there may be
    assert sum(shape.rope_dim for shape in light) < 3 * 6


def test_a_layer_whose_keys_and_values_do_not_matter_gives_its_share_away() -> None:
    quiet = CASES[1].statistics
    assert quiet.gradients is not None
    gradients = replace(quiet.gradients, pairs=1e-6 * quiet.gradients.pairs, content=1e-6 * quiet.gradients.content)
    silent = replace(CASES[1], statistics=replace(quiet, gradients=gradients))
    _, found = sizes(allocating(spread=64), cases=[CASES[0], silent, CASES[2]])
    assert found[1].cached == 6  # half of the budget: the least
    assert found[0].cached + found[2].cached == 3 * 12 - 6


def test_one_slot_a_pair_bounds_the_slots() -> None:
    how = allocating(layers="uniform", moved_weight=1e6)
    how = replace(how, decouple=replace(how.decouple, slots="one_per_pair"))
    _, found = sizes(how, cache=0.75)
    assert {shape.rope_dim for shape in found} == {DIM}


def test_wide_layers_try_no_more_than_so_many_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: set[int] = set()

    class Enough(Exception):  # noqa: N818 - ends the test
        pass

    def counted(*arguments: Any) -> Any:
        if arguments[3] in tried:
            raise Enough
        tried.add(arguments[3])
        return loss_curve(CASES[0].weights, CASES[0].statistics, CASES[0].rope, 0, allocating())

    monkeypatch.setattr("mla_convert.allocate.loss_curve", counted)
    wide = spec(heads=32, kv_heads=8, dim=128, hidden=4096, layers=2)
    planned = make_plan(wide, recipe=allocating(layers="uniform"), cache=0.02)
    with pytest.raises((Enough, IndexError)):
        allocate(planned, [CASES[0].statistics] * 2, lambda _: CASES[0].weights)
    assert 8 <= len(tried) <= MOST_ROPE_DIMS + 2
    assert max(tried) <= planned.layers[0].cached / 2


def test_what_is_missing_is_said() -> None:
    planned = make_plan(SOURCE, recipe=allocating(), kv_rank=8, rope_dim=4)
    with pytest.raises(ValueError, match="nothing to allocate"):
        allocate(planned, [c.statistics for c in CASES], lambda i: CASES[i].weights)
    planned = make_plan(SOURCE, recipe=allocating(), cache=0.5)
    forward = [replace(c.statistics, gradients=None) for c in CASES]
    with pytest.raises(StatisticsError, match="gradients"):
        allocate(planned, forward, lambda i: CASES[i].weights)


def test_progress_counts_layers() -> None:
    calls: list[tuple[str, int, int]] = []
    planned = make_plan(SOURCE, recipe=allocating(), cache=0.5)
    allocate(planned, [c.statistics for c in CASES], lambda i: CASES[i].weights, lambda *call: calls.append(call))
    assert calls == [("allocate", i + 1, 3) for i in range(3)]


def test_what_plans_are_predicted_to_cost_is_what_their_layers_are() -> None:
    how = replace(allocating(layers="uniform"), allocation=None)
    plans = [make_plan(SOURCE, recipe=how, cache=share) for share in (0.75, 0.5, 0.25)]
    read: list[int] = []

    def weights(i: int) -> Any:
        read.append(i)
        return CASES[i].weights

    found = predict(plans, [c.statistics for c in CASES], weights)
    assert read == [0, 1, 2]  # once, for all plans
    for planned, prediction in zip(plans, found, strict=True):
        assert prediction.layers == planned.layers
        by_hand = [lost(c, shape, how) for c, shape in zip(CASES, planned.layers, strict=True)]
        # the truncation written out is a difference of larger numbers
        assert prediction.loss == pytest.approx(sum(0.5 * (0.5 * moved + cut) for moved, cut in by_hand), rel=1e-6)
    assert [p.loss for p in found] == sorted(p.loss for p in found)


def test_a_provisional_plan_is_predicted_with_the_sizes_that_it_gets() -> None:
    how = allocating(layers="waterfill", split="share")
    planned, chosen = sizes(how)
    uniform = replace(planned, provisional=False)
    statistics = [c.statistics for c in CASES]
    divided, alike = predict([planned, uniform], statistics, lambda i: CASES[i].weights)
    assert divided.layers == chosen
    assert alike.layers == planned.layers
    assert divided.loss <= alike.loss

"""Sizes by predicted loss: a layer's budget divided into C and R, and the model's budget over its layers.

What a conversion adds to the loss is predicted to second order, with a Kronecker-factored Fisher information (K-FAC;
Martens and Grosse, arXiv:1503.05671): ½ tr(F E) for an error of second moment E where the loss's gradient has the
second moment F. This is one unit for what a latent truncates and for what loses its rotation, and for all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from mla_convert.calibrate.statistics import LayerStatistics
from mla_convert.maths.knapsack import cheapest_choices
from mla_convert.plan import ConversionPlan, largest_rank
from mla_convert.progress import Progress, silent
from mla_convert.recipe import Recipe
from mla_convert.sources.attention import AttentionWeights
from mla_convert.spec import MLAShape, RopeSpec
from mla_convert.transform import predict_truncation, split_layer

# Each R that is tried costs a layer three eigendecompositions of 2·G·K rows; wide layers get a coarser choice.
MOST_ROPE_DIMS = 24

# What lost rotations weigh where a recipe does not say: see AllocationRecipe.
MOVED_WEIGHT = 0.5


@dataclass(frozen=True)
class LossCurve:
    """What a layer with R RoPE dims is predicted to cost.

    Attributes:
        moved: E|Σ conj(e) z|² of the key components z that lose their rotation, e their gradient's error.
        truncated: tr(F E) of what a latent of rank C = 0, ..., J loses.
    """

    moved: float
    truncated: Float[Tensor, " J1"]

    def at(self, rank: int, moved_weight: float) -> float:
        """The predicted change of the loss at C = `rank`, nats a token."""
        return 0.5 * (moved_weight * self.moved + self.truncated[rank].item())


def loss_curve(
    source: AttentionWeights, statistics: LayerStatistics, rope: RopeSpec, rope_dim: int, recipe: Recipe
) -> LossCurve:
    """Return the predicted cost of the conversion that `recipe` makes with R = `rope_dim`.

    Raises:
        StatisticsError: the statistics hold no gradients.
    """
    split = split_layer(source, statistics, rope, rope_dim, recipe)
    return LossCurve(max(split.slots.moved_cost, 0.0), predict_truncation(split, statistics, recipe))


@dataclass(frozen=True)
class Prediction:
    """The sizes of every layer, and the predicted change of the loss with them, nats a token of calibration text.

    Layers add up as if each were converted alone; refits and healing are not in it.
    """

    layers: tuple[MLAShape, ...]
    loss: float


def allocate(
    planned: ConversionPlan,
    statistics: Sequence[LayerStatistics],
    attention: Callable[[int], AttentionWeights],
    progress: Progress | None = None,
) -> tuple[MLAShape, ...]:
    """Return the sizes of every layer that cost the least predicted loss; C + R adds up to what the plan has.

    Args:
        planned: a provisional plan: uniform sizes, whose C + R is the budget of a layer.
        attention: gives a layer's weights, one at a time.

    Raises:
        StatisticsError: the statistics hold no gradients.
    """
    if not planned.provisional:
        raise ValueError("the plan leaves nothing to allocate")
    return predict([planned], statistics, attention, progress)[0].layers


def predict(
    plans: Sequence[ConversionPlan],
    statistics: Sequence[LayerStatistics],
    attention: Callable[[int], AttentionWeights],
    progress: Progress | None = None,
) -> tuple[Prediction, ...]:
    """Return what each plan is predicted to cost; of a provisional one the sizes that cost least.

    The plans are of one source and one recipe. A layer's weights are read once, whatever the number of plans.

    Raises:
        StatisticsError: the statistics hold no gradients.
    """
    progress, spec, recipe = progress or silent, plans[0].source, plans[0].recipe
    weight = MOVED_WEIGHT if recipe.allocation is None else recipe.allocation.moved_weight
    budgets = [_budgets(planned) for planned in plans]
    candidates = [
        [_candidates(planned, budget, max(among)) for budget in among]
        for planned, among in zip(plans, budgets, strict=True)
    ]
    rope_dims = sorted({shape.rope_dim for choices in candidates for shapes in choices for shape in shapes})
    best: list[list[list[tuple[float, MLAShape]]]] = [[] for _ in plans]
    for i in range(spec.num_layers):
        source = attention(i)
        curves = {dim: loss_curve(source, statistics[i], spec.rope_of(i), dim, recipe) for dim in rope_dims}
        for planned, choices, rows in zip(plans, candidates, best, strict=True):
            rows.append([_cheapest(shapes, curves, weight, planned.layers[i]) for shapes in choices])
        progress("allocate", i + 1, spec.num_layers)
    return tuple(
        _chosen(rows, spec.num_layers * among.index(planned.layers[0].cached))
        for planned, among, rows in zip(plans, budgets, best, strict=True)
    )


def _chosen(rows: Sequence[Sequence[tuple[float, MLAShape]]], steps: int) -> Prediction:
    """The cheapest choice of one entry a layer whose places add up to `steps`."""
    costs = torch.tensor([[cost for cost, _ in row] for row in rows], dtype=torch.float64)
    chosen = [row[choice] for row, choice in zip(rows, cheapest_choices(costs, steps), strict=True)]
    return Prediction(tuple(shape for _, shape in chosen), sum(cost for cost, _ in chosen))


def _budgets(planned: ConversionPlan) -> list[int]:
    """What a layer's C + R may be, ascending by steps; the plan's own is among them."""
    budget, how = planned.layers[0].cached, planned.recipe.allocation
    if how is None or not planned.provisional or how.layers == "uniform":
        return [budget]
    least, most = max(2 * how.step, -(-budget // 2)), min(budget + how.spread, planned.source.kv_width)
    below, above = max(0, budget - least) // how.step, max(0, most - budget) // how.step
    return [budget + how.step * steps for steps in range(-below, above + 1)]


def _candidates(planned: ConversionPlan, budget: int, largest: int) -> list[MLAShape]:
    """The sizes that a layer of C + R = `budget` may have: the plan's own, and those that the recipe leaves open."""
    spec, own, how = planned.source, planned.layers[0], planned.recipe.allocation
    if how is None or not planned.provisional:
        return [own]
    if how.split == "share":
        # R is the plan's in all layers: measured, letting it follow a layer's budget gave the gain away again.
        rank = budget - own.rope_dim - own.key_scales
        fits = 1 <= rank <= largest_rank(spec, own.rope_dim)
        return [replace(own, kv_rank=rank)] if fits else []
    # Keys have half the source's numbers: with all slots R is half of C + R, and values need at least the other half.
    most = min(largest // 2, spec.max_rope_dim)
    if planned.recipe.decouple.slots == "one_per_pair":
        most = min(most, spec.rope.dim)
    stride = how.step * -(-most // (how.step * MOST_ROPE_DIMS)) or how.step
    found = []
    for rope in sorted({*range(0, most + 1, stride), own.rope_dim}):
        rank = budget - rope - own.key_scales
        fits = 1 <= rank <= largest_rank(spec, rope)
        if fits and (rope <= budget // 2 or rope == own.rope_dim):
            found.append(replace(own, kv_rank=rank, rope_dim=rope))
    return found


def _cheapest(
    shapes: Sequence[MLAShape], curves: Mapping[int, LossCurve], moved_weight: float, otherwise: MLAShape
) -> tuple[float, MLAShape]:
    """The cheapest of the shapes with its predicted loss, or infinity where there are none."""
    costs = [(curves[shape.rope_dim].at(shape.kv_rank, moved_weight), shape) for shape in shapes]
    return min(costs, key=lambda one: one[0], default=(float("inf"), otherwise))

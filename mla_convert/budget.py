"""What a cache costs, before any weight is read: numbers and bytes by kind of attention, and whom a memory serves.

A token costs a layer 2·H·K numbers with a key and a value for every query head (MHA), 2·G·K for G groups (GQA), 2·K for
one (MQA) and C + R with a latent and one RoPE key (MLA; DeepSeek-V2, arXiv:2405.04434, table 1), beside which keys that
the source normalises take one number a norm. A layer with a sliding window holds the window's tokens and no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mla_convert.errors import PlanError
from mla_convert.estimate import estimate
from mla_convert.maths.footprint import (
    element_bytes,
    gqa_elements,
    mha_elements,
    mla_elements,
    mqa_elements,
    relative_change,
)
from mla_convert.plan import ConversionPlan, is_full, make_plan
from mla_convert.recipe import Recipe
from mla_convert.spec import DTYPE_BYTES, MLAShape, SourceSpec

SHARES = (1.0, 0.75, 0.5, 0.375, 0.25)


@dataclass(frozen=True)
class AttentionCost:
    """What one kind of attention would cache for a model of these sizes.

    Attributes:
        kind: ``MHA``, ``GQA``, ``MQA`` or ``MLA``.
        formula: the numbers a token a layer in symbols.
        elements: the numbers a token a layer; of MLA the mean over layers.
        bytes_per_token: over all layers, as long as no window is full.
        change: of the elements against MHA's, as a share: -0.98 is 98 % less.
    """

    kind: str
    formula: str
    elements: float
    bytes_per_token: int
    change: float


@dataclass(frozen=True)
class Budget:
    """A share of the source's cache, and the sizes that a recipe makes of it.

    Attributes:
        plan: None where the recipe has none for this source.
        problem: why not.
    """

    share: float
    plan: ConversionPlan | None
    problem: str | None = None


def plan_budgets(spec: SourceSpec, recipe: Recipe, shares: Sequence[float] = SHARES) -> tuple[Budget, ...]:
    """Return what `recipe` makes of each share of the cache, in the native format."""
    return tuple(_budget(spec, recipe, share) for share in shares)


def _budget(spec: SourceSpec, recipe: Recipe, share: float) -> Budget:
    try:
        return Budget(share, make_plan(spec, recipe=recipe, cache=share))
    except PlanError as error:
        return Budget(share, None, error.message)


def budget_facts(
    budget: Budget, file_bytes: int, dtypes: Sequence[str], *, by_layer: bool = False, mapped: bool = False
) -> dict[str, Any]:
    """Return the sizes of a budget and what a conversion to them takes, or why there is none, in JSON's types.

    Args:
        file_bytes, mapped: of the source's weight files; see :func:`~mla_convert.estimate.estimate`.
        dtypes: of the cache.
        by_layer: whether this machine would work a layer at a time.
    """
    plan = budget.plan
    if plan is None:
        return {"cache": budget.share, "error": budget.problem}
    shape = plan.layers[0]
    takes = estimate(plan, plan.source.dtype, file_bytes, mapped=mapped)
    here = takes.way(by_layer)
    return {
        "cache": budget.share,
        "kv_rank": shape.kv_rank,
        "rope_dim": shape.rope_dim,
        "key_scales": shape.key_scales,
        "cached_per_token_layer": plan.cached_per_token_layer if len(set(plan.layers)) > 1 else shape.cached,
        "exact": all(is_full(plan.source, shape) for shape in plan.layers),
        "provisional": plan.provisional,
        "low_memory": by_layer,
        "memory_bytes": here.memory,
        "disk_bytes": takes.output,
        "scratch_bytes": here.scratch,
        "statistics_bytes": takes.statistics,
        "ways": {
            name: {"memory_bytes": way.memory, "scratch_bytes": way.scratch, "disk_and_scratch_bytes": way.disk}
            for name, way in (("whole", takes.whole), ("low_memory", takes.by_layer))
        },
        "cache_bytes_per_token": {dtype: plan.cache_bytes_per_token(dtype) for dtype in dtypes},
    }


def attention_costs(spec: SourceSpec, layers: Sequence[MLAShape], dtype: str) -> tuple[AttentionCost, ...]:
    """Return what MHA, GQA, MQA and MLA with the sizes of `layers` cache in `dtype`, for the heads that `spec` has."""
    size, dim = DTYPE_BYTES[dtype], spec.head_dim
    baseline = mha_elements(spec.num_heads, dim)
    by_group = gqa_elements(spec.num_kv_heads, dim)
    alike = (("MHA", "2·H·K", baseline), ("GQA", "2·G·K", by_group), ("MQA", "2·K", mqa_elements(dim)))
    total = sum(mla_elements(shape.kv_rank, shape.rope_dim) + shape.key_scales for shape in layers)
    latent = total / len(layers)
    formula = "C + R + scales" if spec.key_scales else "C + R"
    return (
        *(
            AttentionCost(
                kind,
                symbols,
                elements,
                element_bytes(elements * spec.num_layers, size),
                relative_change(elements, baseline),
            )
            for kind, symbols, elements in alike
        ),
        AttentionCost("MLA", formula, latent, element_bytes(total, size), latent / baseline - 1.0),
    )


def sequence_bytes(cached: Sequence[int], windows: Sequence[int | None], context: int, dtype: str) -> int:
    """Return the bytes that one sequence of `context` tokens holds.

    Args:
        cached: numbers a token, layer by layer.
        windows: layer by layer, the sliding window in tokens, or None.
    """
    held = sum(
        numbers * min(context, context if window is None else window)
        for numbers, window in zip(cached, windows, strict=True)
    )
    return element_bytes(held, DTYPE_BYTES[dtype])

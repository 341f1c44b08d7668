"""From a source's description and a recipe to the sizes of a conversion; reads no weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mla_convert.errors import PlanError
from mla_convert.recipe import Recipe
from mla_convert.spec import DTYPE_BYTES, MLAShape, OutputFormat, SourceSpec, StockRope

# Sizes that kernels tile well; used where the budget leaves room for the choice.
_TILE = 16


@dataclass(frozen=True)
class ConversionPlan:
    """What a conversion will make.

    Attributes:
        layers: the sizes of every layer.
        stock_rope: for the deepseek format, ``default`` (slots at a geometric progression of frequencies, which every
            engine computes from a base) or ``longrope`` (any frequencies, the same in all layers; transformers only).
        provisional: whether `layers` stand for budgets that are divided after calibration (`mla_convert.allocate`).
        rope_strides: for ``default``, steps s such that the pairs 0, s, 2s, ... can hold the slots; calibration
            chooses one of them.
    """

    source: SourceSpec
    format: OutputFormat
    recipe: Recipe
    layers: tuple[MLAShape, ...]
    stock_rope: StockRope = "default"
    rope_strides: tuple[int, ...] = ()
    provisional: bool = False

    @property
    def cached_per_token_layer(self) -> float:
        """Cached numbers a token a layer, the mean over layers: C + R."""
        return sum(layer.cached for layer in self.layers) / len(self.layers)

    @property
    def ratio(self) -> float:
        """The converted cache as a share of the source's."""
        return self.cached_per_token_layer / self.source.kv_width

    def cache_bytes_per_token(self, dtype: str) -> int:
        """Cached bytes a token after conversion, all layers."""
        return sum(layer.cached for layer in self.layers) * DTYPE_BYTES[dtype]

    def source_cache_bytes_per_token(self, dtype: str) -> int:
        """Cached bytes a token of the source, all layers: 2·G·K a layer."""
        return self.source.kv_width * self.source.num_layers * DTYPE_BYTES[dtype]


def make_plan(
    spec: SourceSpec,
    *,
    recipe: Recipe,
    cache: float | None = None,
    kv_rank: int | None = None,
    rope_dim: int | None = None,
    format: OutputFormat = "native",
    stock_rope: StockRope = "default",
) -> ConversionPlan:
    """Return the plan for a share `cache` of the source's cache, or for C = `kv_rank` and R = `rope_dim`.

    Without either, half the cache (the whole of it for a recipe that keeps every slot).

    Raises:
        PlanError: the sizes are out of range for this source, recipe or format.
    """
    free = format == "native" or stock_rope == "longrope"
    strides = {} if free else _strides(spec)
    if (kv_rank is None) != (rope_dim is None) or (cache is not None and kv_rank is not None):
        raise PlanError(
            "the cache is sized by a share, or by a rank and a RoPE dim together", "give cache, or kv_rank and rope_dim"
        )
    if kv_rank is not None and rope_dim is not None:
        shape = _checked(spec, recipe, kv_rank, rope_dim, format)
    else:
        share = (1.0 if recipe.decouple.slots == "all" else 0.5) if cache is None else cache
        shape = _shape_for_budget(spec, recipe, share, format, None if free else max(strides.values(), default=0))
    return ConversionPlan(
        source=spec,
        format=format,
        recipe=recipe,
        layers=(shape,) * spec.num_layers,
        stock_rope=stock_rope,
        rope_strides=() if free else _usable(strides, shape, spec),
        provisional=recipe.allocates and format == "native" and kv_rank is None,
    )


def largest_rank(spec: SourceSpec, rope_dim: int) -> int:
    """The rank at which nothing is truncated: what `rope_dim` leaves of keys and values, at most the width of x.

    A bias adds one direction to the width.
    """
    width = spec.hidden_size + int(spec.key_bias or spec.value_bias)
    values = spec.kv_width // 2
    keys = min(values - rope_dim, width)
    return min(keys + values, width)


def is_full(spec: SourceSpec, shape: MLAShape) -> bool:
    """Whether a layer of these sizes truncates nothing: every RoPE slot is kept, and all the content that there is."""
    return shape.rope_dim == spec.max_rope_dim and shape.kv_rank == largest_rank(spec, shape.rope_dim)


def _shape_for_budget(
    spec: SourceSpec, recipe: Recipe, share: float, format: OutputFormat, most_slots: int | None
) -> MLAShape:
    if not 0 < share <= 1:
        raise PlanError(f"a cache share of {share} is not above 0 and at most 1", "give for example --cache 0.5")
    budget = math.floor(share * spec.kv_width + 1e-9)
    whole = budget == spec.kv_width
    if not whole:  # all of the cache means that nothing is lost, whatever the scales of keys come on top
        budget -= spec.key_scales
    if recipe.decouple.slots == "all":
        rope = spec.max_rope_dim
    elif recipe.decouple.rope_share is None:
        rope = spec.rope.dim
    else:
        step = _TILE if budget >= 8 * _TILE else 2
        wanted = _rope_share(recipe.decouple.rope_share, share) * budget
        rope = max(2, step * math.floor(wanted / step + 0.5))
        rope = spec.max_rope_dim if whole else min(rope, spec.max_rope_dim)
        if most_slots is not None:  # the source's own frequencies, all of them, if no progression is among them
            rope = min(rope, 2 * most_slots) if most_slots else spec.rope.dim
    rank = budget - rope
    most = largest_rank(spec, rope)
    if rank > most and recipe.decouple.slots == "cost" and most_slots is None:  # the budget holds more than one rank
        while rank > most and rope + 2 <= spec.max_rope_dim:
            rope += 2
            rank, most = budget - rope, largest_rank(spec, rope)
    rank = min(rank, most)
    if rank < 1:
        raise PlanError(
            f"a budget of {budget} cached numbers a token and layer leaves no latent beside {rope} RoPE dims",
            f"raise --cache above {(rope + 1) / spec.kv_width:.3f}, or give --kv-rank and --rope-dim",
        )
    return _checked(spec, recipe, rank, rope, format)


def _rope_share(base: float, share: float) -> float:
    """R as a share of the budget: the recipe's up to half the cache, rising to one half (lossless) at all of it."""
    return base + (0.5 - base) * max(0.0, 2 * share - 1) ** 2


def _checked(spec: SourceSpec, recipe: Recipe, rank: int, rope: int, format: OutputFormat) -> MLAShape:
    if rope < 0 or rope % 2:
        raise PlanError(f"a RoPE dim of {rope} is not even", f"RoPE turns pairs: give for example {max(2, rope + 1)}")
    if rope > spec.max_rope_dim:
        raise PlanError(
            f"a RoPE dim of {rope} is more than the source's keys have, {spec.max_rope_dim}",
            f"give a --rope-dim of at most {spec.max_rope_dim}" if spec.max_rope_dim else "give --rope-dim 0",
        )
    if recipe.decouple.slots == "one_per_pair" and rope > spec.rope.dim:
        raise PlanError(
            f"recipe {recipe.name} keeps one slot for a pair, and {rope} RoPE dims need {rope // 2} pairs; "
            f"a head has {spec.rope.dim // 2}",
            f"give a --rope-dim of at most {spec.rope.dim}, or another recipe",
        )
    if recipe.decouple.slots == "all" and rope != spec.max_rope_dim:
        raise PlanError(
            f"recipe {recipe.name} keeps all {spec.max_rope_dim} RoPE dims, not {rope}",
            "give --cache 1.0 with this recipe, or take another",
        )
    most = largest_rank(spec, rope)
    if not 1 <= rank <= most:
        raise PlanError(
            f"a rank of {rank} is not between 1 and the full rank {most}"
            + (f" beside {rope} RoPE dims" if rope else ""),
            f"give a --kv-rank of at most {most}" if rank > most else "give a --kv-rank of at least 1",
        )
    if recipe.decouple.slots == "all" and rank < most:
        raise PlanError(
            f"recipe {recipe.name} truncates nothing, and a rank of {rank} is less than the full rank {most}",
            "give --cache 1.0 with this recipe, or take another",
        )
    if format == "deepseek" and rope < 2:
        raise PlanError("the deepseek format needs RoPE dims", "give a --rope-dim of at least 2, or --format native")
    return MLAShape(rank, rope, nope_dim=spec.head_dim, value_dim=spec.head_dim, key_scales=spec.key_scales)


def _strides(spec: SourceSpec) -> dict[int, int]:
    """For each step s, how many of the pairs 0, s, 2s, ... turn at a geometric progression of frequencies from 1.

    These are the frequencies that a stock class computes from a base alone.
    """
    frequencies = spec.rope.inv_freq
    if not math.isclose(frequencies[0], 1.0, rel_tol=1e-6):
        return {}
    counts: dict[int, int] = {}
    for stride in range(1, len(frequencies)):
        row = frequencies[::stride]
        count = 1
        while count < len(row) and math.isclose(row[count], row[1] ** count, rel_tol=1e-5):
            count += 1
        counts[stride] = count
    return counts


def _usable(strides: dict[int, int], shape: MLAShape, spec: SourceSpec) -> tuple[int, ...]:
    slots = shape.rope_dim // 2
    if shape.rope_dim == spec.rope.dim:
        return (1,)  # every pair: the source's own frequencies, whatever their type
    usable = tuple(stride for stride, count in strides.items() if count >= slots)
    if not usable:
        most = 2 * max(strides.values(), default=0)
        raise PlanError(
            f"the stock class cannot hold {slots} of the source's frequencies: they must follow its own progression",
            f"give a --rope-dim of {f'at most {most} or ' if most else ''}exactly {spec.rope.dim}, "
            "--stock-rope longrope, or --format native",
        )
    return usable

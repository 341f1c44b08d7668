"""One layer's conversion: decoupling, substitution and joint factorisation put together into MLA weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from mla_convert.calibrate.statistics import GradientStatistics, LayerStatistics, nothing_held_out
from mla_convert.errors import StatisticsError
from mla_convert.maths.decouple import KeySlots, Substitution, choose_slots, replacement_metric
from mla_convert.maths.factorise import JointFactors, factorise_joint, truncation_curve, truncation_error
from mla_convert.maths.linalg import damped_power
from mla_convert.maths.metrics import attention_output_metric, balanced_metric, mixed_metric
from mla_convert.maths.rope import pair_moments, pair_rows, real_operator, real_rows
from mla_convert.mla.weights import MLAWeights
from mla_convert.qk_norm import with_norms, without_norms
from mla_convert.recipe import Recipe
from mla_convert.sources.attention import AttentionWeights
from mla_convert.spec import MLAShape, RopeSpec

# Even without a prior, full size must be exact for inputs in directions that calibration never saw: their share of it.
LEAST_PRIOR = 1e-9


@dataclass(frozen=True)
class SplitLayer:
    """A layer's keys and values y, parted into what keeps RoPE and what the latent is to hold.

    Attributes:
        constants: rho, which replaces rotations on the content path.
        moment: E[y y^T] of keys (before RoPE) and values.
        residual: the map from y to its content: the components of keys without a slot, and the values.
        content_moment: E[y y^T] of the content.
        output_metric: the weight of errors in the content.
    """

    slots: KeySlots
    constants: Complex[Tensor, "H F"]
    moment: Float[Tensor, "J J"]
    residual: Float[Tensor, "J J"]
    content_moment: Float[Tensor, "J J"]
    output_metric: Float[Tensor, "J J"]


@dataclass(frozen=True)
class ConvertedLayer:
    """A layer's MLA weights (float64) and what the conversion predicts they cost.

    Attributes:
        errors: shares of energy lost: ``keys`` and ``values`` by truncation (of all keys before RoPE, of all values),
            ``truncated`` likewise in the metric's unit, ``moved`` (cost of the key components that lose their rotation,
            of all components'); where the recipe has dampings to choose from, ``held_out``: of held-out content by
            truncation, in the unit of its Fisher information.
        damping: of the output metric, as a share of its mean eigenvalue.
        spectrum: what each direction of the content costs in the metric, descending; see ``JointFactors``.
    """

    weights: MLAWeights
    errors: Mapping[str, float]
    damping: float
    spectrum: Float[Tensor, " J"]


def convert_layer(
    source: AttentionWeights,
    statistics: LayerStatistics | None,
    rope: RopeSpec,
    shape: MLAShape,
    recipe: Recipe,
    *,
    counts: Sequence[int] | None = None,
) -> ConvertedLayer:
    """Return the layer as MLA with `shape`'s C and R.

    Keys and values are stacked into y = M x + b. Key components without a slot lose their rotation, which constants
    folded into W_UQ replace; y's remaining content is projected to rank C, and biases pass through the same maps as
    one more column of M. Where the source normalises queries and keys, these are the linear maps before the norms:
    see :mod:`~mla_convert.qk_norm`. At full rank and with all slots the result equals the source.

    Args:
        statistics: the layer's moments; None for a recipe that needs none.
        counts: how many slots each pair holds, where the target prescribes it; otherwise the recipe chooses.

    Raises:
        StatisticsError: the recipe needs statistics that are not there.
    """
    split = split_layer(source, statistics, rope, shape.rope_dim, recipe, counts=counts)
    factors, damping, held_out = _factorise(split, statistics, shape.kv_rank, recipe)
    linear = without_norms(source)
    weights = with_norms(_assemble(linear, rope, split.slots, split.constants, factors, split.residual), source)
    errors = _errors(split.slots, factors, split.content_moment, split.moment)
    return ConvertedLayer(weights, errors | held_out, damping, factors.spectrum)


def _factorise(
    split: SplitLayer, statistics: LayerStatistics | None, rank: int, recipe: Recipe
) -> tuple[JointFactors, float, dict[str, float]]:
    """The factors, the damping, and where it was chosen the share of held-out energy that is lost."""
    candidates = {
        damping: factorise_joint(split.content_moment, split.output_metric, rank, damping=damping)
        for damping in recipe.factorise.dampings
    }
    if not recipe.needs_held_out:
        damping, factors = next(iter(candidates.items()))
        return factors, damping, {}
    moment, metric = _held_out(split, statistics)
    errors = {damping: truncation_error(factors, moment, metric) for damping, factors in candidates.items()}
    damping = min(errors, key=errors.__getitem__)
    total = torch.sum(metric * moment).item()
    return candidates[damping], damping, {"held_out": max(errors[damping] / total, 0.0) if total > 0 else 0.0}


def predict_truncation(split: SplitLayer, statistics: LayerStatistics | None, recipe: Recipe) -> Float[Tensor, " J1"]:
    """Return tr(F E), F the Fisher information and E the moment of what rank C = 0, ..., J loses of the content.

    At each rank it is that of the damping which the conversion takes there.

    Raises:
        StatisticsError: the statistics hold no gradients, or nothing held out where the recipe has dampings to choose.
    """
    fisher, size = _gradients(statistics).content_moment, split.moment.shape[0]
    candidates = [
        factorise_joint(split.content_moment, split.output_metric, size, damping=damping)
        for damping in recipe.factorise.dampings
    ]
    errors = torch.stack([truncation_curve(factors, split.content_moment, fisher) for factors in candidates])
    if len(candidates) == 1:
        return errors[0]
    moment, metric = _held_out(split, statistics)
    held_out = torch.stack([truncation_curve(factors, moment, metric) for factors in candidates])
    return errors.gather(0, held_out.argmin(0, keepdim=True))[0]


def _held_out(
    split: SplitLayer, statistics: LayerStatistics | None
) -> tuple[Float[Tensor, "J J"], Float[Tensor, "J J"]]:
    """The moment of held-out content, and its Fisher information."""
    held_out = _seen(statistics).held_out
    if held_out is None:
        raise nothing_held_out()
    return split.residual @ held_out.attended_moment @ split.residual.mT, held_out.content_moment


def split_layer(
    source: AttentionWeights,
    statistics: LayerStatistics | None,
    rope: RopeSpec,
    rope_dim: int,
    recipe: Recipe,
    *,
    counts: Sequence[int] | None = None,
) -> SplitLayer:
    """Return the layer with `rope_dim`/2 slots chosen; see :func:`convert_layer`.

    Raises:
        StatisticsError: the recipe needs statistics that are not there.
    """
    source = without_norms(source)
    heads, groups = source.w_q.shape[0], source.w_k.shape[0]
    substitution = _substitution(statistics, rope, recipe, groups, heads)
    moment = _moment(source, statistics, recipe)
    half = moment.shape[0] // 2
    key_moment = pair_moments(moment[:half, :half], groups)
    metric = substitution.metric
    if recipe.decouple.mixing == "real":
        key_moment, metric = key_moment.real, metric.real
    slots = choose_slots(
        key_moment,
        metric,
        rope_dim // 2,
        damping=recipe.decouple.damping,
        one_per_pair=recipe.decouple.slots == "one_per_pair",
        counts=counts,
        turning=rope.dim // 2,
    )
    residual = torch.block_diag(real_operator(slots.residual), torch.eye(half, dtype=torch.float64))
    content_moment = residual @ moment @ residual.mT
    output_metric = _output_metric(source, statistics, substitution, content_moment, recipe)
    return SplitLayer(slots, substitution.constants, moment, residual, content_moment, output_metric)


def slot_costs(
    source: AttentionWeights, statistics: LayerStatistics | None, rope: RopeSpec, recipe: Recipe
) -> Float[Tensor, "F G"]:
    """Return what moving each pair's components to the content path would cost, descending, in the layer's metric."""
    source = without_norms(source)
    heads, groups = source.w_q.shape[0], source.w_k.shape[0]
    substitution = _substitution(statistics, rope, recipe, groups, heads)
    half = groups * source.w_k.shape[1]
    key_moment = pair_moments(_moment(source, statistics, recipe)[:half, :half], groups)
    root = damped_power(substitution.metric, 0.5, recipe.decouple.damping)
    costs = torch.linalg.eigvalsh(root @ key_moment @ root).flip(-1).clamp_min(0.0)
    costs[rope.dim // 2 :] = 0.0
    return costs


def _substitution(
    statistics: LayerStatistics | None, rope: RopeSpec, recipe: Recipe, groups: int, heads: int
) -> Substitution:
    if recipe.decouple.constants == "fisher":
        gradients = _gradients(statistics)
        return Substitution(gradients.constants, replacement_metric(gradients.pair_moment, gradients.constants))
    if recipe.decouple.constants == "attention":
        seen = _seen(statistics)
        constants = seen.mean_rotation.clone()
        constants[:, rope.dim // 2 :] = 1.0
        unmatched = seen.query_energy / seen.tokens * (1.0 - constants.abs().square()).clamp_min(0.0)
        by_group = unmatched.unflatten(0, (groups, heads // groups)).sum(1)
        return Substitution(constants, torch.diag_embed(by_group.mT).to(torch.complex128))
    pairs = len(rope.inv_freq)
    identity = torch.eye(groups, dtype=torch.complex128).repeat(pairs, 1, 1)
    return Substitution(torch.ones(heads, pairs, dtype=torch.complex128), identity)


def _moment(source: AttentionWeights, statistics: LayerStatistics | None, recipe: Recipe) -> Float[Tensor, "J J"]:
    """E[y y^T] of the stacked keys (before RoPE) and values, by the recipe's weights for tokens, and its prior."""
    rows = _stacked_rows(source)
    gram = rows @ rows.mT
    if recipe.factorise.moment == "weights":
        return gram
    seen = _seen(statistics)
    attended = recipe.factorise.moment == "attended"
    moment = seen.attended_moment(recipe.factorise.noise) if attended else seen.plain_moment
    share = max(recipe.factorise.prior, LEAST_PRIOR)
    return moment + share * moment.trace() / gram.trace().clamp_min(torch.finfo(gram.dtype).tiny) * gram


def _output_metric(
    source: AttentionWeights,
    statistics: LayerStatistics | None,
    substitution: Substitution,
    content_moment: Float[Tensor, "J J"],
    recipe: Recipe,
) -> Float[Tensor, "J J"]:
    kind = recipe.factorise.metric
    if kind == "identity":
        return torch.eye(content_moment.shape[0], dtype=torch.float64)
    if kind == "balanced":
        return balanced_metric(content_moment)
    if kind == "fisher":
        return _gradients(statistics).content_moment
    seen = _seen(statistics)
    groups, half = source.w_k.shape[0], content_moment.shape[0] // 2
    blocks = seen.plain_moment[half:, half:].unflatten(0, (groups, -1)).unflatten(2, (groups, -1))
    value_moment = torch.diagonal(blocks, dim1=0, dim2=2).permute(2, 0, 1)
    output = attention_output_metric(seen.query / seen.tokens, substitution.constants, value_moment, source.w_o)
    return output if kind == "attention_output" else mixed_metric(output, _gradients(statistics).content_moment)


def _seen(statistics: LayerStatistics | None) -> LayerStatistics:
    if statistics is None:
        raise StatisticsError("the recipe needs calibration statistics", "calibrate, or take the recipe `exact`")
    return statistics


def _gradients(statistics: LayerStatistics | None) -> GradientStatistics:
    gradients = _seen(statistics).gradients
    if gradients is None:
        raise StatisticsError(
            "the recipe needs loss gradients, which these statistics do not hold",
            "calibrate with this recipe, or take a forward-only one such as `forward`",
        )
    return gradients


def _stacked_rows(source: AttentionWeights) -> Float[Tensor, "J D1"]:
    """[W_K; W_V], with a last column of biases where the source has any."""
    rows = torch.cat((source.w_k.flatten(0, 1), source.w_v.flatten(0, 1))).double()
    if source.b_k is None and source.b_v is None:
        return rows
    parts = [
        torch.zeros(w.shape[0] * w.shape[1], dtype=torch.float64) if b is None else b.double().flatten()
        for w, b in ((source.w_k, source.b_k), (source.w_v, source.b_v))
    ]
    return torch.cat((rows, torch.cat(parts)[:, None]), dim=1)


def _assemble(
    source: AttentionWeights,
    rope: RopeSpec,
    slots: KeySlots,
    constants: Complex[Tensor, "H F"],
    factors: JointFactors,
    residual: Float[Tensor, "J J"],
) -> MLAWeights:
    heads, _, query_width = source.w_q.shape
    groups, dim, width = source.w_k.shape
    group = heads // groups
    rows = _stacked_rows(source)
    has_bias = rows.shape[1] > width
    down = factors.down @ residual @ rows
    up_k, up_v = factors.up.unflatten(0, (2, groups, dim)).unbind(0)

    # RoPE slots: key rows mix the heads of a pair, query rows undo the mixture for their own group
    pairs = list(slots.pairs)
    keys = pair_rows(rows[: groups * dim].unflatten(0, (groups, dim)))  # [G F D(+1)]
    rope_key = torch.einsum("ng,gnd->nd", slots.mix, keys[:, pairs])
    w_kr = torch.cat((rope_key.real, rope_key.imag))
    back = slots.unmix.conj().mT.repeat_interleave(group, dim=0)  # [H slots]

    queries = source.w_q.double()
    if source.b_q is not None:
        queries = torch.cat((queries, source.b_q.double()[..., None]), dim=-1)
    query_pairs = pair_rows(queries)
    w_qr = real_rows(back[..., None] * query_pairs[:, pairs])
    # cos and sin carry the source's attention_scaling twice in a score; content scores carry it here
    factors_F = torch.tensor(rope.factors, dtype=torch.float64).square()
    w_uq = real_rows(factors_F[:, None] * constants.conj()[..., None] * query_pairs)
    return MLAWeights(
        w_dkv=down[:, :width],
        w_kr=w_kr[:, :width],
        w_uk=up_k.repeat_interleave(group, dim=0),
        w_uv=up_v.repeat_interleave(group, dim=0),
        w_uq=w_uq[..., :query_width],
        w_qr=w_qr[..., :query_width],
        w_o=source.w_o.double(),
        inv_freq=tuple(rope.inv_freq[pair] for pair in pairs),
        pairs=tuple(pairs),
        b_dkv=down[:, width] if has_bias else None,
        b_kr=w_kr[:, width] if has_bias else None,
        b_uq=w_uq[..., query_width] if source.b_q is not None else None,
        b_qr=w_qr[..., query_width] if source.b_q is not None else None,
        b_o=None if source.b_o is None else source.b_o.double(),
    )


def _errors(
    slots: KeySlots, factors: JointFactors, content_moment: Float[Tensor, "J J"], moment: Float[Tensor, "J J"]
) -> dict[str, float]:
    lost = torch.eye(moment.shape[0], dtype=torch.float64) - factors.up @ factors.down
    error = _halves(lost @ content_moment @ lost.mT)
    keys, values = (error / _halves(moment).clamp_min(torch.finfo(torch.float64).tiny)).clamp_min(0.0).tolist()
    total = slots.kept_cost + slots.moved_cost
    return {
        "keys": keys,
        "values": values,
        "truncated": max(factors.lost, 0.0),
        "moved": max(slots.moved_cost / total, 0.0) if total > 0 else 0.0,
    }


def _halves(moment: Float[Tensor, "J J"]) -> Float[Tensor, "2"]:
    """The energy of keys and of values."""
    return moment.diagonal().unflatten(0, (2, -1)).sum(-1)

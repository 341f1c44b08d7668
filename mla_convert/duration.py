"""How long a conversion will take, from its floating-point operations and what this machine does of them a second.

What is counted, for a model of P weights that a token meets (of experts those that answer it), J = 2·G·K, S tokens:

- calibration: a token's forward pass (2·P, and 4·H·K·S for scores and their use), as much again going back to the
  inputs where there are gradients, and the moments, of J^2, K^2 a head and the pairs' (G + H)^2, in float64; a layer at
  a time with gradients, the forward pass once more;
- the layers' solutions: decompositions of J rows in float64, as a multiple of J^3;
- refits: both models over the text, and the heads' Gram matrices;
- healing: the source's forward pass, and the trained model's with its gradients.

Opening files, downloads and writing do not count. On SmolLM2-135M, recipe `default`, 16,384 tokens and one thread of
a machine that other work kept busy, whose rate was measured between 30 and 85 billion a second, calibration took some
270 seconds of the CPU where this says 130 at the higher rate and 370 at the lower; writing 30 layers took 26, where it
says 16 to 45 for their solutions. Larger models are untried.
"""

from __future__ import annotations

from dataclasses import dataclass

from mla_convert.plan import ConversionPlan
from mla_convert.recipe import HealRecipe
from mla_convert.sizes import converted_attention, feed_forward_weights, source_attention
from mla_convert.spec import SourceSpec

# An operation in float64 takes the time of two in float32.
_DOUBLE = 2
_SOLVES = 400  # decompositions are slower than products: in operations of a product, times J^3


@dataclass(frozen=True)
class Work:
    """Operations by stage, each in the time of one of a large float32 product; 0 for a stage that there is not."""

    calibrate: float
    solve: float
    refit: float
    heal: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.calibrate + self.solve + self.refit + self.heal


def conversion_work(plan: ConversionPlan, calibrated: bool = False, *, by_layer: bool = False) -> Work:
    """Return what a conversion by ``plan`` computes.

    Args:
        calibrated: its statistics are there already.
        by_layer: it works a layer at a time.
    """
    spec, recipe = plan.source, plan.recipe
    solve = spec.num_layers * _DOUBLE * _SOLVES * float(spec.kv_width) ** 3
    refit = 0.0
    if recipe.refit is not None and recipe.refits:
        gram = _DOUBLE * 2 * (spec.num_heads * spec.head_dim) ** 2
        refit = recipe.refit.tokens * (2 * forward_operations(spec, 512) + spec.num_layers * gram)
    heal = 0.0 if recipe.heal is None else _healing(plan, recipe.heal)
    return Work(0.0 if calibrated else _calibration(plan, by_layer), solve, float(refit), heal)


def _calibration(plan: ConversionPlan, by_layer: bool) -> float:
    spec, recipe = plan.source, plan.recipe
    if recipe.calibration is None:
        return 0.0
    tokens, context = recipe.calibration.tokens, min(recipe.calibration.context, spec.max_position_embeddings)
    pairs = spec.rope.dim // 2 * 8 * (spec.num_kv_heads + spec.num_heads) ** 2
    moments = 2 * (3 if recipe.needs_gradients else 2) * spec.kv_width**2 + 2 * spec.num_heads * spec.head_dim**2
    once = forward_operations(spec, context) + spec.num_layers * _DOUBLE * (moments + pairs)
    passes = (2 if by_layer else 1) if recipe.needs_gradients else 0
    return tokens * (once + passes * forward_operations(spec, context))


def _healing(plan: ConversionPlan, how: HealRecipe) -> float:
    spec = plan.source
    context = min(how.context, spec.max_position_embeddings)
    attention = sum(converted_attention(spec, shape) for shape in plan.layers)
    scores = 4 * spec.num_heads * spec.head_dim * context * spec.num_layers
    work = 0.0
    if how.layers is not None:
        seen = how.layers.steps * how.layers.batch * context
        work += how.layers.tokens * forward_operations(spec, context) + seen * 3 * (2 * attention + scores)
    if how.whole is not None:
        # the source's forward pass; the trained model's, back to its inputs, and to the weights of its attention
        work += how.whole.passes * how.whole.tokens * (3 * forward_operations(spec, context) + 2 * attention)
    return work


def forward_operations(spec: SourceSpec, context: int) -> float:
    """Return the operations of a token's forward pass in contexts of `context` tokens, the output head's too."""
    weights = spec.vocab_size * spec.hidden_size + spec.num_layers * source_attention(spec)
    weights += sum(_answering(spec, layer) for layer in range(spec.num_layers))
    return 2.0 * weights + 4 * spec.num_heads * spec.head_dim * context * spec.num_layers


def _answering(spec: SourceSpec, layer: int) -> int:
    """Weights of a feed-forward block that a token meets."""
    block = spec.block
    if not block.has_experts(layer):
        return feed_forward_weights(spec, layer)
    idle = block.num_experts - block.num_experts_per_tok
    return feed_forward_weights(spec, layer) - 3 * spec.hidden_size * block.moe_intermediate_size * idle

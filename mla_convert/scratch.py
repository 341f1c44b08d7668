"""What a conversion keeps on disk beside its output until that is written, from sizes alone.

For L layers, J = 2·G·K, calibration on S tokens of text and S' of noise, and a refit on S" tokens, in bytes:

- statistics: 8·(3·J² + H·K² + 3·H·K/2) a layer; with gradients 8·J² + 16·(K/2·(G + H)² + H·K/2) more, with contexts
  held out 16·J² more;
- hidden states, where calibration works a layer at a time: 4·(S + S')·D before a layer, and with gradients 4·S·D of the
  loss's gradients. Forward-only those of two layers lie there at once; with gradients those of all layers, which go as
  their layers are done, from the last to the first;
- converted layers: 4 a weight of the attention, and 8·J for the spectrum that the report draws;
- a refit's two streams of hidden states: 8·S"·D, twice while one takes the place of the other.

Norms' and biases' numbers and the files' headers are left out: the sum is a few per mille too low for a model that is
worth converting. Tested against what small conversions really left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mla_convert.plan import ConversionPlan
from mla_convert.sizes import converted_attention

# Contexts of uniformly drawn tokens for each context of calibration text, where the recipe weighs such noise.
NOISE_SHARE = 0.125


@dataclass(frozen=True)
class Tokens:
    """What a conversion runs over, in tokens; contexts are equally long."""

    context: int
    text: int
    noise: int
    refit: int


@dataclass(frozen=True)
class Scratch:
    """Bytes of files beside the output.

    Attributes:
        layers: how many there are.
        statistics: of one layer's calibration.
        hidden, gradients: of the hidden states before one layer, and of the loss's gradients there; 0 where there are
            none, as in a conversion that holds the whole model.
        converted: of all converted layers.
        streams: of the hidden states that a refit keeps between two layers.
    """

    layers: int
    statistics: int
    hidden: int
    gradients: int
    converted: int
    streams: int

    def calibrating(self, done: int = 0) -> int:
        """The most that lies there from now on until calibration ends, when so many layers' statistics are there."""
        count, left = self.layers, self.layers - done
        if left == 0 or not self.gradients:
            return count * self.statistics + (2 * self.hidden if left else 0)
        last = self._backward(left - 1), self._backward(0)
        ahead = (count + 1) * self.hidden + self.gradients if done == 0 else 0
        return max(ahead, *last)

    @property
    def converting(self) -> int:
        """The most that lies there while layers are converted."""
        return self.layers * self.statistics + self.converted + 2 * self.streams

    @property
    def writing(self) -> int:
        """What lies there while the output is written."""
        return self.layers * self.statistics + self.converted + self.streams

    @property
    def most(self) -> int:
        """The most that lies there at any one time."""
        return max(self.calibrating(), self.converting)

    def _backward(self, layer: int) -> int:
        """While the gradients pass a layer: the hidden states up to it, gradients on both sides, statistics from it."""
        return (layer + 1) * self.hidden + 2 * self.gradients + (self.layers - layer) * self.statistics


def tokens_of(plan: ConversionPlan, tokens: int | None = None, texts: int = 1) -> Tokens:
    """Return what a conversion runs over, if its texts are long enough.

    Args:
        tokens: of calibration; the recipe's unless given.
        texts: how many there are, of which each has a context.
    """
    calibration, refit = plan.recipe.calibration, plan.recipe.refit
    if calibration is None:
        return Tokens(0, 0, 0, 0)

    def contexts(count: int) -> tuple[int, int]:
        context = min(calibration.context, plan.source.max_position_embeddings, max(1, count // texts))
        return texts * (count // texts // context), context

    again = 0
    if refit is not None and plan.recipe.refits:
        again = math.prod(contexts(min(refit.tokens, tokens or refit.tokens)))
    return tokens_in(plan, *contexts(tokens or calibration.tokens), refit=again)


def tokens_in(plan: ConversionPlan, contexts: int, context: int, *, refit: int = 0) -> Tokens:
    """Return what a conversion runs over where its texts give so many contexts, and a refit reads at most so much."""
    noise = math.ceil(NOISE_SHARE * contexts) if plan.recipe.factorise.noise > 0 else 0
    return Tokens(context, context * contexts, context * noise, min(refit, context * contexts))


def scratch(plan: ConversionPlan, tokens: Tokens, *, by_layer: bool, calibrates: bool = True) -> Scratch:
    """Return what a conversion keeps beside its output.

    Args:
        by_layer: it works a layer at a time, not on the whole model.
        calibrates: it collects the statistics itself.
    """
    spec = plan.source
    states = by_layer and calibrates
    return Scratch(
        layers=spec.num_layers,
        statistics=layer_statistics(plan) if calibrates else 0,
        hidden=4 * (tokens.text + tokens.noise) * spec.hidden_size if states else 0,
        gradients=4 * tokens.text * spec.hidden_size if states and plan.recipe.needs_gradients else 0,
        converted=sum(4 * converted_attention(spec, shape) + 8 * spec.kv_width for shape in plan.layers),
        streams=8 * tokens.refit * spec.hidden_size,
    )


def layer_statistics(plan: ConversionPlan) -> int:
    """The sums of one layer's calibration, in float64: see :mod:`mla_convert.calibrate.statistics`."""
    spec, recipe = plan.source, plan.recipe
    if recipe.calibration is None:
        return 0
    heads, groups, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    square = spec.kv_width**2
    size = 8 * (3 * square + heads * dim * dim + 3 * heads * dim // 2)
    if recipe.needs_gradients:
        size += 8 * square + 16 * (dim // 2 * (groups + heads) ** 2 + heads * dim // 2)
    return size + (16 * square if recipe.needs_held_out else 0)

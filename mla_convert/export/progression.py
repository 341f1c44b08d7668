"""RoPE frequencies that follow one geometric progression, which is all that some engines compute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mla_convert.errors import FormatError
from mla_convert.export.padding import slot_places

# Logarithms of frequencies that came through float32 are off by 1e-7; a step that fits by chance is off by far more.
_TOLERANCE = 1e-6

_LONGEST = 256

_REMEDY = (
    "a conversion with one slot for each frequency (--recipe stock, or `decouple.slots: one_per_pair` in one of your "
    "own), or --target transformers"
)


@dataclass(frozen=True)
class Progression:
    """The frequencies base^(-2l/R), l = 0 ... R/2 - 1, radians a position.

    Attributes:
        base: theta.
        dim: R.
    """

    base: float
    dim: int

    @property
    def frequencies(self) -> tuple[float, ...]:
        """The R/2 frequencies, highest first."""
        return tuple(self.base ** (-2 * place / self.dim) for place in range(self.dim // 2))


def fit_progression(layers: Sequence[Sequence[float]], dim: int | None = None) -> Progression:
    """Return the shortest progression from frequency 1 downwards in which every layer's slots have places of their own.

    Args:
        layers: the frequencies of each layer's slots.
        dim: R; by default the smallest.

    Raises:
        FormatError: a layer has several slots at one frequency, the frequencies follow no progression that starts at 1,
            or it needs more than `dim`.
    """
    needed = [frequency for slots in layers for frequency in slots]
    steps = _steps([-math.log(frequency) for frequency in needed]) if all(f > 0 for f in needed) else None
    if steps is None:
        raise FormatError(
            "the frequencies of the RoPE slots are not powers of one number, as an engine that knows only a RoPE base "
            "computes them",
            _REMEDY,
        )
    step, places = steps
    smallest = 2 * places
    if dim is not None and (dim < smallest or dim % 2):
        raise FormatError(
            f"{dim} RoPE dims do not hold the layers' slots, which need {smallest}", f"--rope-dim {smallest}"
        )
    found = _rounded(math.exp(step * (dim or smallest) / 2), dim or smallest)
    for layer, slots in enumerate(layers):
        if slot_places(slots, found.frequencies) is None:
            raise FormatError(
                f"layer {layer} has several RoPE slots at one frequency, and an engine that knows only a RoPE base has "
                "one for each (--recipe stock converts into that)",
                _REMEDY,
            )
    return found


def _steps(logs: Sequence[float]) -> tuple[float, int] | None:
    """Return the largest number of which all `logs` are multiples, and one more than the largest multiple."""
    positive = sorted(log for log in logs if log > _TOLERANCE)
    if any(log < -_TOLERANCE for log in logs):
        return None
    if not positive:
        return math.log(10000.0), 1
    for divisor in range(1, _LONGEST):
        step = positive[0] / divisor
        if positive[-1] / step > _LONGEST:
            return None
        multiples = [round(log / step) for log in positive]
        step = sum(m * log for m, log in zip(multiples, positive, strict=True)) / sum(m * m for m in multiples)
        if all(abs(log - m * step) <= _TOLERANCE for m, log in zip(multiples, positive, strict=True)):
            return step, multiples[-1] + 1
    return None


def _rounded(base: float, dim: int) -> Progression:
    """The base with six digits where that changes no frequency by more than float32 does."""
    short = float(f"{base:.6g}")
    return Progression(short if abs(math.log(short / base)) <= _TOLERANCE / 2 else base, dim)

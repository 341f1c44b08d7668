"""What becomes of each tensor of a source: every one has exactly one role."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Converted:
    """An attention weight or bias of ``layer``, which the conversion replaces."""

    layer: int


@dataclass(frozen=True)
class Part:
    """A piece of a stored tensor that goes unchanged to ``target`` of the converted model.

    Attributes:
        rows: the first and the end of its rows, counted after transposing; None for all.
        transposed: whether the source stores [in, out] where the converted model has [out, in].
    """

    target: str
    rows: tuple[int, int] | None = None
    transposed: bool = False

    def take(self, stored: Tensor) -> Tensor:
        """Cut this part out of the stored tensor; the whole of it is returned as it is."""
        value = stored.t() if self.transposed else stored
        if self.rows is not None:
            value = value[slice(*self.rows)]
        return value if value is stored else value.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Copied:
    """A tensor whose parts go unchanged to the converted model; ``layer`` is None outside the layers."""

    parts: tuple[Part, ...]
    layer: int | None = None


def copied(target: str, layer: int | None = None) -> Copied:
    """The role of a tensor that goes whole to ``target``."""
    return Copied((Part(target),), layer)


@dataclass(frozen=True)
class Dropped:
    """A tensor that the converted model does not need, and why not."""

    reason: str


Role = Converted | Copied | Dropped

"""What becomes of each tensor of a source: every one has exactly one role."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Converted:
    """An attention weight or bias of ``layer``, which the conversion replaces."""

    layer: int


@dataclass(frozen=True)
class Copied:
    """A tensor that goes unchanged to ``target`` of the converted model; ``layer`` is None outside the layers."""

    target: str
    layer: int | None = None


@dataclass(frozen=True)
class Dropped:
    """A tensor that the converted model does not need, and why not."""

    reason: str


Role = Converted | Copied | Dropped

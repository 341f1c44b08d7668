"""Checkpoints of a model's body alone, whose names lack what the whole model puts before them (GPT-2, BLOOM)."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from mla_convert.sources.checkpoint import Checkpoint


class PrefixedCheckpoint:
    """``checkpoint`` with ``prefix`` before every name but ``head``; see :class:`Checkpoint` for the methods."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, head: str) -> None:
        self._checkpoint = checkpoint
        self._stored = {name if name == head else prefix + name: name for name in checkpoint.names()}

    def names(self) -> tuple[str, ...]:
        return tuple(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(self._stored[name])

    def dtype(self, name: str) -> str:
        return self._checkpoint.dtype(self._stored[name])

    def read(self, name: str) -> Tensor:
        # A name that is not there is the checkpoint's own error.
        return self._checkpoint.read(self._stored.get(name, name))

    def equal_bytes(self, one: str, other: str) -> bool:
        return self._checkpoint.equal_bytes(self._stored[one], self._stored[other])

    def weight_files(self) -> tuple[Path, ...]:
        return self._checkpoint.weight_files()

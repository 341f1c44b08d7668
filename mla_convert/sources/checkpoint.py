"""What an adapter asks of a checkpoint, whatever its file format."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import torch
from torch import Tensor

from mla_convert.errors import SourceError


class Checkpoint(Protocol):
    """Named tensors on disk, under Hugging Face names; no weight data is read before :meth:`read` is called."""

    def names(self) -> tuple[str, ...]:
        """The tensors' names, in the order of the file or index."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape :meth:`read` will return."""
        ...

    def dtype(self, name: str) -> str:
        """The dtype :meth:`read` will return, as torch spells it (``float32``)."""
        ...

    def read(self, name: str) -> Tensor:
        """One tensor, read now into memory of its own."""
        ...

    def equal_bytes(self, one: str, other: str) -> bool:
        """Whether two tensors are stored as the same bytes in the same type, compared without holding either whole."""
        ...

    def weight_files(self) -> tuple[Path, ...]:
        """The files that hold the tensors (and the index that lists them)."""
        ...


@dataclass(frozen=True)
class Stamp:
    """What tells a file from a changed one: its length in bytes, and when it was last written to, ns."""

    length: int
    written: int

    @classmethod
    def of(cls, path: Path) -> Self:
        """The stamp of a file as it is now.

        Raises:
            OSError: there is none, or it cannot be asked.
        """
        found = path.stat()
        return cls(found.st_size, found.st_mtime_ns)

    def check(self, path: Path) -> None:
        """Check that a file is what it was.

        Raises:
            SourceError: it is not, or it is gone.
        """
        try:
            now = Stamp.of(path)
        except OSError as error:
            raise SourceError(
                f"'{path}' is gone: {error.strerror or error}", "put it back, and leave the source alone until the end"
            ) from error
        if now != self:
            raise SourceError(
                f"'{path}' changed while it was read", "run the command again, and leave the source alone until the end"
            )


def check_finite(name: str, tensor: Tensor, place: str | Path) -> None:
    """Check that every number of a float tensor is finite, in one pass and without a copy.

    Raises:
        SourceError: one is not; ``place`` is said to hold it.
    """
    if tensor.numel() and not bool(
        torch.stack(tensor.detach().aminmax()).isfinite().all()
    ):  # NaN is both least and greatest
        raise SourceError(
            f"tensor '{name}' of {place} holds numbers that are infinite or not a number",
            "fetch or make the weights again; if they are the same, the model is broken",
        )


def main_dtype(checkpoint: Checkpoint) -> str:
    """The dtype in which most of the checkpoint's numbers are read."""
    numbers: dict[str, int] = {}
    for name in checkpoint.names():
        dtype = checkpoint.dtype(name)
        size = 1
        for extent in checkpoint.shape(name):
            size *= extent
        numbers[dtype] = numbers.get(dtype, 0) + size
    return max(numbers, key=lambda dtype: numbers[dtype])


def files_equal_bytes(spans: Iterable[tuple[Path, int, int]], block: int = 1 << 22) -> bool:
    """Whether two spans (file, offset, length in bytes) hold the same bytes, read ``block`` bytes at a time."""
    (first_path, first_start, first_length), (second_path, second_start, second_length) = spans
    if first_length != second_length:
        return False
    with first_path.open("rb") as first, second_path.open("rb") as second:
        first.seek(first_start)
        second.seek(second_start)
        left = first_length
        while left:
            size = min(block, left)
            if first.read(size) != second.read(size):
                return False
            left -= size
    return True

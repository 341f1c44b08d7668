"""What an adapter asks of a checkpoint, whatever its file format."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from torch import Tensor


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

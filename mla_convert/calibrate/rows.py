"""Hidden states of many contexts in a file, a context at a time: what a streamed calibration carries between layers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from mla_convert.errors import OutputError


class RowFile:
    """A float32 file of [n S D], which has its name once it is whole.

    Reads and writes pass no memory map, whose pages would count as this process's memory.
    """

    def __init__(self, path: Path, shape: tuple[int, int, int]) -> None:
        self.path = path
        self._shape = shape

    @property
    def complete(self) -> bool:
        """Whether the file is there, and of this shape."""
        return self.path.is_file() and self.path.stat().st_size == self._bytes * self._shape[0]

    def read(self, context: int) -> Float[Tensor, "1 S D"]:
        """Return one context.

        Raises:
            OutputError: it cannot be read.
        """
        buffer = bytearray(self._bytes)
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(context * self._bytes)
                view = memoryview(buffer)
                while view:
                    got = file.readinto(view)
                    if not got:
                        raise OSError("it ends too early")
                    view = view[got:]
        except OSError as error:
            raise OutputError(f"cannot read {self.path}: {error}", "run the command again") from error
        return torch.frombuffer(buffer, dtype=torch.float32).view(1, *self._shape[1:])

    @contextmanager
    def writing(self) -> Iterator[RowWriter]:
        """Yield what writes the contexts, in any order; the file has its name when the block succeeds.

        Raises:
            OutputError: the disk is full, or cannot be written.
        """
        partial = self.path.with_name(f"{self.path.name}.partial-{os.getpid()}")
        try:
            with partial.open("wb", buffering=0) as file:
                yield RowWriter(file.fileno(), self._bytes)
            partial.replace(self.path)
        except OSError as error:
            raise OutputError(
                f"cannot write {self.path}: {error.strerror or error}",
                "free some disk space: hidden states of the calibration text lie there until the output is written",
            ) from error
        finally:
            partial.unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete the file, if it is there."""
        self.path.unlink(missing_ok=True)

    @property
    def _bytes(self) -> int:
        """Of one context."""
        return 4 * self._shape[1] * self._shape[2]


class RowWriter:
    """Writes contexts to their places in a file."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._size = size

    def write(self, context: int, rows: Float[Tensor, "1 S D"]) -> None:
        """Write one context; an OSError is the caller's."""
        view = memoryview(rows.detach().float().cpu().contiguous().numpy().tobytes())
        place = context * self._size
        while view:
            written = os.pwrite(self._descriptor, view, place)
            view, place = view[written:], place + written

    def extend(self, contexts: int) -> None:
        """Make the file as long as so many contexts; those that were not written are zero."""
        os.ftruncate(self._descriptor, contexts * self._size)

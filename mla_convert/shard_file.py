"""One safetensors file, written tensor by tensor.

The format puts a JSON header before the tensors and lets spaces follow it: room is left for it and filled in at the
end. Tensors lie one after the other without gaps, as the format demands, each at a multiple of its element size, as
readers that map the file demand.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import torch

from mla_convert.sources.safetensors_reader import FLOAT8, FLOATS

# Enough for some two thousand tensors.
HEADER_ROOM = 1 << 18
_ALIGNMENT = 8
_BLOCK = 1 << 22
_STORED_AS = {getattr(torch, name): stored for stored, name in (FLOATS | FLOAT8).items()}


@dataclass(frozen=True)
class _Span:
    """A tensor in a file: ``length`` bytes from ``start`` on, counted from the header's end; ``item`` an element."""

    name: str
    stored: str
    shape: tuple[int, ...]
    item: int
    start: int
    length: int


class ShardFile:
    """A safetensors file that grows by one tensor at a time and can be read once it is finished.

    Args:
        path: the file to make.
        header_room: bytes left for the header. Where it needs more, or a tensor came to lie beside a multiple of its
            element size, :meth:`finish` copies the tensors into another file, a block at a time.

    Raises:
        OSError: also from the methods, when the file cannot be written.
    """

    def __init__(self, path: Path, header_room: int = HEADER_ROOM) -> None:
        self._path = path
        self._room = _aligned(header_room)
        self._spans: list[_Span] = []
        self._length = 0
        self._file: IO[bytes] = path.open("wb+")
        self._file.seek(8 + self._room)

    @property
    def path(self) -> Path:
        """Where it lies."""
        return self._path

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors written so far."""
        return tuple(span.name for span in self._spans)

    @property
    def tensor_bytes(self) -> int:
        """What the tensors written so far take together."""
        return self._length

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor behind the others; nothing of it is kept.

        Raises:
            ValueError: its dtype is none of the floats that are read back.
        """
        stored = _STORED_AS.get(tensor.dtype)
        if stored is None:
            raise ValueError(f"tensor {name!r} is {tensor.dtype}, which is not written")
        memory = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8)
        self._file.write(memory.numpy().data)
        item = tensor.element_size()
        self._spans.append(_Span(name, stored, tuple(tensor.shape), item, self._length, memory.numel()))
        self._length += memory.numel()

    def finish(self, metadata: Mapping[str, str] | None = None) -> None:
        """Fill in the header, and wait until the file is on the disk.

        Args:
            metadata: the header's; None for that of weights, where transformers asks for the framework.
        """
        metadata = {"format": "pt"} if metadata is None else metadata
        header = _header(self._spans, metadata)
        if len(header) > self._room or any(span.start % span.item for span in self._spans):
            self._rewrite(metadata)
        else:
            self._file.seek(0)
            self._file.write(_padded(header, self._room))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def discard(self) -> None:
        """Remove the file, finished or not."""
        with suppress(OSError):  # of what a full disk did not take
            self._file.close()
        self._path.unlink(missing_ok=True)

    def _rewrite(self, metadata: Mapping[str, str]) -> None:
        """Put a file in this one's place whose header has the room it needs, and whose widest dtypes come first.

        Every element size divides the larger ones, so that no tensor comes to lie beside a multiple of its own.
        """
        old, tensors = sorted(self._spans, key=lambda span: -span.item), 8 + self._room
        new: list[_Span] = []
        for span in old:
            new.append(replace(span, start=new[-1].start + new[-1].length if new else 0))
        header = _header(new, metadata)
        temporary = self._path.with_name(f"{self._path.name}.rewritten")
        try:
            with temporary.open("wb+") as file:
                file.write(_padded(header, _aligned(len(header))))
                for span in old:
                    self._file.seek(tensors + span.start)
                    _copy(self._file, file, span.length)
            temporary.replace(self._path)
        finally:
            temporary.unlink(missing_ok=True)
        self._file.close()
        self._file = self._path.open("rb+")


def _header(spans: Sequence[_Span], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    for span in spans:
        offsets = [span.start, span.start + span.length]
        entries[span.name] = {"dtype": span.stored, "shape": list(span.shape), "data_offsets": offsets}
    return json.dumps(entries, separators=(",", ":")).encode()


def _padded(header: bytes, room: int) -> bytes:
    """The start of a file up to its tensors: the header's length, the header, and spaces."""
    return struct.pack("<Q", room) + header.ljust(room)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _copy(source: IO[bytes], target: IO[bytes], length: int) -> None:
    while length:
        block = source.read(min(_BLOCK, length))
        if not block:
            raise OSError("what was written cannot be read back whole")
        target.write(block)
        length -= len(block)

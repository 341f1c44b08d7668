"""Safetensors shards, written tensor by tensor and renamed once their number is known."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from mla_convert.errors import OutputError, UsageError
from mla_convert.shard_file import ShardFile
from mla_convert.sources.safetensors_reader import INDEX_NAME, SINGLE_NAME

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?\s*", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(size: int | str) -> int:
    """Return a size in bytes: an integer as it is, or a string such as ``"5GB"`` (10^9) or ``"512MiB"`` (2^20).

    Raises:
        UsageError: not a size, an unknown unit, or less than one byte.
    """
    match = _SIZE.fullmatch(str(size))
    count = 0
    if match is not None:
        base = 1024 if match[3] else 1000
        count = int(float(match[1]) * base ** _POWERS[match[2].upper()])
    if count < 1:
        raise UsageError(f"{size!r} is not a shard size", 'a size such as "5GB", "200MB" or "512MiB"')
    return count


class ShardWriter:
    """Streams tensors into the safetensors shards of one checkpoint; none is kept once it is written.

    A shard is finished when the next tensor would take it over the size; a tensor larger than the size gets a shard
    of its own. :meth:`close` gives the files their final names (``model.safetensors`` for a single shard, otherwise
    ``model-0000i-of-0000n.safetensors`` and an index). As a context manager it closes when the block succeeds and
    removes what it wrote when the block fails.

    Args:
        folder: an existing folder.
        max_shard_size: bytes of tensors a shard, as :func:`parse_size` reads them.

    Raises:
        UsageError: a size that cannot be read.
        OutputError: from any method that writes, when the disk is full or the folder is not writable.
    """

    def __init__(self, folder: Path, max_shard_size: int | str) -> None:
        self._folder = folder
        self._limit = parse_size(max_shard_size)
        self._open: ShardFile | None = None
        self._finished: list[ShardFile] = []
        self._renamed: list[Path] = []
        self._names: set[str] = set()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor.

        Raises:
            ValueError: a name that was added before, or a tensor that is not of floats.
            OutputError: it cannot be written.
        """
        if name in self._names:
            raise ValueError(f"tensor {name!r} was written twice")
        self._names.add(name)
        with self._failures():
            if self._open is not None and self._open.tensor_bytes + tensor.nbytes > self._limit:
                self._finish(self._open)
            self._shard().write(name, tensor)

    def close(self) -> None:
        """Finish the last shard and give all files their final names.

        Raises:
            OutputError: writing or renaming failed.
        """
        with self._failures():
            if self._open is not None or not self._finished:
                self._finish(self._shard())
            self._rename()

    def _shard(self) -> ShardFile:
        """The shard that is being written, begun if there is none."""
        if self._open is None:
            self._open = ShardFile(self._folder / f"shard-{len(self._finished) + 1:05d}.safetensors.partial")
        return self._open

    def _finish(self, shard: ShardFile) -> None:
        shard.finish()
        self._finished.append(shard)
        self._open = None

    def _rename(self) -> None:
        count = len(self._finished)
        if count == 1:
            self._move(self._finished[0].path, SINGLE_NAME)
            return
        weight_map = {}
        for i, shard in enumerate(self._finished, start=1):
            final = f"model-{i:05d}-of-{count:05d}.safetensors"
            weight_map.update(dict.fromkeys(shard.names, final))
            self._move(shard.path, final)
        total = sum(shard.tensor_bytes for shard in self._finished)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        self._renamed.append(self._folder / INDEX_NAME)
        self._renamed[-1].write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _move(self, path: Path, name: str) -> None:
        path.rename(self._folder / name)
        self._renamed.append(self._folder / name)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(
                f"cannot write the weights to {self._folder}: {error.strerror or error}",
                "free some disk space or choose another output folder; the unfinished files were removed",
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.close()
                return
        except BaseException:
            self._discard()
            raise
        self._discard()

    def _discard(self) -> None:
        for shard in (*self._finished, *([] if self._open is None else [self._open])):
            shard.discard()
        for path in self._renamed:
            path.unlink(missing_ok=True)

"""Safetensors shards, written as they fill and renamed once their number is known."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from mla_convert.errors import OutputError, UsageError

INDEX_NAME = "model.safetensors.index.json"

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
    """Streams tensors into the safetensors shards of one checkpoint, holding at most one shard in memory.

    A shard goes to disk when the next tensor would take it over the size; a tensor larger than the size gets a shard
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
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._parts: list[tuple[Path, tuple[str, ...]]] = []
        self._names: set[str] = set()
        self._total_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor; it must not be changed before the writer is closed.

        Raises:
            ValueError: a name that was added before.
            OutputError: writing the shard before it failed.
        """
        if name in self._names:
            raise ValueError(f"tensor {name!r} was written twice")
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._limit:
            self._flush()
        self._names.add(name)
        self._pending[name] = self._owned(tensor)
        self._pending_bytes += size
        self._total_bytes += size

    def close(self) -> None:
        """Write what is pending and give all files their final names.

        Raises:
            OutputError: writing or renaming failed.
        """
        if self._pending or not self._parts:
            self._flush()
        try:
            self._rename()
        except OSError as error:
            raise self._failure(error) from error

    def _owned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor contiguous on the CPU, with a storage of its own: safetensors refuses shared storages,
        and a view would keep the whole of its base in memory."""
        tensor = tensor.detach().to("cpu").contiguous()
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        shared = any(tensor.data_ptr() == other.data_ptr() for other in self._pending.values())
        return tensor if whole and not shared else tensor.clone()

    def _flush(self) -> None:
        path = self._folder / f"shard-{len(self._parts) + 1:05d}.safetensors.partial"
        self._parts.append((path, tuple(self._pending)))
        try:
            save_file(self._pending, path, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise self._failure(error) from error
        self._pending = {}
        self._pending_bytes = 0

    def _rename(self) -> None:
        if len(self._parts) == 1:
            self._parts[0][0].rename(self._folder / "model.safetensors")
            return
        weight_map = {}
        for i, (path, names) in enumerate(self._parts, start=1):
            final = f"model-{i:05d}-of-{len(self._parts):05d}.safetensors"
            path.rename(self._folder / final)
            weight_map.update(dict.fromkeys(names, final))
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self._folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _failure(self, error: Exception) -> OutputError:
        return OutputError(
            f"cannot write the weights to {self._folder}: {error}",
            "free some disk space or choose another output folder; nothing was left behind",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self._pending = {}
            for path, _ in self._parts:
                path.unlink(missing_ok=True)

"""The safetensors file of calibration statistics: written and read a layer at a time, checked when it is opened.

A tensor's name is its layer's number, a dot and the name of a sum; complex sums are stored as pairs of floats. Plain
numbers stand in the header's metadata, with the format's version and where the statistics come from.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mla_convert.errors import SourceError, StatisticsError
from mla_convert.shard_file import ShardFile
from mla_convert.sources.safetensors_reader import FLOATS, SafetensorsCheckpoint, read_header

# Parts that came later are optional, so that older files can still be read.
FORMAT_VERSION = 1

# Bytes of the header that a layer's tensors and numbers take at most.
_ROOM = 4096
_COMPLEX = frozenset({"rotation", "gradients.pairs", "gradients.constants"})
_AGAIN = "calibrate again with --save-statistics"
_DAMAGED = (OSError, SafetensorError, SourceError, KeyError, ValueError, TypeError)


class StatisticsFile:
    """A file that :func:`write_statistics_file` wrote; opening it reads the header only.

    Attributes:
        provenance: what the statistics were made from.
        names: the names of every layer's sums and numbers.

    Raises:
        StatisticsError: the file is absent, damaged, cut short, or of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            metadata = _metadata(path)
            if metadata.get("version") != str(FORMAT_VERSION):
                raise StatisticsError(f"{path} does not hold statistics of this version", _AGAIN)
            self.provenance: Mapping[str, Any] = json.loads(metadata["provenance"])
            self._numbers: list[dict[str, Any]] = [dict(numbers) for numbers in json.loads(metadata["counts"])]
            self._tensors = SafetensorsCheckpoint(read_header(path), (path,))
            self._stored = self._by_layer()
        except FileNotFoundError as error:
            raise StatisticsError(f"there is no file of statistics {path}", "check the path") from error
        except _DAMAGED as error:
            raise self._damaged(error) from error
        self.names = tuple(
            frozenset(numbers) | frozenset(stored) for numbers, stored in zip(self._numbers, self._stored, strict=True)
        )

    def read(self, layer: int) -> dict[str, Any]:
        """Return a layer's sums and numbers by name, read now into memory of their own.

        Raises:
            StatisticsError: the file was changed since it was opened, or cannot be read.
        """
        values = dict(self._numbers[layer])
        try:
            for name in self._stored[layer]:
                value = self._tensors.read(f"{layer}.{name}")
                if not bool(value.isfinite().all()):
                    raise ValueError(f"{layer}.{name} holds numbers that are not finite")
                values[name] = torch.view_as_complex(value) if name in _COMPLEX else value
        except _DAMAGED as error:
            raise self._damaged(error) from error
        return values

    def _by_layer(self) -> list[list[str]]:
        """The names of each layer's tensors, which must be what their names say."""
        found: list[list[str]] = [[] for _ in self._numbers]
        for name in self._tensors.names():
            layer, _, part = name.partition(".")
            if not layer.isdecimal() or int(layer) >= len(found):
                raise ValueError(f"it counts {len(found)} layers and holds {name}")
            if self._tensors.dtype(name) not in FLOATS.values():
                raise ValueError(f"{name} is stored as {self._tensors.dtype(name)}")
            if part in _COMPLEX and self._tensors.shape(name)[-1:] != (2,):
                raise ValueError(f"{name} holds no complex numbers")
            found[int(layer)].append(part)
        return found

    def _damaged(self, error: Exception) -> StatisticsError:
        reason = error.message if isinstance(error, SourceError) else error
        return StatisticsError(f"{self.path} cannot be read as statistics: {reason}", _AGAIN)


def write_statistics_file(
    path: Path, provenance: Mapping[str, Any], layers: int, values: Callable[[int], Mapping[str, Any]]
) -> None:
    """Write a file that appears whole or not at all; no more than one layer is asked for and held at a time.

    Args:
        layers: how many there are.
        values: a layer's number -> its tensors, and its plain numbers, by name.

    Raises:
        StatisticsError: the file cannot be written, or ``values`` raised it.
    """
    made_from = json.dumps(provenance, sort_keys=True)
    temporary = path.with_name(f"{path.name}.partial-{os.getpid()}")
    file: ShardFile | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = ShardFile(temporary, _ROOM * (layers + 1) + 2 * len(made_from))
        counts = [_write_layer(file, layer, values(layer)) for layer in range(layers)]
        file.finish({"version": str(FORMAT_VERSION), "provenance": made_from, "counts": json.dumps(counts)})
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):
            if file is not None:
                file.discard()
        if not isinstance(error, OSError):
            raise
        raise StatisticsError(
            f"the statistics cannot be written to {path}: {error.strerror or error}",
            "free space there, or choose another place",
        ) from error


def _write_layer(file: ShardFile, layer: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """Write a layer's tensors, and return its numbers."""
    for name, value in values.items():
        if isinstance(value, Tensor):
            file.write(f"{layer}.{name}", torch.view_as_real(value) if value.is_complex() else value)
    return {name: value for name, value in values.items() if not isinstance(value, Tensor)}


def is_statistics(path: Path) -> bool:
    """Whether the file is one that :func:`write_statistics_file` wrote, of any version."""
    try:
        return "provenance" in _metadata(path)
    except (OSError, SafetensorError):
        return False


def read_made_from(path: Path) -> Mapping[str, Any]:
    """Read where the statistics of a file come from, and no more of it.

    Raises:
        StatisticsError: the file is damaged, or of another version.
    """
    try:
        metadata = _metadata(path)
        if metadata.get("version") != str(FORMAT_VERSION):
            raise StatisticsError(f"{path} does not hold statistics of this version", "calibrate again")
        return json.loads(metadata["provenance"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise StatisticsError(f"{path} cannot be read as statistics: {error}", "calibrate again") from error


def _metadata(path: Path) -> Mapping[str, str]:
    """The metadata of a safetensors file whose tensors fill it to its end."""
    with safe_open(path, framework="pt") as file:
        return file.metadata() or {}

"""Lazy reading of safetensors checkpoints, single or sharded.

Opening reads the index and the JSON headers only, and checks them against the sizes of the files, so that a truncated
download is found before an hour of work rather than after it.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mla_convert.errors import SourceError
from mla_convert.sources.checkpoint import Stamp, files_equal_bytes

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

FLOATS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# Types of eight bits, in which weights and their scales are stored; what they stand for takes both.
FLOAT8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}
_FETCH_AGAIN = "fetch the file again; it is incomplete or damaged"


@dataclass(frozen=True)
class _Entry:
    """Where one tensor lies: its file, stored dtype, shape, and byte span from the start of the file."""

    path: Path
    stored: str
    shape: tuple[int, ...]
    start: int
    length: int


class SafetensorsCheckpoint:
    """The tensors of one or several safetensors files; see :class:`~mla_convert.sources.checkpoint.Checkpoint`."""

    def __init__(self, entries: dict[str, _Entry], files: tuple[Path, ...]) -> None:
        self._entries = entries
        self._files = files
        self._stamps = {path: Stamp.of(path) for path in {entry.path for entry in entries.values()}}

    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def dtype(self, name: str) -> str:
        return FLOATS.get(self._entries[name].stored, self._entries[name].stored)

    def read(self, name: str) -> Tensor:
        """One tensor, copied out of the file.

        Raises:
            SourceError: the checkpoint holds no such tensor, it is in a dtype that is not a plain float, or its file
                changed since it was opened.
        """
        return self._read(name, FLOATS)

    def read_any(self, name: str) -> Tensor:
        """One tensor, copied out of the file in the dtype it is stored in, which may be a float of eight bits.

        Raises:
            SourceError: the checkpoint holds no such tensor, it is in a dtype that is not a float, or its file changed
                since it was opened.
        """
        return self._read(name, FLOATS | FLOAT8)

    def _read(self, name: str, dtypes: dict[str, str]) -> Tensor:
        if name not in self._entries:
            raise SourceError(f"the checkpoint holds no tensor '{name}'", "check the name against `tensor_names()`")
        entry = self._entries[name]
        if entry.stored not in dtypes:
            raise SourceError(
                f"tensor '{name}' in '{entry.path.name}' is stored as {entry.stored}",
                "use an unquantised checkpoint (float32, bfloat16 or float16)",
            )
        # Read, not mapped: of a mapped file the pages that are copied from would count as this process's memory too.
        try:
            tensor = torch.empty(entry.shape, dtype=getattr(torch, dtypes[entry.stored]))
            memory: Any = tensor.flatten().view(torch.uint8).numpy()
            with entry.path.open("rb") as file:
                file.seek(entry.start)
                found = file.readinto(memory)
        except OSError as error:
            raise SourceError(f"cannot read '{name}' from '{entry.path}': {error}", _FETCH_AGAIN) from error
        self._stamps[entry.path].check(entry.path)
        if found != entry.length:
            raise SourceError(f"cannot read '{name}' from '{entry.path}': it ends too early", _FETCH_AGAIN)
        return tensor

    def equal_bytes(self, one: str, other: str) -> bool:
        first, second = self._entries[one], self._entries[other]
        if first.stored != second.stored or first.shape != second.shape:
            return False
        return files_equal_bytes((entry.path, entry.start, entry.length) for entry in (first, second))

    def weight_files(self) -> tuple[Path, ...]:
        return self._files


def has_safetensors(folder: Path) -> bool:
    """Whether ``folder`` holds safetensors weights or an index of them."""
    return (folder / INDEX_NAME).is_file() or any(folder.glob("*.safetensors"))


def open_safetensors(folder: Path) -> SafetensorsCheckpoint:
    """Open the checkpoint of ``folder`` by its index, or else its single file; reads headers only.

    Raises:
        SourceError: a shard that the index names is missing, a file is truncated or damaged, the index names a tensor
            that its shard lacks, or several files lie there without an index.
    """
    index = folder / INDEX_NAME
    if index.is_file():
        return _open_sharded(folder, index)
    single = folder / SINGLE_NAME
    if not single.is_file():
        found = sorted(folder.glob("*.safetensors"))
        if len(found) != 1:
            raise SourceError(
                f"'{folder}' holds {len(found)} safetensors files but no '{INDEX_NAME}'",
                f"add the index, or keep only one file (named '{SINGLE_NAME}')",
            )
        single = found[0]
    return SafetensorsCheckpoint(read_header(single), (single,))


def _open_sharded(folder: Path, index: Path) -> SafetensorsCheckpoint:
    weight_map = _read_weight_map(index)
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise SourceError(
            f"'{folder}' lacks {len(missing)} of the {len(shards)} shards that its index names: {_some(missing)}",
            "fetch the missing shards and put them beside the index",
        )
    headers = {shard: read_header(folder / shard) for shard in shards}
    absent = [name for name, shard in weight_map.items() if name not in headers[shard]]
    if absent:
        raise SourceError(
            f"'{index}' names {len(absent)} tensors that its shards do not hold: {_some(absent)}",
            "fetch the shards and the index again, from the same revision",
        )
    entries = {name: headers[shard][name] for name, shard in weight_map.items()}
    # Tensors that a shard holds and the index leaves out would be lost without a word, so they are listed too.
    for header in headers.values():
        for name, entry in header.items():
            entries.setdefault(name, entry)
    return SafetensorsCheckpoint(entries, (index, *(folder / shard for shard in shards)))


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        well_formed = all(isinstance(shard, str) and Path(shard).name == shard for shard in weight_map.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(f"'{index}' is not a safetensors index: {error}", _FETCH_AGAIN) from error
    if not weight_map or not well_formed:
        raise SourceError(f"'{index}' is not a safetensors index: its weight_map is not usable", _FETCH_AGAIN)
    return weight_map


def read_header(path: Path) -> dict[str, _Entry]:
    """The tensors that ``path`` says it holds, after checking that the file is as long as they need.

    Raises:
        SourceError: the file is not safetensors, or it is shorter than its header says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start.startswith(b"version "):
            raise SourceError(f"'{path}' is a git-lfs pointer, not the weights", "run `git lfs pull` in its folder")
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= size - 8:
            raise SourceError(f"'{path}' is truncated or not a safetensors file ({size} bytes)", _FETCH_AGAIN)
        raw = file.read(length)
    try:
        header: dict[str, Any] = json.loads(raw)
        header.pop("__metadata__", None)
        data = 8 + length
        entries = {
            name: _Entry(
                path,
                str(item["dtype"]),
                tuple(int(extent) for extent in item["shape"]),
                data + int(item["data_offsets"][0]),
                int(item["data_offsets"][1]) - int(item["data_offsets"][0]),
            )
            for name, item in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise SourceError(f"'{path}' has a damaged safetensors header: {error}", _FETCH_AGAIN) from error
    end = max((entry.start + entry.length for entry in entries.values()), default=data)
    if end != size:
        kind = "truncated" if end > size else "damaged"
        raise SourceError(f"'{path}' is {kind}: its header asks for {end} bytes, the file has {size}", _FETCH_AGAIN)
    return entries


def _some(names: list[str], count: int = 4) -> str:
    """The first few of ``names``, for a message of one line."""
    shown = ", ".join(sorted(names)[:count])
    return shown if len(names) <= count else f"{shown} and {len(names) - count} more"

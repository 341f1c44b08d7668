"""Lazy reading of GGUF files: memory-mapped, one tensor dequantised to float32 at a time, under Hugging Face names."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mla_convert.errors import SourceError
from mla_convert.sources.checkpoint import Stamp, files_equal_bytes

if TYPE_CHECKING:
    from gguf import GGUFReader

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INSIDE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# Rows are dequantised in blocks of about this many numbers: the quantised formats need several temporaries a number.
_BLOCK_NUMBERS = 1 << 22


def import_gguf() -> Any:
    """The ``gguf`` package.

    Raises:
        SourceError: it is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise SourceError("reading GGUF files needs the gguf package", 'pip install "mla-convert[gguf]"') from error
    return gguf


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name that is not known comes back as it is."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in _INSIDE:
        return name
    return f"model.layers.{match[1]}.{_INSIDE[match[2]]}.{match[3]}"


def open_reader(path: Path) -> GGUFReader:
    """Map ``path`` and parse its metadata and tensor table.

    Raises:
        SourceError: the ``gguf`` package is missing, or the file is not GGUF, truncated, or one of a split set.
    """
    import_gguf()
    stat = path.stat()
    return _parsed(path.resolve(), stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _parsed(path: Path, _size: int, _modified: int) -> GGUFReader:
    """The reader of a file in one state: parsing takes seconds, and a command opens its source several times."""
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise SourceError(f"'{path}' is not a GGUF file", "give the path of a GGUF file or of a model folder")
    try:
        reader = _plain_reader()(path)
    except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
        raise SourceError(f"'{path}' is truncated or damaged ({error})", "fetch the file again") from error
    count = reader.get_field("split.count")
    if count is not None and int(count.contents()) > 1:
        raise SourceError(
            f"'{path}' is one of {int(count.contents())} parts of a split GGUF",
            "merge the parts with `llama-gguf-split --merge` first",
        )
    return reader


@functools.cache
def _plain_reader() -> type[GGUFReader]:
    """The package's reader, whose pieces are plain arrays over its memory map.

    A vocabulary is some hundred thousand of them, and each that is a ``numpy.memmap`` takes several times as long to
    make, and a dictionary of its own.
    """

    class PlainReader(import_gguf().GGUFReader):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)

    return PlainReader


@contextmanager
def read_once(path: Path, reader: GGUFReader) -> Iterator[None]:
    """Within it, whoever asks the package to read this file gets the reader that has read it already.

    transformers parses the whole file again for its tokenizer, which takes seconds and a hundred megabytes.
    """
    gguf = import_gguf()
    reads = gguf.GGUFReader

    def again(asked: Any, *arguments: Any, **options: Any) -> GGUFReader:
        same = not (arguments or options) and Path(asked).resolve() == path.resolve()
        return reader if same else reads(asked, *arguments, **options)

    gguf.GGUFReader = again
    try:
        yield
    finally:
        gguf.GGUFReader = reads


class GGUFCheckpoint:
    """The tensors of one GGUF file; see :class:`~mla_convert.sources.checkpoint.Checkpoint`.

    llama.cpp stores the query and key rows of the ``llama`` architecture with each rotary pair side by side; they are
    put back into rotate-half order here, when ``num_heads`` and ``num_kv_heads`` are given.
    """

    def __init__(self, path: Path, reader: GGUFReader, *, interleaved_heads: tuple[int, int] | None) -> None:
        """``interleaved_heads``: (H, G) when query and key rows are interleaved, else None."""
        self._path = path
        self._stamp = Stamp.of(path)
        self._tensors = {hf_name(tensor.name): tensor for tensor in reader.tensors}
        self._interleaved_heads = interleaved_heads

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(extent) for extent in reversed(self._tensors[name].shape))

    def dtype(self, name: str) -> str:
        return "float32"

    def read(self, name: str) -> Tensor:
        """One tensor, dequantised to float32.

        Raises:
            SourceError: the file holds no such tensor, its quantisation is not known to the ``gguf`` package, or the
                file changed since it was opened.
        """
        if name not in self._tensors:
            raise SourceError(f"the checkpoint holds no tensor '{name}'", "check the name against `tensor_names()`")
        self._stamp.check(self._path)  # first, for what a shorter file no longer maps ends the process
        weight = self._dequantise(name)
        heads = self._heads_to_restore(name)
        if heads is None:
            return weight
        pairs = weight.view(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
        return pairs.transpose(1, 2).reshape(weight.shape)

    def _dequantise(self, name: str) -> Tensor:
        gguf = import_gguf()
        stored = self._tensors[name]
        out = torch.empty(self.shape(name), dtype=torch.float32)
        try:
            if out.dim() < 2:
                out.copy_(
                    torch.from_numpy(gguf.quants.dequantize(stored.data, stored.tensor_type).copy()).view(out.shape)
                )
                return out
            rows = max(1, _BLOCK_NUMBERS // max(1, out[0].numel()))
            for start in range(0, out.shape[0], rows):
                block = gguf.quants.dequantize(stored.data[start : start + rows], stored.tensor_type)
                out[start : start + rows] = torch.from_numpy(block.copy())
        except NotImplementedError as error:
            raise SourceError(
                f"tensor '{name}' is quantised as {stored.tensor_type.name}, which the gguf package cannot read",
                "use a file in another quantisation, such as Q8_0 or F16",
            ) from error
        return out

    def _heads_to_restore(self, name: str) -> int | None:
        """How many heads' rows to bring back into rotate-half order, or None to leave them."""
        if self._interleaved_heads is None:
            return None
        query_heads, kv_heads = self._interleaved_heads
        if ".self_attn.q_proj." in name:
            return query_heads
        return kv_heads if ".self_attn.k_proj." in name else None

    def equal_bytes(self, one: str, other: str) -> bool:
        first, second = self._tensors[one], self._tensors[other]
        if first.tensor_type != second.tensor_type or self.shape(one) != self.shape(other):
            return False
        return files_equal_bytes(
            (self._path, int(tensor.data_offset), int(tensor.n_bytes)) for tensor in (first, second)
        )

    def weight_files(self) -> tuple[Path, ...]:
        return (self._path,)

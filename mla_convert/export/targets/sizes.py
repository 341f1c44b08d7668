"""What targets that write Hugging Face folders share: the dtype, the padded sizes, and the cache that follows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mla_convert.export.converted import ConvertedModel
from mla_convert.export.targets.target import ExportOptions
from mla_convert.spec import DTYPE_BYTES

_STORED = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Sizes:
    """C and R of every layer as written."""

    kv_rank: int
    rope_dim: int

    @property
    def cached(self) -> int:
        """Cached numbers a token a layer: C + R."""
        return self.kv_rank + self.rope_dim

    def cache_bytes(self, model: ConvertedModel, dtype: str) -> int:
        """Bytes a token over all layers, in a cache of the weights' dtype."""
        return self.cached * model.spec.num_layers * DTYPE_BYTES[dtype]


def stored_dtype(model: ConvertedModel, options: ExportOptions) -> str:
    """Return what the weights are to be stored as: what was asked for, or what they are (float32 where wider)."""
    if options.dtype is not None:
        return options.dtype
    return "float32" if model.spec.dtype == "float64" else model.spec.dtype


def smallest_sizes(model: ConvertedModel) -> Sizes:
    """Return the C and R that hold every layer; R at least 2, for DeepSeek's attention has RoPE dims."""
    return Sizes(
        kv_rank=max(1, *(shape.kv_rank for shape in model.shapes)),
        rope_dim=max(2, *(shape.rope_dim for shape in model.shapes)),
    )


def asked_sizes(least: Sizes, options: ExportOptions) -> Sizes:
    """Return the sizes with what the user asked for in the place of the least."""
    return Sizes(options.kv_rank or least.kv_rank, options.rope_dim or least.rope_dim)


def size_reasons(least: Sizes, asked: Sizes) -> Iterator[str]:
    """Why the sizes asked for cannot be written, a sentence each."""
    if asked.kv_rank < least.kv_rank:
        yield f"The largest latent has {least.kv_rank} numbers, more than --kv-rank {asked.kv_rank}."
    if asked.rope_dim < least.rope_dim:
        yield f"The RoPE keys need {least.rope_dim} dims, more than --rope-dim {asked.rope_dim}."
    if asked.rope_dim % 2:
        yield f"--rope-dim {asked.rope_dim} is odd, and a RoPE slot has two dims."


def dtype_reasons(name: str, dtype: str) -> Iterator[str]:
    """Why weights of that dtype cannot be written into a Hugging Face folder, a sentence."""
    if dtype not in _STORED:
        yield f"The {name} target does not write {dtype}: --dtype is one of {', '.join(_STORED)}."


def padding_note(model: ConvertedModel, sizes: Sizes) -> Iterator[str]:
    """What zeros are added and what they cost, a sentence where there are any."""
    needed = sum(shape.cached for shape in model.shapes)
    written = sizes.cached * len(model.shapes)
    if written > needed:
        yield (
            f"All layers are written with C = {sizes.kv_rank} and R = {sizes.rope_dim}, with zeros where they have "
            f"less: {written} cached numbers a token instead of the {needed} that the model needs."
        )

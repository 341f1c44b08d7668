"""Random caches for the decode call: paged in a shuffled order or contiguous, in any of its dtypes or packed to fp8."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_kernels.fp8 import fp8_layout, quantize_latent

PAGE = 64
# Rows made at once: a card need not hold a whole cache in float32 beside the cache.
CHUNK_ROWS = 1 << 18
UNUSED = 2147480000


@dataclass(frozen=True)
class DecodeInputs:
    """Arguments of one decode call. ``latent`` holds what was packed, where the cache is fp8; else it is the cache."""

    q: Tensor
    cache: Tensor
    latent: Tensor
    block_table: Tensor | None
    lengths: Tensor


def make_inputs(
    lengths: tuple[int, ...],
    heads: int,
    rank: int,
    rope_dim: int,
    *,
    queries: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    paged: bool = True,
    fp8: bool = False,
    device: torch.device,
    seed: int = 0,
) -> DecodeInputs:
    """Return inputs for sequences of these lengths; what no sequence uses is NaN, and unused table entries are huge.

    The query is scaled so that scores have a standard deviation of about 3 at the scale of :func:`softmax_scale`:
    attention is neither flat nor on one token.
    """
    generator = torch.Generator(device).manual_seed(seed)
    batch, width = len(lengths), rank + rope_dim
    q = torch.randn(batch, queries, heads, width, device=device, generator=generator).mul_(3.0).to(dtype)
    lengths_tensor = torch.tensor(lengths, dtype=torch.int32, device=device)
    longest = max(1, *lengths)
    if not paged:
        latent = torch.randn(batch, longest, width, device=device, generator=generator).to(dtype)
        for b, length in enumerate(lengths):
            latent[b, length:] = float("nan")
        cache = quantize_latent(latent, rank) if fp8 else latent
        return DecodeInputs(q, cache, latent, None, lengths_tensor)
    pages = [-(-length // PAGE) for length in lengths]
    order = torch.randperm(max(1, sum(pages)), generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    table = torch.full((batch, max(1, *pages)), UNUSED, dtype=torch.int32)
    for b, (count, first) in enumerate(zip(pages, _starts(pages), strict=True)):
        table[b, :count] = order[first : first + count]
    latent = torch.randn(len(order), PAGE, width, device=device, generator=generator).to(dtype)
    for b, (count, length) in enumerate(zip(pages, lengths, strict=True)):
        if length % PAGE:
            latent[int(table[b, count - 1]), length % PAGE :] = float("nan")
    cache = quantize_latent(latent, rank) if fp8 else latent
    return DecodeInputs(q, cache, latent, table.to(device), lengths_tensor)


def make_cache(rows: int, rank: int, rope_dim: int, *, fp8: bool, device: torch.device, seed: int) -> Tensor:
    """Return a large paged cache [rows / 64, 64, C + R] in bfloat16, or its packed rows, made piece by piece."""
    width = fp8_layout(rank, rope_dim).row_bytes if fp8 else rank + rope_dim
    cache = torch.empty(rows, width, dtype=torch.uint8 if fp8 else torch.bfloat16, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for piece in cache.split(CHUNK_ROWS):
        latent = torch.randn(len(piece), rank + rope_dim, device=device, generator=generator).to(torch.bfloat16)
        piece.copy_(quantize_latent(latent, rank) if fp8 else latent)
    return cache.view(-1, PAGE, width)


def softmax_scale(rank: int, rope_dim: int) -> float:
    """Return a scale at which scores of the inputs made here have a standard deviation of about 3."""
    return (rank + rope_dim) ** -0.5


def _starts(counts: list[int]) -> list[int]:
    starts = [0]
    for count in counts[:-1]:
        starts.append(starts[-1] + count)
    return starts

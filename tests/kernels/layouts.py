"""Seeded decode inputs in every cache layout, with NaN wherever a path must not look."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GARBAGE_PAGE = 2147480000


@dataclass(frozen=True)
class DecodeCase:
    """One batch in four layouts of the same tokens. Unused slots hold NaN, unused table entries garbage.

    Attributes:
        q: [B, Sq, H, c+r].
        tokens: per sequence, its cached rows [T, c+r]: the plain truth.
        contiguous: [B, L, c+r].
        paged: [pages, page, c+r], the pages permuted over all sequences.
        block_table: int32 [B, max_pages].
        cache_seqlens: int32 [B].
        head_dim_v: c.
        softmax_scale: not (c+r)^-½, as MLA's is not.
    """

    q: Tensor
    tokens: list[Tensor]
    contiguous: Tensor
    paged: Tensor
    block_table: Tensor
    cache_seqlens: Tensor
    head_dim_v: int
    softmax_scale: float

    @property
    def rope_dim(self) -> int:
        return self.q.shape[-1] - self.head_dim_v

    def cache(self, layout: str) -> tuple[Tensor, Tensor | None]:
        """kv_cache and block_table of the ``contiguous`` or ``paged`` layout."""
        return (self.contiguous, None) if layout == "contiguous" else (self.paged, self.block_table)


def decode_case(
    lengths: list[int],
    *,
    queries: int = 1,
    heads: int = 3,
    rank: int = 32,
    rope_dim: int = 16,
    page: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> DecodeCase:
    """Return a case with standard normal tokens and queries."""
    generator = torch.Generator().manual_seed(seed)
    width = rank + rope_dim
    q = torch.randn(len(lengths), queries, heads, width, generator=generator).to(dtype)
    tokens = [torch.randn(length, width, generator=generator).to(dtype) for length in lengths]

    longest = max(lengths)
    contiguous = torch.full((len(lengths), longest + 3, width), torch.nan, dtype=dtype)
    counts = [-(-length // page) for length in lengths]
    spare = 2
    order = torch.randperm(sum(counts) + spare, generator=generator).tolist()
    paged = torch.full((len(order), page, width), torch.nan, dtype=dtype)
    block_table = torch.full((len(lengths), max(counts) + 1), GARBAGE_PAGE, dtype=torch.int32)
    for b, rows in enumerate(tokens):
        contiguous[b, : len(rows)] = rows
        for i in range(counts[b]):
            block_table[b, i] = order.pop()
            part = rows[i * page : (i + 1) * page]
            paged[block_table[b, i], : len(part)] = part
    return DecodeCase(
        q=q,
        tokens=tokens,
        contiguous=contiguous,
        paged=paged,
        block_table=block_table,
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32),
        head_dim_v=rank,
        softmax_scale=0.17,
    )

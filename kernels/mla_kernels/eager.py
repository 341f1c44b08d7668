"""Absorbed decode in plain torch, for CPUs and devices that the kernel does not support.

It walks each sequence's tokens in chunks that stay in cache, with the running softmax of the kernel: the latent is read
from memory once, in whatever format it is kept, and never expanded, copied whole or repeated over heads. Where the rows
lie together in the format that they are computed in, the tokens that every query sees are left to torch's fused
attention, which does the same in one operator.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from mla_kernels.fp8 import dequantize_latent
from mla_kernels.fused import can_fuse, fused_attention, parts_for

# What the caches near a core hold between the two products that read a chunk. On one thread of a server CPU, half and
# three times as much cost a tenth at 32 heads and 512 channels.
_CHUNK_BYTES = 3 << 19
_CHUNK_STEP = 128


def eager_decode(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor,
    head_dim_v: int,
    softmax_scale: float,
    causal: bool = True,
    *,
    window: int | None = None,
    rope_cache: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output [B, Sq, H, c] in q's dtype and the natural-log LSE [B, H, Sq] in float32.

    Arguments are those of ``mla_decode`` and are not checked. Scores, softmax and sums are in float32 (float64 for a
    float64 query). Reads the lengths on the host, so on a GPU it synchronises. Differentiable. A query that sees no
    token gives 0 and −inf.
    """
    batch, queries, heads, width = q.shape
    compute = torch.promote_types(q.dtype, torch.float32)
    cache = _Cache(kv_cache, rope_cache, block_table, head_dim_v, width - head_dim_v, compute)
    lengths = cache_seqlens.tolist()
    rows = (q.to(compute) * softmax_scale).reshape(batch, queries * heads, width)

    # Precision is settled here: autocast would take the products back to 16 bits.
    casting = torch.is_autocast_enabled(q.device.type)
    with torch.autocast(q.device.type, enabled=False) if casting else nullcontext():
        # Sequences of one length share every product; others take turns, so that no token past a length is read.
        if len(set(lengths)) <= 1:
            span = _Span(queries, heads, max(lengths, default=0), causal, window)
            out, lse = _attend(rows, cache, slice(0, batch), span)
        else:
            parts = [
                _attend(rows[b : b + 1], cache, slice(b, b + 1), _Span(queries, heads, length, causal, window))
                for b, length in enumerate(lengths)
            ]
            out, lse = (torch.cat(part) for part in zip(*parts, strict=True))
    return (
        out.to(q.dtype).view(batch, queries, heads, head_dim_v),
        lse.view(batch, queries, heads).transpose(1, 2).contiguous(),
    )


class _Cache(NamedTuple):
    """The cache, whatever its layout, as chunks of latent and RoPE rows of some sequences."""

    kv: Tensor
    rope: Tensor | None
    block_table: Tensor | None
    head_dim_v: int
    rope_dim: int
    dtype: torch.dtype

    @property
    def chunk(self) -> int:
        """Tokens in a chunk."""
        row_bytes = (self.head_dim_v + self.rope_dim) * self.dtype.itemsize
        return max(_CHUNK_BYTES // row_bytes // _CHUNK_STEP, 1) * _CHUNK_STEP

    def tokens(self, group: slice, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """Rows [b, stop-start, c+r] of the group's sequences and None, or [b, stop-start, c] and [b, stop-start, r]."""
        kv = self._rows(self.kv, group, start, stop)
        if kv.dtype == torch.uint8:
            return dequantize_latent(kv, self.head_dim_v, self.rope_dim, self.dtype), None
        if self.block_table is None and kv.dtype == self.dtype and kv.device.type == "cpu":
            # One sequential pass brings the chunk into the core's cache. The products read it in strides that no
            # prefetcher follows: without this they take a tenth longer at 512 channels and a third at 96.
            kv.detach().amax()
        rope = None if self.rope is None else self._rows(self.rope, group, start, stop).to(self.dtype)
        return kv.to(self.dtype), rope

    def in_place(self, group: slice, start: int, stop: int) -> Tensor | None:
        """A view of rows [b, n, c+r] from ``start`` on: as many before ``stop`` as lie together; None where none do."""
        if self.rope is not None or self.kv.dtype != self.dtype:
            return None
        if self.block_table is None:
            return self.kv[group, start:stop]
        page = self.kv.shape[1]
        if group.stop - group.start != 1 or self.kv.stride(0) != page * self.kv.stride(1):
            return None
        first, last = start // page, -(-stop // page)
        pages = self.block_table[group.start, first:last].tolist()
        together = len(pages)
        if pages != list(range(pages[0], pages[0] + together)):
            together = next(i for i, page_id in enumerate(pages) if page_id != pages[0] + i)
        rows = self.kv[pages[0] : pages[0] + together].flatten(0, 1)
        return rows[None, start - first * page : stop - first * page]

    def _rows(self, cache: Tensor, group: slice, start: int, stop: int) -> Tensor:
        if self.block_table is None:
            return cache[group, start:stop]
        page = cache.shape[1]
        first, last = start // page, -(-stop // page)
        pages = self.block_table[group, first:last]
        rows = cache.index_select(0, pages.reshape(-1)).view(pages.shape[0], pages.shape[1] * page, cache.shape[-1])
        return rows[:, start - first * page : stop - first * page]


class _Span(NamedTuple):
    """Which cached tokens the queries of a sequence see: query i those in [stop_i - window, stop_i), from 0 on."""

    queries: int
    heads: int
    length: int
    causal: bool
    window: int | None

    @property
    def first(self) -> int:
        """The first token that some query sees. None before it is read."""
        earliest_stop = self.length - self.queries + 1 if self.causal else self.length
        return 0 if self.window is None else max(0, earliest_stop - self.window)

    @property
    def shared(self) -> tuple[int, int]:
        """The tokens [start, stop) that every query sees; start = stop where there are none."""
        start = 0 if self.window is None else max(0, self.length - self.window)
        stop = self.length - self.queries + 1 if self.causal else self.length
        return start, max(start, stop)

    @property
    def blind(self) -> bool:
        """Whether some query sees no token."""
        return self.causal and self.queries > self.length

    def hidden(self, start: int, stop: int, device: torch.device) -> Tensor | None:
        """Which of the tokens each row must not see, [Sq·H, stop-start]; None where every query sees all of them."""
        latest_first = 0 if self.window is None else self.length - self.window
        all_started = start >= latest_first
        all_visible = not self.causal or stop <= self.length - self.queries + 1
        if all_started and all_visible:
            return None
        token = torch.arange(start, stop, device=device)
        query = torch.arange(self.queries, device=device)[:, None]
        stops = self.length - self.queries + query + 1 if self.causal else torch.full_like(query, self.length)
        hidden = token >= stops
        if self.window is not None:
            hidden = hidden | (token < stops - self.window)
        return hidden.repeat_interleave(self.heads, dim=0)


def _attend(q: Tensor, cache: _Cache, group: slice, span: _Span) -> tuple[Tensor, Tensor]:
    """Attention of scaled query rows [b, Sq·H, c+r] over the group's tokens: out [b, Sq·H, c] and LSE [b, Sq·H, 1]."""
    rank = cache.head_dim_v
    state: tuple[Tensor, Tensor, Tensor] | None = None  # maximum, sum of weights, weighted sum of latents
    left = [(span.first, span.length)]
    start, stop = span.shared
    if start < stop and (rows := cache.in_place(group, start, stop)) is not None and can_fuse(q, rows):
        parts = parts_for(q.shape[0], rows.shape[1])
        count = rows.shape[1] // parts * parts
        out, lse = fused_attention(q, rows[:, :count], rank, parts)
        left = [(span.first, start), (start + count, span.length)]
        if all(first == last for first, last in left):
            return out, lse
        state = lse, torch.ones_like(lse), out
    for start, stop in _chunks(left, cache.chunk):
        latent, rope = cache.tokens(group, start, stop)
        scores = _scores(q, latent, rope, rank)
        hidden = span.hidden(start, stop, q.device)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        top = scores.detach().amax(dim=-1, keepdim=True)
        if hidden is not None:
            # A row that sees none of the tokens has the maximum −inf, from which no difference can be taken.
            top = top.clamp_min(torch.finfo(q.dtype).min)
        if state is None:
            weights = scores.sub_(top).exp_()
            state = top, weights.sum(dim=-1, keepdim=True), torch.bmm(weights, latent[..., :rank])
        else:
            old_top, weight, total = state
            top = torch.maximum(old_top, top)
            weights = scores.sub_(top).exp_()
            kept = (old_top - top).exp_()
            weight = torch.addcmul(weights.sum(dim=-1, keepdim=True), weight, kept)
            state = top, weight, torch.baddbmm(total * kept, weights, latent[..., :rank])
    if state is None:
        return q.new_zeros(*q.shape[:2], rank), q.new_full((*q.shape[:2], 1), -torch.inf)
    top, weight, total = state
    if span.blind:
        seen = weight > 0
        return total / weight.where(seen, 1.0), (top + weight.log()).where(seen, -torch.inf)
    return total / weight, top + weight.log()


def _chunks(ranges: list[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    """The ranges [start, stop) in order, at most ``size`` tokens at a time."""
    for first, last in ranges:
        for start in range(first, last, size):
            yield start, min(start + size, last)


def _scores(q: Tensor, latent: Tensor, rope: Tensor | None, rank: int) -> Tensor:
    """[b, Sq·H, tokens], a new tensor."""
    if rope is None:
        return torch.bmm(q, latent.transpose(1, 2))
    scores = torch.bmm(q[..., rank:], rope.transpose(1, 2))
    return scores.baddbmm_(q[..., :rank], latent.transpose(1, 2))

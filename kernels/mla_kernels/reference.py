"""Attention over the latent cache by its definition, in float64: what every other path is tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_kernels.fp8 import dequantize_latent


def reference_decode(
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
    """Return the output [B, Sq, H, c] and the natural-log LSE [B, H, Sq], both float64.

    For query i of a sequence of T cached tokens (the Sq new ones included) and its visible tokens t,
    lse = log Σ_t exp(scale · q·[c_t; k_t]) and out = Σ_t exp(scale · q·[c_t; k_t] − lse) c_t: DeepSeek-V2's latent
    attention with the up-projections absorbed into the query (arXiv 2405.04434, section 2.1.2). Visible are all T
    tokens, or with `causal` the first T − Sq + i + 1, and of these with `window` the last `window`. A query that sees
    none gives 0 and −inf. Arguments are those of ``mla_decode``; they are not checked.
    """
    batch, queries, heads, _ = q.shape
    out = torch.zeros(batch, queries, heads, head_dim_v, dtype=torch.float64, device=q.device)
    lse = torch.full((batch, heads, queries), -torch.inf, dtype=torch.float64, device=q.device)
    for b in range(batch):
        length = int(cache_seqlens[b])
        tokens = _tokens(kv_cache, block_table, b, length, q.shape[-1] - head_dim_v, head_dim_v)
        if rope_cache is not None:
            tokens = torch.cat((tokens, _rows(rope_cache, block_table, b, length).double()), dim=-1)
        for i in range(queries):
            stop = length - queries + i + 1 if causal else length
            start = 0 if window is None else max(0, stop - window)
            if stop <= start:
                continue
            seen = tokens[start:stop]
            scores = softmax_scale * (q[b, i].double() @ seen.T)
            lse[b, :, i] = torch.logsumexp(scores, dim=-1)
            out[b, i] = torch.exp(scores - lse[b, :, i, None]) @ seen[:, :head_dim_v]
    return out, lse


def _rows(cache: Tensor, block_table: Tensor | None, b: int, length: int) -> Tensor:
    """The cached rows of one sequence, [length, ...], gathered position by position from its pages."""
    if block_table is None:
        return cache[b, :length]
    positions = torch.arange(length, device=cache.device)
    page = cache.shape[1]
    return cache[block_table[b, positions // page].long(), positions % page]


def _tokens(cache: Tensor, block_table: Tensor | None, b: int, length: int, rope_dim: int, head_dim_v: int) -> Tensor:
    rows = _rows(cache, block_table, b, length)
    if cache.dtype == torch.uint8:
        return dequantize_latent(rows, head_dim_v, rope_dim, torch.float64)
    return rows.double()

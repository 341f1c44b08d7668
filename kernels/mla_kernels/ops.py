"""`mla_decode` as a PyTorch custom operator, so that torch.compile and torch.export trace through it."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_kernels.decode import run


@torch.library.custom_op("mla_kernels::decode", mutates_args=())
def decode_op(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor,
    head_dim_v: int,
    softmax_scale: float,
    causal: bool,
    num_splits: int | None,
    window: int | None,
    rope_cache: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """`mla_decode` without ``out``, its arguments in order."""
    out, lse = run(
        q, kv_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, causal, num_splits, window, rope_cache,
        backend, None,
    )  # fmt: skip
    return out.contiguous(), lse.contiguous()


@decode_op.register_fake
def _(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor,
    head_dim_v: int,
    softmax_scale: float,
    causal: bool,
    num_splits: int | None,
    window: int | None,
    rope_cache: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    batch, queries, heads, _ = q.shape
    return q.new_empty(batch, queries, heads, head_dim_v), q.new_empty(batch, heads, queries, dtype=torch.float32)

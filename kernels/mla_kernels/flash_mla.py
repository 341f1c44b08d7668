"""FlashMLA's decode interface over `mla_decode`: code written for ``flash_mla`` runs by changing its import.

Both of its calling forms are taken: the one that passes tile-scheduler tensors from step to step, and the newer one
with a scheduler object. Beyond FlashMLA, any latent rank, RoPE size and page of a multiple of 16 tokens works, on any
device of `mla_decode`; sparse attention and several key heads do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_kernels.errors import InvalidInputError, UnsupportedShapeError
from mla_kernels.fp8 import fp8_layout

_BYTE_DTYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn)
_DENSE_ONLY = "attend densely: only FlashMLA itself has sparse attention"


@dataclass(frozen=True)
class FlashMLASchedMeta:
    """What FlashMLA keeps a schedule in. Nothing is kept here: work is divided by shapes alone, anew at every call."""


def get_mla_metadata(
    cache_seqlens: Tensor | None = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int = 1,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[FlashMLASchedMeta, None]:
    """Return the two values that `flash_mla_with_kvcache` takes, as FlashMLA does. It reads no argument but these:

    Raises:
        UnsupportedShapeError: `num_heads_k` is not 1.
        InvalidInputError: `topk` asks for sparse attention.
    """
    _check_key_heads(num_heads_k)
    if topk is not None:
        raise InvalidInputError(f"topk is {topk}", _DENSE_ONLY)
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta | Tensor | None,
    num_splits: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output [B, Sq, H, head_dim_v] in q's dtype and the natural-log LSE [B, H, Sq] in float32.

    As in FlashMLA, and unlike in `mla_decode`, a query that sees no token has the output 0 and the LSE **+inf**; turn
    that into −inf before `merge_states`. Through Triton where `choose_backend` says so, else through torch.

    Args:
        q: [B, Sq, H, d], the absorbed query: latent part first, RoPE part last.
        k_cache: [pages, page, 1, d] in q's dtype; with `is_fp8_kvcache` [pages, page, 1, row_bytes] of packed rows as
            `fp8_layout` has them, in any 8-bit dtype (at d = 576 FlashMLA's 656 bytes).
        block_table: [B, max_pages], int32.
        cache_seqlens: [B], int32, with the Sq new tokens.
        head_dim_v: the latent rank c.
        tile_scheduler_metadata, num_splits: what `get_mla_metadata` returned, here or in FlashMLA; not read.
        softmax_scale: of the scores; None is d^-½ as in FlashMLA. An MLA model's own scale is another.
        causal: query i sees the first T − Sq + i + 1 tokens instead of all T.
        is_fp8_kvcache: whether `k_cache` holds packed rows.
        indices, attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length: of sparse
            attention; they must be None.

    Raises:
        InvalidInputError: an argument of sparse attention is given, `block_table` or `cache_seqlens` is missing, or the
            cache's shape or dtype does not fit. Those of `mla_decode` besides.
        UnsupportedShapeError: there is more than one key head, or no tile for these sizes.
    """
    from mla_kernels.backends import choose_backend
    from mla_kernels.decode import mla_decode

    sparse = {
        "indices": indices,
        "attn_sink": attn_sink,
        "extra_k_cache": extra_k_cache,
        "extra_indices_in_kvcache": extra_indices_in_kvcache,
        "topk_length": topk_length,
        "extra_topk_length": extra_topk_length,
    }
    given = [name for name, value in sparse.items() if value is not None]
    if given:
        raise InvalidInputError(f"{', '.join(given)} given", _DENSE_ONLY)
    if block_table is None or cache_seqlens is None:
        raise InvalidInputError("block_table or cache_seqlens is None", "pass both: the cache is paged")
    if isinstance(softmax_scale, bool):
        raise InvalidInputError(
            f"softmax_scale is {softmax_scale}", "pass causal by name: after num_splits comes softmax_scale"
        )
    kv_cache = _paged_cache(q, k_cache, head_dim_v, is_fp8_kvcache)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    backend = choose_backend(q.device, q.dtype, head_dim_v).name
    out, lse = mla_decode(q, kv_cache, block_table, cache_seqlens, head_dim_v, scale, causal, backend=backend)
    return out, lse.masked_fill(lse == -torch.inf, torch.inf)


def _paged_cache(q: Tensor, k_cache: Tensor, head_dim_v: int, is_fp8_kvcache: bool) -> Tensor:
    """The cache without its head dimension, [pages, page, d or row_bytes], packed rows as uint8."""
    if k_cache.dim() != 4:
        raise InvalidInputError(f"k_cache has shape {tuple(k_cache.shape)}", "pass [pages, page, 1, d]")
    _check_key_heads(k_cache.shape[2])
    if not is_fp8_kvcache:
        if k_cache.dtype != q.dtype:
            raise InvalidInputError(
                f"k_cache is {k_cache.dtype} and q {q.dtype}",
                "convert one, or pass is_fp8_kvcache=True for packed rows",
            )
        return k_cache[:, :, 0]
    row_bytes = fp8_layout(head_dim_v, q.shape[-1] - head_dim_v).row_bytes
    if k_cache.dtype not in _BYTE_DTYPES or k_cache.shape[-1] != row_bytes:
        raise InvalidInputError(
            f"an fp8 k_cache is {k_cache.dtype} with rows of {k_cache.shape[-1]}",
            f"pass the rows of quantize_latent: torch.uint8 of {row_bytes} bytes",
        )
    return k_cache[:, :, 0].view(torch.uint8)


def _check_key_heads(count: int) -> None:
    if count != 1:
        raise UnsupportedShapeError(f"there are {count} key heads", "decode the latent of MLA, which has one")

"""`mla_decode`: attention of absorbed queries over a latent cache."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_kernels.backends import BACKENDS, BackendName
from mla_kernels.checks import check_inputs
from mla_kernels.errors import InvalidInputError, UnsupportedDeviceError
from mla_kernels.splits import MAX_SPLITS


def mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor,
    head_dim_v: int,
    softmax_scale: float,
    causal: bool = True,
    *,
    num_splits: int | None = None,
    window: int | None = None,
    rope_cache: Tensor | None = None,
    backend: BackendName = "triton",
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return softmax(softmax_scale · q kᵀ) c_kv for every head, where k = [c_kv, k_rope] is the cached row itself.

    This is the absorbed form of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1.2): q's latent
    part is W_UKᵀ q_nope, and W_UV still applies to the result. Every cached row serves all heads, as key and as value.

    Args:
        q: [B, Sq, H, c+r], bfloat16, float16 or float32: the latent part first, then the rotated RoPE part. The Sq
            queries are the last of each sequence's tokens.
        kv_cache: [pages, page, c+r] with a ``block_table``, else [B, L, c+r], in q's dtype. A page is a multiple of 16
            tokens. With dtype uint8, packed fp8 rows (`quantize_latent`). What lies beyond a sequence's length is not
            read; what a query does not see for other reasons must be finite. Any strides but the last; 16-byte aligned
            rows load fastest.
        block_table: int32 [B, max_pages], the pages of each sequence in order; entries beyond its length are ignored.
        cache_seqlens: int32 [B], the cached tokens of each sequence, the Sq new ones included; 0 is allowed.
        head_dim_v: c, the latent rank: 16 to 1024 (512 with fp8) for Triton; multiples of 16 load at full width, and of
            an fp8 cache nothing else will do. r is what is left of q: 0 to 128 for Triton.
        softmax_scale: the factor on the scores. MLA's is that of the heads before absorption, not (c+r)^-1/2.
        causal: whether query i sees cached tokens < length - Sq + i + 1, or all of them.
        num_splits: parts into which the cache is divided for parallelism; None chooses from the shapes alone.
        window: a query sees only its last ``window`` visible tokens, itself included.
        rope_cache: the RoPE part [.., r] where it is kept apart; ``kv_cache`` is then [.., c].
        backend: "triton" (a GPU, or CPU tensors under TRITON_INTERPRET=1), "torch" (any device), or "reference"
            (float64, slow). Nothing is chosen silently: `choose_backend` says what suits a device.
        out: where to write the output, [B, Sq, H, c], contiguous.

    Returns:
        out [B, Sq, H, c] in q's dtype, and lse [B, H, Sq] in float32, the natural logarithm of the sum of the scores'
        exponentials. A query that sees nothing has 0 and -inf. Only "torch" and "reference" have gradients, and not
        inside torch.compile.

    Raises:
        InvalidInputError: a dtype, device or shape that does not fit, or (on the CPU, where looking costs nothing) a
            length beyond the cache or a page that does not exist. On a GPU lengths are cut at the cache's capacity.
        UnsupportedShapeError: a rank, RoPE size or page size that no tile fits.
        UnsupportedDeviceError: the backend cannot run on this device.
    """
    if torch.compiler.is_compiling():
        from mla_kernels.ops import decode_op

        if out is not None:
            raise InvalidInputError("out is not supported inside torch.compile", "use the returned tensor")
        return decode_op(
            q, kv_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, causal, num_splits, window, rope_cache,
            backend,
        )  # fmt: skip
    return run(
        q, kv_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, causal, num_splits, window, rope_cache,
        backend, out,
    )  # fmt: skip


def run(
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
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Check the arguments of `mla_decode` and run the backend."""
    if backend not in BACKENDS:
        raise InvalidInputError(f"there is no backend {backend!r}", f"give one of {', '.join(BACKENDS)}")
    if num_splits is not None and not 1 <= num_splits <= MAX_SPLITS:
        raise InvalidInputError(f"num_splits is {num_splits}", f"give 1 to {MAX_SPLITS}, or None to have it chosen")
    softmax_scale = float(softmax_scale)
    inputs = check_inputs(
        q, kv_cache, block_table, cache_seqlens, head_dim_v, window=window, rope_cache=rope_cache, out=out,
        tiled=backend == "triton",
    )  # fmt: skip
    if q.device.type == "meta":
        raise UnsupportedDeviceError("the tensors are on meta, without contents", "move them to a CPU or a GPU")
    if backend == "triton":
        from mla_kernels.backends import describe

        # Before launch.py is imported, which needs triton.
        describe(q.device)
        if torch.is_grad_enabled() and (q.requires_grad or kv_cache.requires_grad):
            raise InvalidInputError(
                "the kernel has no backward pass, and q or kv_cache requires gradients",
                'call it under torch.no_grad(), or use backend="torch"',
            )
        from mla_kernels.launch import triton_decode

        return triton_decode(inputs, softmax_scale, causal, num_splits, out)
    from mla_kernels.eager import eager_decode
    from mla_kernels.reference import reference_decode

    decode = eager_decode if backend == "torch" else reference_decode
    result, lse = decode(
        q, kv_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, causal, window=window, rope_cache=rope_cache
    )
    result, lse = result.to(q.dtype), lse.to(torch.float32)
    return (result.contiguous() if out is None else out.copy_(result)), lse

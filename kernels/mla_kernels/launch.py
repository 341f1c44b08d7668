"""Launch the Triton kernels on checked inputs. Importing this module imports triton."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

from mla_kernels.backends import interpreting
from mla_kernels.checks import DecodeInputs
from mla_kernels.choice import choose_launch
from mla_kernels.combine import combine_kernel
from mla_kernels.errors import InvalidInputError
from mla_kernels.kernel import decode_kernel
from mla_kernels.tiles import latent_chunks, padded_rope_dim

# Typed as what they are at run time: subscripted with a grid, called with compilation options.
_decode: Any = decode_kernel
_combine: Any = combine_kernel
# The largest extent of a launch grid's second and third dimension.
_GRID_LIMIT = 65535
_COMBINE_CHANNELS = 128
_COMBINE_SPLITS = 32


def triton_decode(
    inputs: DecodeInputs, softmax_scale: float, causal: bool, num_splits: int | None, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return out [B, Sq, H, C] and lse [B, H, Sq] (float32, natural logarithm); no synchronisation.

    Raises:
        UnsupportedDeviceError: the tensors' device cannot run the kernel.
        UnsupportedShapeError: no tile fits the rank on this device.
        InvalidInputError: the batch is too large for a launch.
    """
    launch = choose_launch(inputs, num_splits)
    tile, splits = launch.tile, launch.splits
    batch, queries, heads, _ = inputs.q.shape
    rank, rope_dim = inputs.latent.shape[-1], inputs.rope.shape[-1]
    rows, fp8 = queries * heads, inputs.scales is not None
    if batch > _GRID_LIMIT:
        raise InvalidInputError(f"a batch of {batch} is larger than a launch takes", f"split it: at most {_GRID_LIMIT}")

    q = inputs.q.reshape(batch, rows, rank + rope_dim)
    if q.stride(-1) != 1:
        q = q.contiguous()
    if out is None:
        out = torch.empty(batch, queries, heads, rank, dtype=q.dtype, device=q.device)
    out_rows = out.view(batch, rows, rank)
    lse = torch.empty(batch, rows, dtype=torch.float32, device=q.device)
    if splits == 1:
        partial, partial_lse = out_rows[None], lse[None]
    else:
        partial = torch.empty(splits, batch, rows, rank, dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(splits, batch, rows, dtype=torch.float32, device=q.device)
    causal = causal and queries > 1
    c0, c1, c2, c3 = latent_chunks(rank, fp8=fp8)
    # Where there are none, any tensor stands in: the kernel does not look.
    scales = inputs.latent if inputs.scales is None else inputs.scales
    table = inputs.lengths if inputs.block_table is None else inputs.block_table
    with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
        _decode[(launch.row_blocks, splits, batch)](
            q,
            inputs.latent,
            inputs.rope,
            scales,
            table,
            inputs.lengths,
            partial,
            partial_lse,
            softmax_scale * math.log2(math.e),
            inputs.capacity,
            inputs.window,
            *q.stride()[:2],
            *inputs.latent.stride()[:2],
            *inputs.rope.stride()[:2],
            *scales.stride()[:2],
            table.stride(0),
            *partial.stride()[:3],
            *partial_lse.stride()[:2],
            rows,
            heads,
            queries,
            splits,
            C=rank,
            C0=c0,
            C1=c1,
            C2=c2,
            C3=c3,
            R=rope_dim,
            R_PADDED=padded_rope_dim(rope_dim),
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            PAGE=inputs.page if inputs.block_table is not None else 0,
            PAGED=inputs.block_table is not None,
            CAUSAL=causal,
            WINDOW=inputs.window > 0,
            FP8=fp8,
            PTX=not isinstance(launch.device.arch, str) and not interpreting(),
            UPCAST=interpreting(),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        if splits > 1:
            channels = min(_COMBINE_CHANNELS, triton.next_power_of_2(rank))
            _combine[(rows, triton.cdiv(rank, channels), batch)](
                partial,
                partial_lse,
                inputs.lengths,
                out_rows,
                lse,
                inputs.capacity,
                inputs.window,
                *partial.stride()[:3],
                *partial_lse.stride()[:2],
                *out_rows.stride()[:2],
                lse.stride(0),
                queries,
                splits,
                C=rank,
                SPLITS_PADDED=triton.next_power_of_2(splits),
                BLOCK_S=min(_COMBINE_SPLITS, triton.next_power_of_2(splits)),
                BLOCK_C=channels,
                BLOCK_N=tile.block_n,
                CAUSAL=causal,
                WINDOW=inputs.window > 0,
                num_warps=4,
            )
    return out, lse.view(batch, queries, heads).transpose(1, 2)

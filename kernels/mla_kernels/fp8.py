"""Latent cache rows in fp8: one packed row of bytes per token, with a scale for every block of 128 latent channels.

A row holds, in this order, c e4m3 codes, ceil(c/128) float32 scales, and the r RoPE channels in bfloat16, padded to a
multiple of 16 bytes. At c = 512 and r = 64 that is the 656-byte row of FlashMLA's fp8 cache. The RoPE channels stay in
bfloat16 since an error there turns every query's phase.

e4m3 reaches from 448 down to 2^-9, so what a scale must do is keep outliers in range and everything else above the
subnormals. One fixed scale saturates outliers; one scale for a tensor rounds away what is 10^5 times smaller than its
largest entry; a scale per token and block confines an outlier to its own block of its own token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_kernels.errors import InvalidInputError, UnsupportedShapeError

BLOCK = 128
_LARGEST_CODE = torch.finfo(torch.float8_e4m3fn).max  # 448
# A smaller scale would be flushed to zero where subnormal float32 numbers are.
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_ALIGNMENT = 16


@dataclass(frozen=True)
class Fp8Layout:
    """Where a token's packed row keeps what, in bytes from its start. The codes are at 0, one byte a channel.

    Attributes:
        head_dim_v: the latent rank c.
        rope_dim: the RoPE channels r.
        blocks: scales per token, ceil(c / 128).
        scale_offset: of the float32 scales.
        rope_offset: of the bfloat16 RoPE channels.
        row_bytes: of the whole row, a multiple of 16.
    """

    head_dim_v: int
    rope_dim: int
    blocks: int
    scale_offset: int
    rope_offset: int
    row_bytes: int


def fp8_layout(head_dim_v: int, rope_dim: int) -> Fp8Layout:
    """Return the row layout for the latent rank c = `head_dim_v` and r = `rope_dim`.

    Raises:
        UnsupportedShapeError: c is no positive multiple of 16, or r no positive even number.
    """
    if head_dim_v <= 0 or head_dim_v % 16:
        raise UnsupportedShapeError(
            f"fp8 rows need a latent rank that is a multiple of 16, not {head_dim_v}",
            "pad the latent with zero channels, or keep the cache in 16 bits",
        )
    if rope_dim <= 0 or rope_dim % 2:
        raise UnsupportedShapeError(
            f"fp8 rows need a positive even number of RoPE channels, not {rope_dim}",
            "pass the RoPE channels as pairs",
        )
    blocks = -(-head_dim_v // BLOCK)
    rope_offset = head_dim_v + 4 * blocks
    row_bytes = -(-(rope_offset + 2 * rope_dim) // _ALIGNMENT) * _ALIGNMENT
    return Fp8Layout(head_dim_v, rope_dim, blocks, head_dim_v, rope_offset, row_bytes)


def quantize_latent(kv: Tensor, head_dim_v: int) -> Tensor:
    """Return the rows [..., c+r] (latent first, RoPE last) as packed uint8 rows [..., row_bytes].

    A code is the e4m3 number nearest to value / scale, and scale = amax / 448 over the token's block (1 for a block of
    zeros). A block that holds a NaN or an infinity gets the scale NaN and finite codes, so that it reads back as NaN.

    Raises:
        InvalidInputError: `kv` is not floating point.
        UnsupportedShapeError: :func:`fp8_layout` has no row for these sizes.
    """
    if not kv.is_floating_point():
        raise InvalidInputError(f"kv has dtype {kv.dtype}", "pass the rows in bfloat16, float16 or float32")
    layout = fp8_layout(head_dim_v, kv.shape[-1] - head_dim_v)
    latent = kv[..., :head_dim_v].float()
    # Zero channels fill the last block: they change no maximum.
    padding = layout.blocks * BLOCK - head_dim_v
    blocks = torch.nn.functional.pad(latent, (0, padding)).unflatten(-1, (layout.blocks, BLOCK))
    amax = blocks.abs().amax(-1)
    scales = (amax / _LARGEST_CODE).clamp_min(_SMALLEST_SCALE).masked_fill(amax == 0, 1.0)
    finite = amax.isfinite()
    codes = (blocks / scales[..., None]).masked_fill(~finite[..., None], 0.0).clamp(-_LARGEST_CODE, _LARGEST_CODE)
    codes = codes.to(torch.float8_e4m3fn).flatten(-2)[..., :head_dim_v]
    scales = scales.masked_fill(~finite, float("nan"))

    rows = torch.zeros(*kv.shape[:-1], layout.row_bytes, dtype=torch.uint8, device=kv.device)
    rows[..., : layout.scale_offset] = codes.view(torch.uint8)
    rows[..., layout.scale_offset : layout.rope_offset] = scales.view(torch.uint8)
    rope = kv[..., head_dim_v:].to(torch.bfloat16).contiguous()
    rows[..., layout.rope_offset : layout.rope_offset + 2 * layout.rope_dim] = rope.view(torch.uint8)
    return rows


def dequantize_latent(rows: Tensor, head_dim_v: int, rope_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return packed rows [..., row_bytes] as [..., c+r] in `dtype`: code times scale, and the RoPE channels as kept.

    Raises:
        InvalidInputError: `rows` is not uint8, or its last dimension is not the layout's ``row_bytes``.
        UnsupportedShapeError: :func:`fp8_layout` has no row for these sizes.
    """
    layout = fp8_layout(head_dim_v, rope_dim)
    if rows.dtype != torch.uint8 or rows.shape[-1] != layout.row_bytes:
        raise InvalidInputError(
            f"packed rows are {rows.dtype} of {rows.shape[-1]} bytes",
            f"rank {head_dim_v} with {rope_dim} RoPE channels needs torch.uint8 of {layout.row_bytes} bytes",
        )
    # Products of an 8-bit code and a float32 scale: rounded once, to float32, whatever is asked for below that.
    compute = torch.promote_types(dtype, torch.float32)
    codes = rows[..., : layout.scale_offset].view(torch.float8_e4m3fn).to(compute)
    scales = rows[..., layout.scale_offset : layout.rope_offset].contiguous().view(torch.float32).to(compute)
    rope = rows[..., layout.rope_offset : layout.rope_offset + 2 * rope_dim].contiguous().view(torch.bfloat16)
    latent = codes * scales.repeat_interleave(BLOCK, dim=-1)[..., :head_dim_v]
    return torch.cat((latent.to(dtype), rope.to(dtype)), dim=-1)

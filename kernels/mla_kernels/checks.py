"""What `mla_decode` is given, checked before anything is launched, and brought into one form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_kernels.errors import InvalidInputError, UnsupportedShapeError
from mla_kernels.fp8 import fp8_layout
from mla_kernels.tiles import MAX_ROPE_DIM, MIN_PAGE, MIN_RANK

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class DecodeInputs:
    """The tensors of a call, views of what was given.

    Attributes:
        q: [B, Sq, H, C+R].
        latent: [P, page, C], or [B, L, C] where there is no block table; e4m3 codes as uint8 for an fp8 cache.
        rope: [P, page, R] or [B, L, R].
        scales: float32 [.., C/128 rounded up] of an fp8 cache, else None.
        block_table: int32 [B, max_pages] or None.
        lengths: int32 [B].
        capacity: tokens that a sequence's cache can hold.
        window: tokens that a query sees at most, or 0 for all.
    """

    q: Tensor
    latent: Tensor
    rope: Tensor
    scales: Tensor | None
    block_table: Tensor | None
    lengths: Tensor
    capacity: int
    window: int

    @property
    def page(self) -> int:
        """Tokens of a page, or of the whole cache of a sequence where it is not paged."""
        return self.latent.shape[1]

    @property
    def token_bytes(self) -> int:
        """Bytes that are read for one cached token."""
        scales = 0 if self.scales is None else 4 * self.scales.shape[-1]
        return self.latent.shape[-1] * self.latent.itemsize + self.rope.shape[-1] * self.rope.itemsize + scales


def check_inputs(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor,
    head_dim_v: int,
    *,
    window: int | None = None,
    rope_cache: Tensor | None = None,
    out: Tensor | None = None,
    tiled: bool = True,
) -> DecodeInputs:
    """Return the call's tensors as the kernels take them; ``tiled`` where the sizes must be those of a tile.

    Lengths and page numbers are looked at where they lie on the CPU. On a GPU that would wait for the device, so there
    the kernel cuts lengths at the cache's capacity; `check_lengths` looks, and waits.

    Raises:
        InvalidInputError: a dtype, device or shape that does not fit the others, or a length that does not fit.
        UnsupportedShapeError: a latent rank, RoPE size or page size that the kernels do not have.
    """
    _check_kinds(q, kv_cache, block_table, cache_seqlens, head_dim_v, rope_cache)
    rope_dim = _check_query(q, head_dim_v, tiled)
    _check_same_device(
        q, kv_cache=kv_cache, block_table=block_table, cache_seqlens=cache_seqlens, rope_cache=rope_cache
    )
    latent, rope, scales = _split_cache(q, kv_cache, rope_cache, head_dim_v, rope_dim)
    batch = q.shape[0]
    if cache_seqlens.dtype != torch.int32 or cache_seqlens.shape != (batch,):
        raise InvalidInputError(
            f"cache_seqlens must be int32 of shape ({batch},), got {_describe(cache_seqlens)}",
            "give the number of cached tokens of each sequence, .to(torch.int32)",
        )
    capacity = latent.shape[1] if block_table is None else _check_pages(block_table, latent.shape[1], batch)
    if block_table is None and latent.shape[0] != batch:
        raise InvalidInputError(
            f"without a block_table, kv_cache must have one row for each of the {batch} sequences, "
            f"got {latent.shape[0]}",
            "give [B, L, c+r], or a block_table for a paged cache",
        )
    if window is not None and window < 1:
        raise InvalidInputError(f"a window of {window} tokens shows nothing", "give at least 1, or None for no window")
    if out is not None and (out.shape != (*q.shape[:3], head_dim_v) or out.dtype != q.dtype or out.device != q.device):
        raise InvalidInputError(
            f"out must be {q.dtype} of shape {(*q.shape[:3], head_dim_v)} on {q.device}, got {_describe(out)}",
            "give such a tensor, or none",
        )
    if out is not None and not out.is_contiguous():
        raise InvalidInputError("out must be contiguous", "give out=torch.empty(...) of the output's shape")
    # A window beyond every cache is none, and lengths are read one after the other.
    window = None if window is None or window > capacity else window
    inputs = DecodeInputs(q, latent, rope, scales, block_table, cache_seqlens.contiguous(), capacity, window or 0)
    if cache_seqlens.device.type == "cpu":
        check_lengths(inputs)
    return inputs


def check_lengths(inputs: DecodeInputs) -> None:
    """Look at the lengths and the page numbers themselves; on a GPU this waits for the device.

    Raises:
        InvalidInputError: a length is negative or beyond the cache's capacity, or a page in use does not exist.
    """
    lengths = inputs.lengths
    if lengths.numel() == 0:
        return
    shortest, longest = int(lengths.min()), int(lengths.max())
    if shortest < 0:
        raise InvalidInputError(f"cache_seqlens holds {shortest}", "give lengths of 0 or more")
    if longest > inputs.capacity:
        holds = "its row" if inputs.block_table is None else f"a block_table of {inputs.block_table.shape[1]} pages"
        raise InvalidInputError(
            f"a sequence of {longest} tokens does not fit {holds}, which holds {inputs.capacity}",
            "give a longer cache, or a wider block_table",
        )
    if inputs.block_table is None:
        return
    first_token = torch.arange(inputs.block_table.shape[1], device=lengths.device) * inputs.page
    used = inputs.block_table[first_token[None] < lengths[:, None]]
    if used.numel() and (int(used.min()) < 0 or int(used.max()) >= inputs.latent.shape[0]):
        raise InvalidInputError(
            f"block_table names page {int(used.max()) if int(used.min()) >= 0 else int(used.min())} "
            f"of a cache of {inputs.latent.shape[0]} pages",
            "give page numbers from 0 to the number of pages - 1 for every page that a sequence uses",
        )


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def _check_kinds(
    q: object,
    kv_cache: object,
    block_table: object,
    cache_seqlens: object,
    head_dim_v: object,
    rope_cache: object,
) -> None:
    tensors = {"q": q, "kv_cache": kv_cache, "cache_seqlens": cache_seqlens}
    tensors |= {
        name: given for name, given in (("block_table", block_table), ("rope_cache", rope_cache)) if given is not None
    }
    for name, given in tensors.items():
        if not isinstance(given, Tensor):
            raise InvalidInputError(f"{name} is a {type(given).__name__}", "give a tensor")
    if isinstance(head_dim_v, bool) or not isinstance(head_dim_v, int):
        raise InvalidInputError(f"head_dim_v is {head_dim_v!r}", "give the latent rank as an integer")


def _check_query(q: Tensor, head_dim_v: int, tiled: bool) -> int:
    """Return the RoPE dims of the query."""
    if q.ndim != 4 or q.numel() == 0:
        raise InvalidInputError(
            f"q must be [B, Sq, H, c+r] and not empty, got shape {tuple(q.shape)}", "give the absorbed queries"
        )
    if q.dtype not in DTYPES:
        raise InvalidInputError(f"q is {q.dtype}", "give bfloat16, float16 or float32")
    rope_dim = q.shape[-1] - head_dim_v
    if head_dim_v < 1 or rope_dim < 0:
        raise InvalidInputError(
            f"q has {q.shape[-1]} channels, and head_dim_v is {head_dim_v}",
            "head_dim_v must be the latent rank, and q hold the RoPE part after it",
        )
    if tiled and head_dim_v < MIN_RANK:
        raise UnsupportedShapeError(
            f"a latent rank of {head_dim_v} is below {MIN_RANK}",
            f'pad the latents, and the latent part of q, with zeros to {MIN_RANK} channels, or use backend="torch"',
        )
    if tiled and rope_dim > MAX_ROPE_DIM:
        raise UnsupportedShapeError(
            f"a RoPE part of {rope_dim} is beyond the kernel's {MAX_ROPE_DIM}",
            'check head_dim_v, or use backend="torch"',
        )
    return rope_dim


def _check_same_device(q: Tensor, **others: Tensor | None) -> None:
    for name, other in others.items():
        if other is not None and other.device != q.device:
            raise InvalidInputError(f"{name} is on {other.device}, q on {q.device}", "move them to one device")


def _split_cache(
    q: Tensor, kv_cache: Tensor, rope_cache: Tensor | None, rank: int, rope_dim: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return views of the cache's latents, RoPE keys and fp8 scales."""
    packed = kv_cache.dtype == torch.uint8
    if kv_cache.dtype == torch.float8_e4m3fn:
        raise InvalidInputError(
            "kv_cache is torch.float8_e4m3fn",
            "give the rows of quantize_latent, .view(torch.uint8): they hold scales too",
        )
    if packed and rope_cache is not None:
        raise InvalidInputError("an fp8 cache holds the RoPE part in its rows", "give no rope_cache with it")
    if packed and (rank % MIN_RANK or rope_dim % 2 or rope_dim == 0):
        raise UnsupportedShapeError(
            f"an fp8 cache takes latent ranks that are multiples of {MIN_RANK} and even RoPE sizes above 0, "
            f"not {rank} and {rope_dim}",
            f"pad the latents with zeros to a multiple of {MIN_RANK}, or use a 16-bit cache",
        )
    if packed:
        width, what = fp8_layout(rank, rope_dim).row_bytes, "the packed row of that rank and RoPE size"
    elif rope_cache is not None:
        width, what = rank, "head_dim_v, with the RoPE part in rope_cache"
    else:
        width, what = q.shape[-1], "c+r, as q has"
    if kv_cache.ndim != 3 or kv_cache.shape[-1] != width or kv_cache.shape[1] == 0:
        raise InvalidInputError(
            f"kv_cache must be [pages, page, {width}] or [B, L, {width}] ({what}), got {_describe(kv_cache)}",
            "check head_dim_v and the layout of the cache",
        )
    if not packed and kv_cache.dtype != q.dtype:
        raise InvalidInputError(
            f"kv_cache is {kv_cache.dtype}, q is {q.dtype}", "give both in one dtype, or an fp8 cache as uint8 rows"
        )
    if rope_cache is not None and (rope_cache.shape != (*kv_cache.shape[:2], rope_dim) or rope_cache.dtype != q.dtype):
        raise InvalidInputError(
            f"rope_cache must be {q.dtype} of shape {(*kv_cache.shape[:2], rope_dim)}, got {_describe(rope_cache)}",
            "give the RoPE part of the same pages",
        )
    for name, cache in (("kv_cache", kv_cache), ("rope_cache", rope_cache)):
        if cache is not None and cache.shape[-1] > 1 and cache.stride(-1) != 1:
            raise InvalidInputError(f"the last dim of {name} is not contiguous", "give each token's row in one piece")
    if not packed:
        rope = kv_cache[..., rank:] if rope_cache is None else rope_cache
        return kv_cache[..., :rank], rope, None
    layout = fp8_layout(rank, rope_dim)
    if kv_cache.storage_offset() % 16 or any(stride % 16 for stride in kv_cache.stride()[:2]):
        raise InvalidInputError("the rows of an fp8 cache must start at multiples of 16 bytes", "allocate it whole")
    scales_end = layout.scale_offset + 4 * layout.blocks
    scales = kv_cache[..., layout.scale_offset : scales_end].view(torch.float32)
    rope = kv_cache[..., layout.rope_offset : layout.rope_offset + 2 * rope_dim].view(torch.bfloat16)
    return kv_cache[..., :rank], rope, scales


def _check_pages(block_table: Tensor, page: int, batch: int) -> int:
    """Return the tokens that the pages of one sequence can hold."""
    if block_table.dtype != torch.int32 or block_table.ndim != 2 or block_table.shape[0] != batch:
        raise InvalidInputError(
            f"block_table must be int32 of shape ({batch}, max_pages), got {_describe(block_table)}",
            "give one row of page numbers for each sequence, .to(torch.int32)",
        )
    if block_table.shape[1] == 0:
        raise InvalidInputError("block_table has no pages", "give room for at least one page a sequence")
    if block_table.stride(1) != 1:
        raise InvalidInputError("the rows of block_table are not contiguous", "give block_table.contiguous()")
    if page % MIN_PAGE:
        raise UnsupportedShapeError(
            f"a page of {page} tokens is no multiple of {MIN_PAGE}",
            f"use pages of 64, or another multiple of {MIN_PAGE}",
        )
    return block_table.shape[1] * page

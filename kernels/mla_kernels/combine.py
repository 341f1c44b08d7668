"""The Triton kernel that joins the splits of a decode."""

import triton
import triton.language as tl

from mla_kernels.kernel import visible_range


@triton.jit
def combine_kernel(
    PARTIAL,
    PARTIAL_LSE,
    LENGTHS,
    OUT,
    LSE,
    capacity,
    window,
    stride_ps,
    stride_pb,
    stride_pm,
    stride_es,
    stride_eb,
    stride_ob,
    stride_om,
    stride_lb,
    SQ,
    splits,
    C: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Join the splits of one query row, weighted by their sums of exponentials.

    Program (row, block of channels, sequence). Only the splits that `decode_kernel` wrote are read.
    """
    row = tl.program_id(0)
    batch = tl.program_id(2).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    length = tl.minimum(tl.maximum(tl.load(LENGTHS + batch), 0), capacity)
    _, tiles = visible_range(length, SQ, window, CAUSAL, WINDOW, BLOCK_N)
    per_split = tl.maximum(tl.cdiv(tiles, splits), 1)
    written = tl.cdiv(tiles, per_split)

    sums = PARTIAL_LSE + batch * stride_eb + row
    every = tl.arange(0, SPLITS_PADDED)
    lse = tl.load(sums + every.to(tl.int64) * stride_es, mask=every < written, other=float("-inf"))
    highest = tl.max(lse, 0)
    origin = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.exp(lse - origin), 0)
    whole = tl.where(total > 0, total, 1.0)

    acc = tl.zeros([BLOCK_C], tl.float32)
    some = tl.arange(0, BLOCK_S)
    partial = PARTIAL + batch * stride_pb + row.to(tl.int64) * stride_pm
    for start in range(0, written, BLOCK_S):
        split = (start + some).to(tl.int64)
        present = split < written
        weight = tl.exp(tl.load(sums + split * stride_es, mask=present, other=float("-inf")) - origin) / whole
        part = tl.load(
            (partial + split * stride_ps)[:, None] + channel[None, :],
            mask=present[:, None] & (channel < C)[None, :],
            other=0.0,
        )
        acc += tl.sum(part * weight[:, None], 0)
    out = OUT + batch * stride_ob + row.to(tl.int64) * stride_om
    tl.store(out + channel, acc.to(OUT.dtype.element_ty), mask=channel < C)
    joined = tl.where(total > 0, origin + tl.log(whole), float("-inf"))
    tl.store(LSE + batch * stride_lb + row, joined, mask=tl.program_id(1) == 0)

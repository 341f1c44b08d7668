"""The Triton kernel: split-KV MLA decode over the latent cache.

One tile of latents serves as keys and as values, so each cached token is read once. Scores are kept in base 2 inside
(softmax by exp2) and leave as natural logarithms. The online softmax is that of FlashAttention (Dao et al., 2022,
arXiv 2205.14135), splitting over the cache that of Flash-Decoding; the absorbed form is DeepSeek-V2's (arXiv
2405.04434, section 2.1.2).
"""

import triton
import triton.language as tl

# What e4m3 codes are multiplied by after their bits are moved into a wider format: 2 to the difference of the biases of
# the exponents. float16's is applied with the scale of a token, the other formats' at once.
FLOAT16_FACTOR = tl.constexpr(2.0**8)
WIDE_FACTOR = tl.constexpr(2.0**120)


@triton.jit
def _dot(a, b, acc, UPCAST: tl.constexpr):
    # The interpreter multiplies bfloat16 bit patterns as integers, so everything is widened there.
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    elif a.dtype == tl.float32:
        return tl.dot(a, b, acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def _load_query(rows, offset, columns, row_mask, C: tl.constexpr):
    """Return columns [offset, offset + width) of the query rows; channels at C and beyond are 0."""
    mask = row_mask[:, None] & (offset + columns < C)[None, :]
    return tl.load(rows[:, None] + (offset + columns)[None, :], mask=mask, other=0.0)


@triton.jit
def _load_latent(tokens, offset: tl.constexpr, columns, token_mask, C: tl.constexpr, WIDTH: tl.constexpr):
    """Return a chunk of latents [BLOCK_N, WIDTH]; masked tokens are 0, whatever the cache holds there."""
    mask = token_mask[:, None]
    if offset + WIDTH > C:
        mask = mask & (offset + columns < C)[None, :]
    return tl.load(tokens[:, None] + (offset + columns)[None, :], mask=mask, other=0)


@triton.jit
def _decode_codes(codes, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Return the values of e4m3 codes, exactly, by moving their bits into a wider format: no hardware support needed.

    float16 gets each value without FLOAT16_FACTOR, which the caller puts into the scale. PTX does four codes at a time.
    It is marked impure so that the compiler does not decode again for each of the tile's two uses, which would keep the
    codes out of the software pipeline.
    """
    if PTX and DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high, magnitude, bias, zero;
            prmt.b32 low, $2, 0, 0x1404;
            prmt.b32 high, $2, 0, 0x3424;
            mov.b32 bias, 0x7b807b80;
            mov.b32 zero, 0x80008000;
            shr.b32 magnitude, low, 4;
            and.b32 magnitude, magnitude, 0x07f007f0;
            and.b32 low, low, 0x80008000;
            or.b32 low, low, magnitude;
            shr.b32 magnitude, high, 4;
            and.b32 magnitude, magnitude, 0x07f007f0;
            and.b32 high, high, 0x80008000;
            or.b32 high, high, magnitude;
            fma.rn.bf16x2 $0, low, bias, zero;
            fma.rn.bf16x2 $1, high, bias, zero;
            }
            """,
            "=r,=r,r",
            [codes],
            dtype=tl.bfloat16,
            is_pure=False,
            pack=4,
        )
    elif PTX and DTYPE == tl.float16:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high, magnitude;
            prmt.b32 low, $2, 0, 0x1404;
            prmt.b32 high, $2, 0, 0x3424;
            shr.b32 magnitude, low, 1;
            and.b32 magnitude, magnitude, 0x3f803f80;
            and.b32 low, low, 0x80008000;
            or.b32 $0, low, magnitude;
            shr.b32 magnitude, high, 1;
            and.b32 magnitude, magnitude, 0x3f803f80;
            and.b32 high, high, 0x80008000;
            or.b32 $1, high, magnitude;
            }
            """,
            "=r,=r,r",
            [codes],
            dtype=tl.float16,
            is_pure=False,
            pack=4,
        )
    elif DTYPE == tl.float16:
        bits = codes.to(tl.uint16)
        return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    elif DTYPE == tl.bfloat16:
        bits = codes.to(tl.uint16)
        small = (((bits & 0x80) << 8) | ((bits & 0x7F) << 4)).to(tl.bfloat16, bitcast=True)
        return small * tl.full([1, 1], WIDE_FACTOR, tl.bfloat16)
    else:
        bits = codes.to(tl.uint32)
        return (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * WIDE_FACTOR


@triton.jit
def _score(q, k, scale, acc, FP8: tl.constexpr, UPCAST: tl.constexpr):
    """Return acc + q kᵀ; fp8 latents are scaled a token at a time, after the product."""
    if FP8:
        return acc + _dot(q, tl.trans(k), tl.zeros_like(acc), UPCAST) * scale[None, :]
    else:
        return _dot(q, tl.trans(k), acc, UPCAST)


@triton.jit
def _accumulate(p, v, scale, acc, alpha, DTYPE: tl.constexpr, FP8: tl.constexpr, UPCAST: tl.constexpr):
    """Return alpha·acc + p v; fp8 latents are scaled a token at a time, in the weights."""
    if FP8:
        p = p * scale[None, :]
    return _dot(p.to(DTYPE), v, acc * alpha[:, None], UPCAST)


@triton.jit
def visible_range(length, SQ, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the first tile's token and the number of tiles that any of a sequence's queries sees."""
    first = length * 0
    if WINDOW:
        # The first query sees least: its limit is the lowest.
        limit = length - SQ + 1 if CAUSAL else length
        first = tl.maximum(limit - window, 0) // BLOCK_N * BLOCK_N
    return first, tl.cdiv(length - first, BLOCK_N)


@triton.jit
def decode_kernel(
    Q,
    LATENT,
    ROPE,
    SCALES,
    TABLE,
    LENGTHS,
    OUT,
    LSE,
    scale_log2,
    capacity,
    window,
    stride_qb,
    stride_qm,
    stride_lp,
    stride_lt,
    stride_rp,
    stride_rt,
    stride_sp,
    stride_st,
    stride_tb,
    stride_os,
    stride_ob,
    stride_om,
    stride_es,
    stride_eb,
    M,
    H,
    SQ,
    splits,
    C: tl.constexpr,
    C0: tl.constexpr,
    C1: tl.constexpr,
    C2: tl.constexpr,
    C3: tl.constexpr,
    R: tl.constexpr,
    R_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    PAGED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    FP8: tl.constexpr,
    PTX: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attend BLOCK_M query rows of one sequence to one split of its cache.

    Program (row block, split, sequence). Q [B, M, C+R], row m = query·H + head; LATENT, ROPE and SCALES hold the same
    pages (or whole sequences) with strides of their own. OUT [splits, B, M, C] and LSE [splits, B, M] receive the
    split's normalised output and natural-log sum; splits that hold nothing are not written.
    """
    batch = tl.program_id(2).to(tl.int64)
    split = tl.program_id(1)
    length = tl.minimum(tl.maximum(tl.load(LENGTHS + batch), 0), capacity)
    first, tiles = visible_range(length, SQ, window, CAUSAL, WINDOW, BLOCK_N)
    # Each sequence is divided evenly by its own length, so a split count chosen for the longest suits every other.
    per_split = tl.cdiv(tiles, splits)
    begin = first + split * per_split * BLOCK_N
    end = tl.minimum(begin + per_split * BLOCK_N, length)
    # A split that holds nothing is left out, except the first of a single one, which writes the empty result itself.
    if (begin >= end) & (splits > 1):
        return

    DTYPE: tl.constexpr = Q.dtype.element_ty
    TILE_DTYPE: tl.constexpr = tl.float32 if UPCAST else DTYPE
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = row < M
    q_rows = Q + batch * stride_qb + row * stride_qm
    o0 = tl.arange(0, C0)
    q0 = _load_query(q_rows, 0, o0, row_mask, C)
    acc0 = tl.zeros([BLOCK_M, C0], tl.float32)
    if C1 > 0:
        o1 = tl.arange(0, C1)
        q1 = _load_query(q_rows, C0, o1, row_mask, C)
        acc1 = tl.zeros([BLOCK_M, C1], tl.float32)
    if C2 > 0:
        o2 = tl.arange(0, C2)
        q2 = _load_query(q_rows, C0 + C1, o2, row_mask, C)
        acc2 = tl.zeros([BLOCK_M, C2], tl.float32)
    if C3 > 0:
        o3 = tl.arange(0, C3)
        q3 = _load_query(q_rows, C0 + C1 + C2, o3, row_mask, C)
        acc3 = tl.zeros([BLOCK_M, C3], tl.float32)
    if R > 0:
        orope = tl.arange(0, R_PADDED)
        q_rope = _load_query(q_rows, C, orope, row_mask, C + R)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    # A row sees the tokens before its limit.
    limit = tl.zeros_like(row) + length
    if CAUSAL:
        limit = length - SQ + row // H + 1
    token = tl.arange(0, BLOCK_N)
    table = TABLE + batch * stride_tb
    if PAGED:
        # The page of a tile is looked up one tile ahead. Inside the same iteration, the look-up would take a stage of
        # the software pipeline and leave the latents with a single buffer.
        if PAGE % BLOCK_N == 0:
            page = tl.load(table + begin // PAGE, mask=begin < end, other=0)
        else:
            page = tl.load(table + (begin + token) // PAGE, mask=begin + token < end, other=0)
    for start in range(begin, end, BLOCK_N):
        position = start + token
        valid = position < end
        # Offsets are 64 bits wide: a cache is larger than 2^31 elements.
        if PAGED:
            holder = page.to(tl.int64)
            within = position % PAGE
            following = position + BLOCK_N
            if PAGE % BLOCK_N == 0:
                page = tl.load(table + (start + BLOCK_N) // PAGE, mask=start + BLOCK_N < end, other=0)
            else:
                page = tl.load(table + following // PAGE, mask=following < end, other=0)
        else:
            holder = batch
            within = position.to(tl.int64)
        latents = LATENT + holder * stride_lp + within * stride_lt
        k0 = _load_latent(latents, 0, o0, valid, C, C0)
        if R > 0:
            k_rope = tl.load(
                (ROPE + holder * stride_rp + within * stride_rt)[:, None] + orope[None, :],
                mask=valid[:, None] & (orope < R)[None, :],
                other=0.0,
            ).to(TILE_DTYPE)
        if C1 > 0:
            k1 = _load_latent(latents, C0, o1, valid, C, C1)
        if C2 > 0:
            k2 = _load_latent(latents, C0 + C1, o2, valid, C, C2)
        if C3 > 0:
            k3 = _load_latent(latents, C0 + C1 + C2, o3, valid, C, C3)
        scale0 = 1.0
        scale1 = 1.0
        scale2 = 1.0
        scale3 = 1.0
        if FP8:
            scales = SCALES + holder * stride_sp + within * stride_st
            factor: tl.constexpr = FLOAT16_FACTOR if TILE_DTYPE == tl.float16 else 1.0
            scale0 = tl.load(scales, mask=valid, other=0.0) * factor
            k0 = _decode_codes(k0, TILE_DTYPE, PTX)
            if C1 > 0:
                scale1 = tl.load(scales + 1, mask=valid, other=0.0) * factor
                k1 = _decode_codes(k1, TILE_DTYPE, PTX)
            if C2 > 0:
                scale2 = tl.load(scales + 2, mask=valid, other=0.0) * factor
                k2 = _decode_codes(k2, TILE_DTYPE, PTX)
            if C3 > 0:
                scale3 = tl.load(scales + 3, mask=valid, other=0.0) * factor
                k3 = _decode_codes(k3, TILE_DTYPE, PTX)

        scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if R > 0:
            scores = _dot(q_rope, tl.trans(k_rope), scores, UPCAST)
        scores = _score(q0, k0, scale0, scores, FP8, UPCAST)
        if C1 > 0:
            scores = _score(q1, k1, scale1, scores, FP8, UPCAST)
        if C2 > 0:
            scores = _score(q2, k2, scale2, scores, FP8, UPCAST)
        if C3 > 0:
            scores = _score(q3, k3, scale3, scores, FP8, UPCAST)
        seen = valid[None, :]
        if CAUSAL:
            seen = seen & (position[None, :] < limit[:, None])
        if WINDOW:
            seen = seen & (position[None, :] >= limit[:, None] - window)
        scores = tl.where(seen, scores * scale_log2, float("-inf"))
        raised = tl.maximum(highest, tl.max(scores, 1))
        # A row that has seen nothing yet has no finite maximum, and -inf minus -inf is NaN.
        origin = tl.where(raised == float("-inf"), 0.0, raised)
        alpha = tl.exp2(highest - origin)
        p = tl.exp2(scores - origin[:, None])
        total = total * alpha + tl.sum(p, 1)
        highest = raised
        acc0 = _accumulate(p, k0, scale0, acc0, alpha, TILE_DTYPE, FP8, UPCAST)
        if C1 > 0:
            acc1 = _accumulate(p, k1, scale1, acc1, alpha, TILE_DTYPE, FP8, UPCAST)
        if C2 > 0:
            acc2 = _accumulate(p, k2, scale2, acc2, alpha, TILE_DTYPE, FP8, UPCAST)
        if C3 > 0:
            acc3 = _accumulate(p, k3, scale3, acc3, alpha, TILE_DTYPE, FP8, UPCAST)

    whole = tl.where(total > 0, total, 1.0)
    share = tl.where(total > 0, 1.0 / whole, 0.0)[:, None]
    out = (OUT + split.to(tl.int64) * stride_os + batch * stride_ob + row.to(tl.int64) * stride_om)[:, None]
    OUT_DTYPE: tl.constexpr = OUT.dtype.element_ty
    tl.store(out + o0[None, :], (acc0 * share).to(OUT_DTYPE), mask=row_mask[:, None] & (o0 < C)[None, :])
    if C1 > 0:
        o1 += C0
        tl.store(out + o1[None, :], (acc1 * share).to(OUT_DTYPE), mask=row_mask[:, None] & (o1 < C)[None, :])
    if C2 > 0:
        o2 += C0 + C1
        tl.store(out + o2[None, :], (acc2 * share).to(OUT_DTYPE), mask=row_mask[:, None] & (o2 < C)[None, :])
    if C3 > 0:
        o3 += C0 + C1 + C2
        tl.store(out + o3[None, :], (acc3 * share).to(OUT_DTYPE), mask=row_mask[:, None] & (o3 < C)[None, :])
    # ln 2
    lse = tl.where(total > 0, (highest + tl.log2(whole)) * 0.6931471805599453, float("-inf"))
    tl.store(LSE + split.to(tl.int64) * stride_es + batch * stride_eb + row, lse, mask=row_mask)

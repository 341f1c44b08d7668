"""The kernel that ours is measured against: keys and values are loaded apart, as kernels made for MHA do."""

import triton
import triton.language as tl


@triton.jit
def two_tile_kernel(
    Q, LATENT, ROPE, VALUES, OUT, stride_qm, stride_lt, stride_rt, stride_vt, stride_om, M, tokens,
    C: tl.constexpr, C0: tl.constexpr, R: tl.constexpr, R_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attend the query rows to one contiguous cache; VALUES is the second copy of the latents, to be read as values."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    channel = tl.arange(0, C0)
    rope = tl.arange(0, R_PADDED)
    q = tl.load(Q + row[:, None] * stride_qm + channel[None, :], mask=row[:, None] < M, other=0.0)
    q_rope = tl.load(Q + row[:, None] * stride_qm + C + rope[None, :], mask=row[:, None] < M, other=0.0)
    acc = tl.zeros([BLOCK_M, C0], tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, tokens, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        valid = position[:, None] < tokens
        k = tl.load(LATENT + position[:, None] * stride_lt + channel[None, :], mask=valid, other=0.0)
        k_rope = tl.load(ROPE + position[:, None] * stride_rt + rope[None, :], mask=valid, other=0.0)
        v = tl.load(VALUES + position[:, None] * stride_vt + channel[None, :], mask=valid, other=0.0)
        scores = tl.dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        scores = tl.dot(q_rope, tl.trans(k_rope), scores)
        scores = tl.where(position[None, :] < tokens, scores, float("-inf"))
        raised = tl.maximum(highest, tl.max(scores, 1))
        alpha = tl.exp2(highest - raised)
        p = tl.exp2(scores - raised[:, None])
        total = total * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        highest = raised
    tl.store(OUT + row[:, None] * stride_om + channel[None, :], acc / total[:, None], mask=row[:, None] < M)

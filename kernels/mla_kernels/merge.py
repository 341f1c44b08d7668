"""Join attention over disjoint parts of the cache by their log-sum-exps: prefixes kept once, splits, cascades."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mla_kernels.errors import InvalidInputError


def merge_states(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return what attention over the union of the parts gives: out [B, Sq, H, c] and its natural-log LSE [B, H, Sq].

    With the parts' outputs o_i [B, Sq, H, c] and LSEs l_i [B, H, Sq], the result is l = log Σ exp l_i and
    o = Σ exp(l_i − l) o_i, the exact softmax over all tokens. A part that saw no token (LSE −inf, or +inf as in
    FlashMLA) weighs nothing, whatever its output holds; where no part saw any, the result is 0 and −inf. Sums are in
    float32, or float64 if any part is; `out` has the first output's dtype.

    Raises:
        InvalidInputError: there are no parts, or their shapes or devices do not belong together.
    """
    _check_parts(outs, lses)
    dtype = torch.float32
    for part in (*outs, *lses):
        dtype = torch.promote_types(dtype, part.dtype)
    stacked = torch.stack([lse.to(dtype) for lse in lses])
    # FlashMLA's convention for a query that saw nothing.
    stacked = stacked.masked_fill(stacked == torch.inf, -torch.inf)
    # −inf − (−inf) is NaN; any finite number in its place gives exp(−inf) = 0.
    top = stacked.amax(dim=0)
    shift = top.masked_fill(top == -torch.inf, 0.0)
    weights = torch.exp(stacked - shift)
    weight_sum = weights.sum(dim=0)
    shares = weights / weight_sum.where(weight_sum > 0, 1.0)
    merged = torch.zeros_like(outs[0], dtype=dtype)
    for out, lse, share in zip(outs, stacked, shares, strict=True):
        unseen = (lse == -torch.inf).transpose(1, 2)[..., None]
        merged = merged + share.transpose(1, 2)[..., None] * out.to(dtype).masked_fill(unseen, 0.0)
    return merged.to(outs[0].dtype), shift + weight_sum.log()


def _check_parts(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    if not outs or len(outs) != len(lses):
        raise InvalidInputError(
            f"{len(outs)} outputs and {len(lses)} log-sum-exps were given", "pass one of each for every part"
        )
    if outs[0].dim() != 4:
        raise InvalidInputError(f"outs[0] has shape {tuple(outs[0].shape)}", "pass outputs [B, Sq, H, c]")
    batch, queries, heads, _ = outs[0].shape
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.shape != outs[0].shape or lse.shape != (batch, heads, queries):
            raise InvalidInputError(
                f"part {i} has an output {tuple(out.shape)} and a log-sum-exp {tuple(lse.shape)}",
                f"the first part asks for {tuple(outs[0].shape)} and {(batch, heads, queries)}",
            )
        if out.device != outs[0].device or lse.device != outs[0].device:
            raise InvalidInputError(
                f"part {i} is on {out.device} and {lse.device}", f"move all parts to {outs[0].device}"
            )

"""Torch's fused CPU attention, with the log-sum-exp that its public function keeps to itself.

It walks the tokens in blocks inside one parallel region, where separate products and softmax are a region and a pass
over memory each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# torch.nn.functional.scaled_dot_product_attention ends here on a CPU. The name is torch's own affair, so that where it
# is missing nothing is fused.
_ATTENTION: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
# A thread's part has to be worth its share of the merge.
_PART_TOKENS = 256


def can_fuse(q: Tensor, kv: Tensor) -> bool:
    """Return whether :func:`fused_attention` takes these: on a CPU, of one dtype, and not to be differentiated."""
    differentiated = torch.is_grad_enabled() and (q.requires_grad or kv.requires_grad)
    return _ATTENTION is not None and q.device.type == "cpu" and q.dtype == kv.dtype and not differentiated


def parts_for(batch: int, tokens: int) -> int:
    """Return into how many parts the tokens are divided so that every thread has one: the op does so with rows only."""
    return max(1, min(torch.get_num_threads() // max(batch, 1), tokens // _PART_TOKENS))


def fused_attention(q: Tensor, kv: Tensor, rank: int, parts: int) -> tuple[Tensor, Tensor]:
    """Return the output [b, rows, c] and the natural-log LSE [b, rows, 1] of scaled queries that see every token.

    Args:
        q: [b, rows, c+r].
        kv: [b, tokens, c+r], any strides but the last; its first c = ``rank`` channels are the values. The op needs
            keys and values of one width, so the RoPE channels are summed as well and left out.
        parts: a divisor of ``tokens``.
    """
    if parts == 1:
        tokens = kv[:, None]
        out, lse = _ATTENTION(q[:, None], tokens, tokens, scale=1.0)
        return out[:, 0, :, :rank], lse[:, 0, :, None]
    tokens = kv.unflatten(1, (parts, -1))
    out, lse = _ATTENTION(q[:, None].expand(-1, parts, -1, -1), tokens, tokens, scale=1.0)
    lse = lse[..., None]
    together = torch.logsumexp(lse, dim=1)
    return (out[..., :rank] * (lse - together[:, None]).exp()).sum(dim=1), together

"""KL(teacher || student) a position, over the whole vocabulary or over the teacher's likeliest tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Positions whose logits are in float32 at one time: few enough for a processor's cache, and for any GPU's memory.
_BLOCK = 32


@dataclass(frozen=True)
class Targets:
    """What the teacher says at every position of some windows, at one temperature.

    Attributes:
        logits: over the whole vocabulary, before the temperature; None where only the head is known.
        log_p: log-probabilities of the `indices`, float32; None where `logits` says everything.
        indices: the K likeliest tokens.
        log_rest: log-probability of all tokens but `indices` together.
        hidden: hidden states after each layer, [B S D] each; empty where nobody asked.
    """

    logits: Float[Tensor, "B S V"] | None
    log_p: Float[Tensor, "B S K"] | None = None
    indices: Int[Tensor, "B S K"] | None = None
    log_rest: Float[Tensor, "B S"] | None = None
    hidden: tuple[Float[Tensor, "B S D"], ...] = ()


def targets(logits: Float[Tensor, "B S V"], *, temperature: float, top_k: int | None) -> Targets:
    """Return the softmax of ``logits / temperature`` as targets, with ``top_k`` its head and the rest's sum."""
    if top_k is None or top_k >= logits.shape[-1]:
        return Targets(logits)
    log_p = (logits.float() / temperature).log_softmax(dim=-1)
    head, indices = log_p.topk(top_k, dim=-1)
    return Targets(None, head, indices, log_p.scatter(-1, indices, -torch.inf).logsumexp(dim=-1))


def divergence(logits: Float[Tensor, "B S V"], wanted: Targets, *, temperature: float) -> Float[Tensor, "B"]:
    """Return τ²·KL(p || q) for each window, averaged over its positions, in nats at τ = 1.

    p are the targets and q = softmax(logits / τ), both at the temperature τ; τ² keeps the gradient's scale (Hinton et
    al., 2015, arXiv:1503.02531). With head targets both distributions are those over K + 1 outcomes, the K tokens and
    all others as one, whose divergence is no more than that over all tokens.
    """
    if wanted.logits is not None:
        return cast("Tensor", _Divergence.apply(logits, wanted.logits, temperature))
    assert wanted.log_p is not None
    assert wanted.indices is not None
    assert wanted.log_rest is not None
    log_q = (logits.float() / temperature).log_softmax(dim=-1)
    rest = log_q.scatter(-1, wanted.indices, -torch.inf).logsumexp(dim=-1)
    total = _expected(wanted.log_p, log_q.gather(-1, wanted.indices)).sum(dim=-1)
    total = total + _expected(wanted.log_rest, rest)
    return temperature**2 * total.mean(dim=-1)


class _Divergence(torch.autograd.Function):
    """The divergence over a whole vocabulary, and its gradient in the same pass, a block of positions at a time.

    Probabilities of all positions at once would be the largest tensors of a step, and walking through them most of its
    time on a CPU: the gradient, τ (q - p) / S for a window's mean, is all that is kept, in the dtype of the logits.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, wanted: Tensor, temperature: float) -> Tensor:
        keep = ctx.needs_input_grad[0]
        gradient = torch.empty_like(logits) if keep else None
        losses = []
        for window in range(logits.shape[0]):
            total = torch.zeros((), dtype=torch.float32, device=logits.device)
            for start in range(0, logits.shape[1], _BLOCK):
                rows = slice(start, start + _BLOCK)
                log_q = (logits[window, rows].float() / temperature).log_softmax(dim=-1)
                log_p = (wanted[window, rows].float() / temperature).log_softmax(dim=-1)
                p = log_p.exp()
                if gradient is not None:
                    gradient[window, rows] = (log_q.exp() - p) * (temperature / logits.shape[1])
                total += log_p.sub_(log_q).mul_(p).masked_fill_(p == 0, 0.0).sum()
            losses.append(total * (temperature**2 / logits.shape[1]))
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return torch.stack(losses)

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outputs[0].to(gradient.dtype)[:, None, None], None, None


def hidden_distance(
    states: Sequence[Float[Tensor, "B S D"]], wanted: Sequence[Float[Tensor, "B S D"]]
) -> Float[Tensor, "B"]:
    """Return ‖h − h'‖² / ‖h'‖² for each window, averaged over layers; h' are the teacher's states."""
    distances = [
        (state.float() - target.float()).square().sum(dim=(1, 2)) / target.float().square().sum(dim=(1, 2))
        for state, target in zip(states, wanted, strict=True)
    ]
    return torch.stack(distances).mean(dim=0)


def _expected(log_p: Tensor, log_q: Tensor) -> Tensor:
    """p·(log p − log q), 0 where p is."""
    p = log_p.exp()
    return (p * (log_p - log_q)).masked_fill(p == 0, 0.0)

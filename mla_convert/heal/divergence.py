"""KL(teacher || student) a position, over the whole vocabulary or over the teacher's likeliest tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Targets:
    """What the teacher says at every position of some windows, at one temperature; float32.

    Attributes:
        log_p: log-probabilities of the `indices`, or of the whole vocabulary.
        indices: the K likeliest tokens; None where `log_p` is of all tokens, in their order.
        log_rest: log-probability of all tokens but `indices` together.
        hidden: hidden states after each layer, [B S D] each; empty where nobody asked.
    """

    log_p: Float[Tensor, "B S K"]
    indices: Int[Tensor, "B S K"] | None = None
    log_rest: Float[Tensor, "B S"] | None = None
    hidden: tuple[Float[Tensor, "B S D"], ...] = ()


def targets(logits: Float[Tensor, "B S V"], *, temperature: float, top_k: int | None) -> Targets:
    """Return the softmax of ``logits / temperature`` as targets, with ``top_k`` its head and the rest's sum."""
    log_p = (logits.float() / temperature).log_softmax(dim=-1)
    if top_k is None or top_k >= log_p.shape[-1]:
        return Targets(log_p)
    head, indices = log_p.topk(top_k, dim=-1)
    return Targets(head, indices, log_p.scatter(-1, indices, -torch.inf).logsumexp(dim=-1))


def divergence(logits: Float[Tensor, "B S V"], wanted: Targets, *, temperature: float) -> Float[Tensor, "B"]:
    """Return τ²·KL(p || q) for each window, averaged over its positions, in nats at τ = 1.

    p are the targets and q = softmax(logits / τ), both at the temperature τ; τ² keeps the gradient's scale (Hinton et
    al., 2015, arXiv:1503.02531). With head targets both distributions are those over K + 1 outcomes, the K tokens and
    all others as one, whose divergence is no more than that over all tokens.
    """
    log_q = (logits.float() / temperature).log_softmax(dim=-1)
    if wanted.indices is None or wanted.log_rest is None:
        total = _expected(wanted.log_p, log_q).sum(dim=-1)
    else:
        rest = log_q.scatter(-1, wanted.indices, -torch.inf).logsumexp(dim=-1)
        total = _expected(wanted.log_p, log_q.gather(-1, wanted.indices)).sum(dim=-1)
        total = total + _expected(wanted.log_rest, rest)
    return temperature**2 * total.mean(dim=-1)


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

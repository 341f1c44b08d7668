"""Output metrics: how much an error in a layer's content keys and values matters, as a J x J matrix (J = 2·G·K)."""

from __future__ import annotations

import torch
from jaxtyping import Complex, Float
from torch import Tensor


def balanced_metric(moment: Float[Tensor, "J J"]) -> Float[Tensor, "J J"]:
    """One factor for all keys and one for all values, so that both have the same energy (TransMLA, arXiv:2502.07864).

    `moment` is E[y y^T] of the content keys over the values.
    """
    width = moment.shape[0] // 2
    energy = moment.diagonal().unflatten(0, (2, width)).sum(-1)
    factors = torch.where(energy > 0, 1.0 / energy, torch.zeros_like(energy))
    return torch.diag(factors.repeat_interleave(width))


def attention_output_metric(
    query_moment: Float[Tensor, "H K K"],
    constants: Complex[Tensor, "H F"],
    value_moment: Float[Tensor, "G V V"],
    w_o: Float[Tensor, "D H V"],
) -> Float[Tensor, "J J"]:
    """How errors in keys and values move the attention output, without gradients.

    Values: Σ_h W_O,h^T W_O,h over a group's heads. Keys: Σ_h s_h E[q_h q_h^T] / K, s_h = tr(W_O,h^T W_O,h E[v v^T]),
    q_h the content query conj(rho)·q: the energy of the output that a head's scores distribute.
    """
    heads, dim, _ = query_moment.shape
    groups = value_moment.shape[0]
    gram = torch.einsum("dhv,dhw->hvw", w_o.double(), w_o.double())
    values = gram.unflatten(0, (groups, heads // groups))
    scale = torch.einsum("ghvw,gwv->gh", values, value_moment) / dim
    turned = rotate_moment(query_moment, constants.conj()).unflatten(0, (groups, heads // groups))
    keys = torch.einsum("gh,ghkl->gkl", scale, turned)
    return torch.block_diag(*keys, *values.sum(1))


def rotate_moment(moment: Float[Tensor, "H K K"], factors: Complex[Tensor, "H F"]) -> Float[Tensor, "H K K"]:
    """Return E[x x^T] of x multiplied, pair by pair, by complex factors."""
    cos, sin = torch.diag_embed(factors.real), torch.diag_embed(factors.imag)
    operator = torch.cat((torch.cat((cos, -sin), dim=-1), torch.cat((sin, cos), dim=-1)), dim=-2)
    return operator @ moment @ operator.mT


def mixed_metric(first: Float[Tensor, "J J"], second: Float[Tensor, "J J"]) -> Float[Tensor, "J J"]:
    """The mean of two metrics, each scaled to trace 1; one without any signal leaves the other alone."""
    scaled = [metric / metric.trace() for metric in (first, second) if metric.trace() > 0]
    return sum(scaled, torch.zeros_like(first)) / max(len(scaled), 1)

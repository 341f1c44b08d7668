"""RoPE decoupling: which mixtures of key heads keep their rotation, as slots of the one shared RoPE key.

A score is Re Σ_l conj(a_l) e^{i·theta_l·(s-t)} z_{g,l} over the rotary pairs l of query a and key z. For a fixed l any
complex linear map over the heads g commutes with the rotation, so it can be moved into W_K and W_Q (TransMLA,
arXiv:2502.07864, section 4.2, uses one real rotation for each l; complex maps include it). The shared key holds slots
y_n = Σ_g mix_{n,g} z_{g,l(n)}; what the slots of a pair do not reproduce moves to the content path, where the rotation
is replaced by a constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from mla_convert.maths.linalg import damped_powers, hermitian


@dataclass(frozen=True)
class KeySlots:
    """The slots of one layer, costliest first unless their numbers were prescribed.

    Attributes:
        pairs: the rotary pair whose frequency each of the R/2 slots keeps; a pair may hold several slots, or none.
        mix: y = mix z, [R/2, G] complex128.
        unmix: what each head gets back from a slot, z_g ~ Σ_n unmix_{n,g} y_n; [R/2, G] complex128.
        residual: I - Σ unmix mix for each pair, the map to what moves to the content path; [F, G, G] complex128.
        kept_cost, moved_cost: the cost (in the metric's unit) that the slots avoid, and that remains.
    """

    pairs: tuple[int, ...]
    mix: Complex[Tensor, "slots G"]
    unmix: Complex[Tensor, "slots G"]
    residual: Complex[Tensor, "F G G"]
    kept_cost: float
    moved_cost: float


def choose_slots(
    key_moment: Complex[Tensor, "F G G"] | Float[Tensor, "F G G"],
    metric: Complex[Tensor, "F G G"] | Float[Tensor, "F G G"],
    num_slots: int,
    *,
    damping: float,
    one_per_pair: bool = False,
    counts: Sequence[int] | None = None,
    turning: int | None = None,
) -> KeySlots:
    """Return the `num_slots` components that are costliest to take off their rotation.

    Moving the component of pair l along z costs E|m^H z|^2 summed over the metric's square-root rows m: per pair the
    costs are the eigenvalues of A^(1/2) E[z z^H] A^(1/2), so for each pair the best j slots are its top j eigenvectors,
    and over all pairs the costliest eigenvalues are taken.

    Args:
        key_moment: E[z_l z_l^H] over the G heads for each of the F pairs, keys before RoPE.
        metric: A_l, the second moment of the loss's change when the rotation of each head's pair is replaced.
            Real inputs give real mixing.
        damping: share of the metric's mean eigenvalue added to it.
        one_per_pair: at most one slot for each pair.
        counts: how many slots each pair holds, where a target prescribes it; they then come in the pairs' order.
        turning: how many pairs turn, the first ones (None: all); the others lose nothing and get no slot.

    Raises:
        ValueError: `counts` does not add up to `num_slots`, or there are fewer components than slots.
    """
    num_pairs, heads, _ = key_moment.shape
    root, inverse_root = damped_powers(metric, (0.5, -0.5), damping)
    costs, vectors = torch.linalg.eigh(hermitian(root @ key_moment @ root))
    costs = costs.clamp_min(0.0)
    turning = num_pairs if turning is None else turning
    costs[turning:] = 0.0
    mixes = (vectors.mH @ root).to(torch.complex128)  # [F components G]
    unmixes = (inverse_root @ vectors).mT.to(torch.complex128)  # [F components G]

    if counts is not None and sum(counts) != num_slots:
        raise ValueError(f"{sum(counts)} slots prescribed, {num_slots} wanted")
    most = [1 if one_per_pair else heads] * num_pairs if counts is None else counts
    candidates = [
        (costs[pair, component].item(), pair, component)
        for pair in range(turning)
        for component in range(heads - 1, heads - 1 - most[pair], -1)
    ]
    if len(candidates) < num_slots:
        raise ValueError(f"{num_slots} slots wanted of {len(candidates)} components")
    chosen = candidates if counts is not None else sorted(candidates, key=lambda c: -c[0])[:num_slots]
    residual = torch.eye(heads, dtype=torch.complex128).repeat(num_pairs, 1, 1)
    for _, pair, component in chosen:
        residual[pair] -= torch.outer(unmixes[pair, component], mixes[pair, component])
    kept = sum((cost for cost, _, _ in chosen), 0.0)
    empty = torch.zeros(0, heads, dtype=torch.complex128)
    return KeySlots(
        pairs=tuple(pair for _, pair, _ in chosen),
        mix=torch.stack([mixes[pair, component] for _, pair, component in chosen]) if chosen else empty,
        unmix=torch.stack([unmixes[pair, component] for _, pair, component in chosen]) if chosen else empty.clone(),
        residual=residual,
        kept_cost=kept,
        moved_cost=costs.sum().item() - kept,
    )


@dataclass(frozen=True)
class Substitution:
    """What replaces the rotation on the content path, and the metric of the error that remains.

    Attributes:
        constants: rho, the factor on each query head's and pair's content score; [H F] complex128.
        metric: E[e e^H] of the gradient error e = γ - Σ conj(rho) g over heads, for each pair; [F G G] complex128.
    """

    constants: Complex[Tensor, "H F"]
    metric: Complex[Tensor, "F G G"]


def substitute_rotation(
    gradient_moment: Complex[Tensor, "F GH GH"],
    num_kv_heads: int,
    *,
    damping: float,
    towards: Complex[Tensor, "H F"] | None = None,
) -> Substitution:
    """Return the constants that replace rotations at the least expected change of the loss.

    γ_g is the loss's gradient at a key before RoPE (through the rotation); g_i is the gradient at the same place if
    query head i scored that key without any rotation. With the rotation replaced by rho_i the gradient would be
    Σ_{i in g} conj(rho_i) g_i, so rho is the least-squares fit of γ_g by the g_i of its group, and what is left of
    γ is what moving a key component to the content path costs.

    Args:
        gradient_moment: E[u u^H] for each pair, u = (γ_1..γ_G, g_1..g_H).
        damping: ridge, as a share of the mean energy of a group's g_i. Gradients are noisy (one sampled label a
            token), so the fit needs it.
        towards: what the ridge pulls the constants to, such as the mean rotations under attention; 0 by default.
    """
    pairs, size, _ = gradient_moment.shape
    group = (size - num_kv_heads) // num_kv_heads
    identity = torch.eye(group, dtype=torch.complex128)
    constants = torch.zeros(size - num_kv_heads, pairs, dtype=torch.complex128)
    for g in range(num_kv_heads):
        own = slice(g * group, (g + 1) * group)
        heads = slice(num_kv_heads + own.start, num_kv_heads + own.stop)
        normal = gradient_moment[:, heads, heads].mT  # Σ conj(g_i) g_j
        energy = torch.diagonal(normal, dim1=1, dim2=2).real.mean(-1)
        ridge = torch.where(energy > 0, damping * energy, torch.ones_like(energy))[:, None]
        wanted = gradient_moment[:, g, heads]
        if towards is not None:
            wanted = wanted + ridge * towards[own].conj().mT
        fit = torch.linalg.solve(normal + ridge[..., None] * identity, wanted[..., None])[..., 0]  # γ_g ~ Σ fit_i g_i
        constants[own] = fit.conj().mT
    return Substitution(constants, replacement_metric(gradient_moment, constants))


def replacement_metric(
    gradient_moment: Complex[Tensor, "F GH GH"], constants: Complex[Tensor, "H F"]
) -> Complex[Tensor, "F G G"]:
    """Return E[e e^H] of e_g = γ_g - Σ_{i in g} conj(rho_i) g_i for each pair: the cost of replacing by `constants`."""
    heads = constants.shape[0]
    groups = gradient_moment.shape[-1] - heads
    members = torch.eye(groups, dtype=torch.complex128).repeat_interleave(heads // groups, dim=1)  # [G H]
    fit = members * constants.conj().mT[:, None]  # [F G H]
    change = torch.cat((torch.eye(groups, dtype=torch.complex128).expand(len(fit), -1, -1), -fit), dim=-1)
    return hermitian(change @ gradient_moment @ change.mH)

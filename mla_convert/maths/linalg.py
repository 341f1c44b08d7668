"""Damped functions of positive semi-definite matrices: the one place where something is divided by an eigenvalue."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Complex, Float
from torch import Tensor


def hermitian(matrix: Tensor) -> Tensor:
    """Return the Hermitian part (M + M^H) / 2 of [... n n], which removes what rounding made asymmetric."""
    return (matrix + matrix.mH) / 2


def damped_power(
    matrix: Float[Tensor, "*batch n n"] | Complex[Tensor, "*batch n n"], power: float, damping: float
) -> Tensor:
    """Return (M + damping·mean eigenvalue·I)^power of a positive semi-definite M, in float64 or complex128.

    See :func:`damped_powers`.
    """
    return damped_powers(matrix, (power,), damping)[0]


def damped_powers(
    matrix: Float[Tensor, "*batch n n"] | Complex[Tensor, "*batch n n"], powers: Sequence[float], damping: float
) -> tuple[Tensor, ...]:
    """Return several powers of the same damped matrix, from one decomposition.

    Negative eigenvalues (rounding) count as zero. A matrix of zeros is read as the identity, so that a metric which
    never saw any signal weighs all directions alike. With damping 0 a singular matrix has no negative power; its null
    directions then get power 0, as in a pseudo-inverse.
    """
    values, vectors = torch.linalg.eigh(hermitian(matrix.to(torch.promote_types(matrix.dtype, torch.float64))))
    values = values.clamp_min(0.0)
    mean = values.mean(-1, keepdim=True)
    values = torch.where(mean > 0, values + damping * mean, torch.ones_like(values))
    threshold = values.amax(-1, keepdim=True) * torch.finfo(values.dtype).eps * values.shape[-1]
    found = []
    for power in powers:
        powered = torch.where(values > threshold, values.clamp_min(threshold) ** power, torch.zeros_like(values))
        found.append((vectors * powered.unsqueeze(-2).to(vectors.dtype)) @ vectors.mH)
    return tuple(found)

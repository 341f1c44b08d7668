"""RoPE in complex form: a rotary pair is one complex number, and rotation multiplies it by exp(i·theta·position).

In the rotate-half layout pair l of a head of rotary dim K is dims l and l + K/2 (RoFormer, arXiv:2104.09864, 3.2).
"""

from __future__ import annotations

import torch
from jaxtyping import Complex, Float
from torch import Tensor


def to_pairs(x: Float[Tensor, "*batch K"]) -> Complex[Tensor, "*batch F"]:
    """Return the F = K/2 rotary pairs of rotate-half vectors as complex numbers, in complex128."""
    real, imaginary = x.to(torch.float64).chunk(2, dim=-1)
    return torch.complex(real.contiguous(), imaginary.contiguous())


def from_pairs(z: Complex[Tensor, "*batch F"]) -> Float[Tensor, "*batch K"]:
    """The inverse of :func:`to_pairs`: F real parts, then F imaginary parts."""
    return torch.cat((z.real, z.imag), dim=-1)


def pair_rows(w: Float[Tensor, "heads K D"]) -> Complex[Tensor, "heads F D"]:
    """Return the rows of per-head projections as complex rows, one for each rotary pair, in complex128."""
    return to_pairs(w.transpose(-1, -2)).transpose(-1, -2)


def real_rows(w: Complex[Tensor, "heads F D"]) -> Float[Tensor, "heads K D"]:
    """The inverse of :func:`pair_rows`."""
    return torch.cat((w.real, w.imag), dim=-2)


def unrotate(
    x: Float[Tensor, "*batch S K"], cos: Float[Tensor, "S F"], sin: Float[Tensor, "S F"]
) -> Float[Tensor, "*batch S K"]:
    """Rotate x back by each position's angles: R(-theta·s) x_s, in x's dtype."""
    real, imaginary = x.chunk(2, dim=-1)
    return torch.cat((real * cos + imaginary * sin, imaginary * cos - real * sin), dim=-1)


def pair_moments(moment: Float[Tensor, "J J"], num_heads: int) -> Complex[Tensor, "F G G"]:
    """Return E[z_l z_l^H] over the G heads for each pair l, from the real moment E[k k^T] of the stacked heads.

    J = G·K, head by head, each head in rotate-half order.
    """
    blocks = moment.unflatten(0, (num_heads, 2, -1)).unflatten(-1, (num_heads, 2, -1))  # g part pair, h part pair
    diagonal = torch.diagonal(blocks, dim1=2, dim2=5)  # g part h part pair
    real = diagonal[:, 0, :, 0] + diagonal[:, 1, :, 1]
    imaginary = diagonal[:, 1, :, 0] - diagonal[:, 0, :, 1]
    return torch.complex(real, imaginary).permute(2, 0, 1)


def real_operator(mix: Complex[Tensor, "F G G"]) -> Float[Tensor, "J J"]:
    """Return the real J x J matrix (J = G·K) that applies a complex map over heads to every pair of stacked heads."""
    pairs, heads, _ = mix.shape
    out = mix.real.new_zeros(heads, 2, pairs, heads, 2, pairs)
    index = torch.arange(pairs)
    by_head = mix.permute(1, 2, 0)  # g h pair
    for row, column, part in (
        (0, 0, by_head.real),
        (1, 1, by_head.real),
        (1, 0, by_head.imag),
        (0, 1, -by_head.imag),
    ):
        out[:, row, index, :, column, index] = part.permute(2, 0, 1)
    return out.reshape(heads * 2 * pairs, heads * 2 * pairs)

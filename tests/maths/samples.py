"""Seeded random matrices in float64 and complex128."""

import torch
from torch import Tensor


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal float64."""
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def complex_normal(*shape: int, seed: int = 0) -> Tensor:
    """Complex numbers of independent standard normal parts."""
    drawn = torch.randn(2, *shape, generator=generator(seed), dtype=torch.float64)
    return torch.complex(drawn[0], drawn[1])


def second_moment(samples: Tensor) -> Tensor:
    """The mean of x x^H over the first axis of samples [n ... j]: [... j j]."""
    return torch.einsum("n...j,n...k->...jk", samples, samples.conj()) / samples.shape[0]


def max_difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference relative to the largest expected number; the shapes must agree."""
    assert found.shape == expected.shape
    return ((found - expected).abs().max() / expected.abs().max().clamp_min(1e-300)).item()

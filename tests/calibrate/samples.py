"""Statistics of made-up numbers, and whether two are the same to the bit."""

from __future__ import annotations

from dataclasses import fields

import torch

from mla_convert.calibrate.statistics import GradientStatistics, HeldOutStatistics, LayerStatistics, Provenance
from tests.maths.samples import complex_normal, normal

HEADS, GROUPS, PAIRS = 4, 2, 3
DIM, WIDTH = 2 * PAIRS, 2 * GROUPS * 2 * PAIRS
PROVENANCE = Provenance({"model.safetensors": "ab12"}, "text.txt", "cd34", 100, 20, 7, gradients=True)


def layer(seed: int, *, gradients: bool = True, held_out: bool = True) -> LayerStatistics:
    """Numbers of the right shapes, all different."""
    part = GradientStatistics(
        pair_tokens=10 + seed,
        pairs=complex_normal(PAIRS, GROUPS + HEADS, GROUPS + HEADS, seed=10 * seed),
        constants=complex_normal(HEADS, PAIRS, seed=1000),
        content_tokens=20 + seed,
        content=normal(WIDTH, WIDTH, seed=10 * seed + 1),
    )
    aside = HeldOutStatistics(
        attended=normal(WIDTH, WIDTH, seed=10 * seed + 8),
        attended_weight=0.3 + seed,
        content_tokens=40 + seed,
        content=normal(WIDTH, WIDTH, seed=10 * seed + 9),
    )
    return LayerStatistics(
        tokens=30 + seed,
        key_value=normal(WIDTH, WIDTH, seed=10 * seed + 2),
        attended=normal(WIDTH, WIDTH, seed=10 * seed + 3),
        attended_weight=0.1 + seed,
        query=normal(HEADS, DIM, DIM, seed=10 * seed + 4),
        rotation=complex_normal(HEADS, PAIRS, seed=10 * seed + 5),
        query_energy=normal(HEADS, PAIRS, seed=10 * seed + 6).abs(),
        noise_attended=normal(WIDTH, WIDTH, seed=10 * seed + 7),
        noise_weight=0.2 + seed,
        gradients=part if gradients else None,
        held_out=aside if held_out else None,
    )


def same(first: object, second: object) -> bool:
    """Every number of the two is the same, to the bit."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, LayerStatistics | GradientStatistics | HeldOutStatistics):
        return type(first) is type(second) and all(
            same(getattr(first, f.name), getattr(second, f.name)) for f in fields(first)
        )
    return first == second

"""What makes the steps of training: Muon for matrices and AdamW for the rest, or AdamW for everything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["muon", "adamw"]

_BETAS = (0.9, 0.95)


def make_optimisers(
    trained: Mapping[str, Tensor], *, kind: Kind, learning_rate: float, weight_decay: float = 0.0
) -> list[torch.optim.Optimizer]:
    """Return one optimiser or two, which share the parameters that ``trained`` gives by name.

    Muon (Jordan et al., 2024; arXiv:2502.16982 for the scale of its steps) moves a matrix by the nearest
    semi-orthogonal one to its momentum, so that directions which text seldom uses move as far as the others. Its steps
    are scaled to the size of AdamW's, and one learning rate serves both. Embeddings and output heads are tables of
    vectors and no maps: they are AdamW's, as vectors are.
    """
    matrices = {
        name: value
        for name, value in trained.items()
        if kind == "muon" and value.ndim == 2 and "embed" not in name and "lm_head" not in name
    }
    others = {name: value for name, value in trained.items() if name not in matrices}
    optimisers: list[torch.optim.Optimizer] = []
    if matrices:
        optimisers.append(
            torch.optim.Muon(
                matrices.values(), lr=learning_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
            )
        )
    if others:
        optimisers.append(torch.optim.AdamW(others.values(), lr=learning_rate, betas=_BETAS, weight_decay=weight_decay))
    return optimisers

"""One choice in each row of a table of costs, where what the choices take adds up to a given sum."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def cheapest_choices(costs: Float[Tensor, "rows options"], total: int) -> tuple[int, ...]:
    """Return one option j for each row, the indices adding up to `total`, at the least sum of costs[row, j].

    Exact, by dynamic programming over the rows, whatever the costs: they need be neither convex nor monotone, as a
    greedy choice by marginal gain would have it. Infinite costs are options that there are not.

    Raises:
        ValueError: no choice adds up to `total`.
    """
    rows, options = costs.shape
    least = torch.full((total + 1,), float("inf"), dtype=torch.float64)  # of the rows so far, by the sum that they take
    least[0] = 0.0
    chosen = torch.zeros(rows, total + 1, dtype=torch.long)
    for row in range(rows):
        with_option = torch.full((options, total + 1), float("inf"), dtype=torch.float64)
        for option in range(min(options, total + 1)):
            with_option[option, option:] = least[: total + 1 - option] + costs[row, option]
        least, chosen[row] = with_option.min(dim=0)
    if not least[total].isfinite():
        raise ValueError(f"no choice of {rows} options adds up to {total}")
    found, left = [], total
    for row in reversed(range(rows)):
        found.append(int(chosen[row, left]))
        left -= found[-1]
    return tuple(reversed(found))

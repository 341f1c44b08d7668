"""Choices that add up to a sum, against all of them written out."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_convert.maths.knapsack import cheapest_choices
from tests.maths.samples import normal


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data(), rows=st.integers(1, 5), options=st.integers(1, 5), seed=st.integers(0, 1000))
def test_no_choice_is_cheaper(data, rows, options, seed):
    costs = normal(rows, options, seed=seed)
    total = data.draw(st.integers(0, rows * (options - 1)))
    found = cheapest_choices(costs, total)
    assert len(found) == rows
    assert sum(found) == total
    sums = [
        sum(costs[row, option].item() for row, option in enumerate(choice))
        for choice in product(range(options), repeat=rows)
        if sum(choice) == total
    ]
    assert sum(costs[row, option].item() for row, option in enumerate(found)) == pytest.approx(min(sums), abs=1e-12)


def test_a_step_that_pays_only_when_it_is_whole_is_taken():
    """Two units save nothing in the first row and three save most of all: marginal gains would go to the second."""
    costs = torch.tensor([[10.0, 10.0, 10.0, 0.0], [10.0, 8.0, 7.0, 6.5]], dtype=torch.float64)
    assert cheapest_choices(costs, 3) == (3, 0)


def test_what_costs_infinity_is_not_chosen():
    infinity = float("inf")
    costs = torch.tensor([[0.0, infinity, 5.0], [0.0, infinity, 9.0]], dtype=torch.float64)
    assert cheapest_choices(costs, 2) == (2, 0)
    for total in (1, 3, 5):
        with pytest.raises(ValueError, match=f"adds up to {total}"):
            cheapest_choices(costs, total)

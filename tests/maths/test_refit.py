"""Ridge regression towards the weights that are there, against least squares on rows written out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mla_convert.maths.refit import ridge_refit, token_weights
from tests.maths.samples import max_difference, normal

TOKENS, INPUTS, OUTPUTS = 40, 6, 4


def samples(seed: int, rank: int = INPUTS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs u [n I] of some rank, wanted outputs t [n J], weights w [n] and a map W [J I] that is near."""
    u = normal(TOKENS, rank, seed=seed) @ normal(rank, INPUTS, seed=seed + 1)
    weight = normal(OUTPUTS, INPUTS, seed=seed + 2)
    t = u @ (weight + 0.3 * normal(OUTPUTS, INPUTS, seed=seed + 3)).mT + 0.2 * normal(TOKENS, OUTPUTS, seed=seed + 4)
    return u, t, normal(TOKENS, seed=seed + 5).square(), weight


def refitted(u: Tensor, t: Tensor, w: Tensor, weight: Tensor, ridge: float) -> Tensor:
    return ridge_refit(weight, (t * w[:, None]).mT @ u / w.sum(), (u * w[:, None]).mT @ u / w.sum(), ridge=ridge)


def error(u: Tensor, t: Tensor, w: Tensor, weight: Tensor) -> float:
    return ((t - u @ weight.mT).square().sum(1) * w).sum().item()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1000), ridge=st.floats(1e-6, 1e3), rank=st.integers(1, INPUTS))
def test_it_is_least_squares_on_rows_augmented_by_the_ridge(seed: int, ridge: float, rank: int) -> None:
    u, t, w, weight = samples(seed, rank)
    mean = ((u * w[:, None]).mT @ u / w.sum()).trace() / INPUTS
    rows = torch.cat((u * (w / w.sum()).sqrt()[:, None], (ridge * mean).sqrt() * torch.eye(INPUTS).double()))
    wanted = torch.cat((t * (w / w.sum()).sqrt()[:, None], (ridge * mean).sqrt() * weight.mT))
    expected = torch.linalg.lstsq(rows, wanted).solution.mT
    # normal equations square a condition number of up to 1e4 for the smallest ridge
    assert max_difference(refitted(u, t, w, weight, ridge), expected) <= 1e-6


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1000), ridge=st.floats(1e-6, 1e3))
def test_the_weighted_error_falls_and_less_the_larger_the_ridge(seed: int, ridge: float) -> None:
    u, t, w, weight = samples(seed)
    before, after = error(u, t, w, weight), error(u, t, w, refitted(u, t, w, weight, ridge))
    assert after < before
    assert after <= error(u, t, w, refitted(u, t, w, weight, 2 * ridge)) * (1 + 1e-9)


@pytest.mark.parametrize("ridge", [1e15, float("inf")])
def test_a_large_ridge_changes_nothing(ridge: float) -> None:
    u, t, w, weight = samples(0)
    assert max_difference(refitted(u, t, w, weight, ridge), weight) <= 1e-12


@pytest.mark.parametrize("ridge", [1e-12, 1e-3, 1.0])
@pytest.mark.parametrize("rank", [2, INPUTS])
def test_a_map_that_is_right_is_left_alone_at_any_ridge(ridge: float, rank: int) -> None:
    u, _, w, weight = samples(0, rank)
    # what rounding leaves of the difference of two moments is divided by the ridge
    assert max_difference(refitted(u, u @ weight.mT, w, weight, ridge), weight) <= 1e-14 / ridge + 1e-12


def test_inputs_that_were_never_seen_are_answered_as_before() -> None:
    u, t, w, weight = samples(3, rank=3)
    unseen = torch.linalg.svd(u).Vh[3:]
    found = refitted(u, t, w, weight, 1e-3)
    assert max_difference(unseen @ found.mT, unseen @ weight.mT) <= 1e-9
    assert max_difference(found, weight) > 1e-3


def test_nothing_seen_changes_nothing_and_the_type_stays() -> None:
    weight = normal(OUTPUTS, INPUTS).float()
    found = ridge_refit(weight, torch.zeros(OUTPUTS, INPUTS), torch.zeros(INPUTS, INPUTS), ridge=0.1)
    assert torch.equal(found, weight)
    assert found.dtype == torch.float32


def test_tokens_weigh_the_inverse_of_their_energy_within_limits() -> None:
    states = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 2.0], [0.0, 0.0], [20.0, 0.0]])
    energies = torch.tensor([25.0, 1.0, 4.0, 0.0, 400.0])
    found = token_weights(states, most=3.0)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([4 / 25, 3.0, 1.0, 3.0, 4 / 400])  # the median energy is 4
    assert token_weights(1e3 * states, most=3.0).tolist() == pytest.approx(found.tolist())
    assert (token_weights(states[:3], most=100.0) * energies[:3]).tolist() == pytest.approx([4.0] * 3)
    assert token_weights(states[:4].view(2, 2, 2), most=2.0).shape == (2, 2)
    assert token_weights(torch.zeros(2, 3), most=2.0).tolist() == [1.0, 1.0]

"""The joint factorisation, against the bound of Eckart and Young and against sums over samples."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_convert.maths.factorise import factorise_joint, truncation_curve, truncation_error
from tests.maths.samples import complex_normal, max_difference, normal, second_moment

SIZE = 8


def moment_of(size: int, seed: int, samples: int = 60) -> torch.Tensor:
    scales = 0.7 ** torch.arange(size, dtype=torch.float64)
    return second_moment((normal(samples, size, seed=seed) * scales) @ normal(size, size, seed=seed + 50))


def damped(metric: torch.Tensor, damping: float) -> torch.Tensor:
    return metric + damping * metric.diagonal().mean() * torch.eye(metric.shape[0], dtype=torch.float64)


def error(projection: torch.Tensor, moment: torch.Tensor, metric: torch.Tensor) -> float:
    """E[(y - P y)^T A (y - P y)]."""
    lost = torch.eye(moment.shape[0], dtype=torch.float64) - projection
    return torch.trace(metric @ lost @ moment @ lost.mT).item()


def bound(rank: int, moment: torch.Tensor, metric: torch.Tensor) -> float:
    """The least error of any map of that rank: the tail of the singular values of R L, A = R^T R, E[y y^T] = L L^T."""
    product = torch.linalg.cholesky(metric).mT @ torch.linalg.cholesky(moment)
    return torch.linalg.svdvals(product)[rank:].square().sum().item()


@pytest.mark.parametrize("rank", range(1, SIZE + 1))
@pytest.mark.parametrize("damping", [0.0, 0.01, 0.5])
def test_no_map_of_that_rank_has_a_smaller_error(rank, damping):
    moment, metric = moment_of(SIZE, 0), moment_of(SIZE, 1)
    factors = factorise_joint(moment, metric, rank, damping=damping)
    assert (factors.down.shape, factors.up.shape) == ((rank, SIZE), (SIZE, rank))
    weight = damped(metric, damping)
    least = bound(rank, moment, weight)
    scale = torch.trace(weight @ moment).item()
    # the error at a rank near full is a difference of numbers as large as `scale`
    assert error(factors.up @ factors.down, moment, weight) == pytest.approx(least, rel=1e-6, abs=1e-11 * scale)
    assert factors.spectrum[rank:].sum().item() == pytest.approx(least, rel=1e-6, abs=1e-11 * scale)
    assert factors.lost == pytest.approx(least / scale, rel=1e-6, abs=1e-11)


def test_gradient_descent_ends_no_lower():
    moment, metric = moment_of(5, 2), moment_of(5, 3)
    factors = factorise_joint(moment, metric, 2, damping=0.0)
    reached = error(factors.up @ factors.down, moment, metric)
    down, up = normal(2, 5, seed=9).requires_grad_(), normal(5, 2, seed=10).requires_grad_()
    optimiser = torch.optim.LBFGS([down, up], max_iter=60, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        lost = torch.eye(5, dtype=torch.float64) - up @ down
        loss = torch.trace(metric @ lost @ moment @ lost.mT)
        loss.backward()
        return loss

    optimiser.step(closure)
    descended = closure().item()
    assert descended >= reached * (1 - 1e-9)
    assert descended == pytest.approx(reached, rel=0.05)  # there are no other minima, and descent has come near


def test_every_root_of_the_metric_gives_the_same_factors(monkeypatch):
    moment, metric = moment_of(SIZE, 0), moment_of(SIZE, 1)
    cholesky = factorise_joint(moment, metric, 3, damping=0.1)
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda matrix: (matrix, torch.tensor(1)))
    symmetric = factorise_joint(moment, metric, 3, damping=0.1)
    signs = (cholesky.down * symmetric.down).sum(1).sign()
    assert max_difference(cholesky.down, signs[:, None] * symmetric.down) <= 1e-10
    assert max_difference(cholesky.up, signs * symmetric.up) <= 1e-10
    assert max_difference(cholesky.spectrum, symmetric.spectrum) <= 1e-10


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_a_metric_that_is_not_positive_is_read_as_ever(scale):
    """One of zeros weighs all directions alike; an eigenvalue that rounding made negative counts as zero."""
    moment = moment_of(SIZE, 0)
    metric = scale * torch.diag(torch.tensor([-1.0] + [1.0] * (SIZE - 1), dtype=torch.float64))
    factors = factorise_joint(moment, metric, SIZE, damping=1e-3)
    assert max_difference(factors.up @ factors.down, torch.eye(SIZE, dtype=torch.float64)) <= 1e-9
    assert factors.spectrum.min() >= 0


def test_at_full_rank_everything_is_kept():
    factors = factorise_joint(moment_of(SIZE, 0), moment_of(SIZE, 1), SIZE, damping=0.01)
    assert max_difference(factors.up @ factors.down, torch.eye(SIZE, dtype=torch.float64)) <= 1e-10
    assert factors.lost == 0.0


def test_the_rank_of_the_samples_is_enough_for_them():
    """A metric that is singular but damped does not stand in the way."""
    samples = normal(40, 3) @ normal(3, SIZE, seed=1)
    seen = normal(2, SIZE, seed=2)
    factors = factorise_joint(second_moment(samples), seen.mT @ seen, 3, damping=0.01)
    assert max_difference(samples @ (factors.up @ factors.down).mT, samples) <= 1e-9
    assert factors.lost <= 1e-12


def test_truncated_energy_is_the_samples_own_error_through_the_metrics_root():
    samples = normal(100, SIZE) @ normal(SIZE, SIZE, seed=1)
    readers = normal(30, SIZE, seed=2)  # A = readers^T readers / 30: the mean square of 30 linear readings of an error
    factors = factorise_joint(second_moment(samples), second_moment(readers), 3, damping=0.0)
    left = samples - samples @ (factors.up @ factors.down).mT
    measured = (left @ readers.mT).square().sum(1).mean().item() / 30
    assert factors.spectrum[3:].sum().item() == pytest.approx(measured, rel=1e-9)
    total = (samples @ readers.mT).square().sum(1).mean().item() / 30
    assert factors.spectrum.sum().item() == pytest.approx(total, rel=1e-9)


def test_the_spectrum_falls():
    spectrum = factorise_joint(moment_of(SIZE, 0), moment_of(SIZE, 1), 2, damping=0.0).spectrum
    assert spectrum.shape == (SIZE,)
    assert (spectrum.diff() <= 0).all()


def test_a_moment_of_zeros_loses_nothing():
    factors = factorise_joint(torch.zeros(4, 4, dtype=torch.float64), moment_of(4, 0), 2, damping=0.0)
    assert factors.lost == 0.0
    assert torch.isfinite(factors.up @ factors.down).all()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(size=st.integers(1, 7), seed=st.integers(0, 500), damping=st.sampled_from([0.0, 0.01, 1.0]), data=st.data())
def test_a_random_projection_is_never_better(size, seed, damping, data):
    rank = data.draw(st.integers(1, size))
    moment, metric = moment_of(size, seed), moment_of(size, seed + 1)
    weight = damped(metric, damping)
    factors = factorise_joint(moment, metric, rank, damping=damping)
    reached = error(factors.up @ factors.down, moment, weight)
    scale = torch.trace(weight @ moment).item()
    nudge = 1e-3 * normal(size, rank, seed=seed + 2) @ normal(rank, size, seed=seed + 3)
    rivals = (
        factors.up @ factors.down + nudge @ factors.up @ factors.down,
        normal(size, rank, seed=seed + 4) @ normal(rank, size, seed=seed + 5),
    )
    for rival in rivals:
        assert error(rival, moment, weight) >= reached - 1e-11 * scale
    # idempotent: what was kept is kept again
    projection = factors.up @ factors.down
    assert max_difference(projection @ projection, projection) <= 1e-6


@settings(max_examples=40, deadline=None, derandomize=True)
@given(size=st.integers(2, 9), seed=st.integers(0, 500), damping=st.sampled_from([1e-4, 0.1, 2.0]), data=st.data())
def test_given_the_latent_the_up_projection_is_the_least_squares_one(size, seed, damping, data):
    """Refitting W_UK and W_UV to c = down y on the samples behind the moment gives what is there."""
    rank = data.draw(st.integers(1, size))
    samples = normal(6 * size, size, seed=seed) @ normal(size, size, seed=seed + 1)
    factors = factorise_joint(second_moment(samples), moment_of(size, seed + 2), rank, damping=damping)
    latents = samples @ factors.down.mT
    fitted = torch.linalg.lstsq(latents, samples).solution.mT
    # products are compared, as the latent's scale is not well conditioned: condition numbers of about 1e6 at worst
    assert max_difference(latents @ factors.up.mT, latents @ fitted.mT) <= 1e-7
    # what is left is uncorrelated with the latent: no query, independent of it, can be changed to score better
    left = samples - latents @ factors.up.mT
    assert (left.mT @ latents).abs().max() <= 1e-9 * samples.abs().max() * latents.abs().max() * len(samples)


@pytest.mark.parametrize("rank", [1, 4, SIZE])
def test_the_error_of_other_samples_is_the_mean_over_them(rank):
    factors = factorise_joint(moment_of(SIZE, 0), moment_of(SIZE, 1), rank, damping=0.1)
    others, readers = normal(70, SIZE, seed=5) @ normal(SIZE, SIZE, seed=6), normal(20, SIZE, seed=7)
    left = others - others @ (factors.up @ factors.down).mT
    measured = (left @ readers.mT).square().sum(1).mean().item() / 20
    found = truncation_error(factors, second_moment(others), second_moment(readers))
    assert found == pytest.approx(measured, rel=1e-8, abs=1e-15)


def test_shapes_are_enforced_here():
    """The suite runs with jaxtyping's import hook: a moment that is not square is refused where it enters."""
    from jaxtyping import TypeCheckError

    with pytest.raises(TypeCheckError):
        factorise_joint(normal(3, 4), normal(3, 3), 2, damping=0.0)
    with pytest.raises(TypeCheckError):
        factorise_joint(complex_normal(3, 3), normal(3, 3), 2, damping=0.0)


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_the_curve_is_the_error_at_every_rank(damping, other):
    """Under the moment that the factors were made from, and under another, where directions are correlated."""
    moment, metric = moment_of(SIZE, 4), moment_of(SIZE, 5)
    curve = truncation_curve(
        factorise_joint(moment, metric, SIZE, damping=damping),
        seen := moment_of(SIZE, 6) if other else moment,
        fisher := moment_of(SIZE, 7),
    )
    assert curve.shape == (SIZE + 1,)
    scale = torch.trace(fisher @ seen).item()
    assert curve[0].item() == pytest.approx(scale)
    for rank in range(SIZE + 1):
        factors = factorise_joint(moment, metric, rank, damping=damping)
        direct = error(factors.up @ factors.down, seen, fisher)
        # the direct error is a difference of numbers as large as `scale`
        assert curve[rank].item() == pytest.approx(direct, rel=1e-6, abs=1e-10 * scale)

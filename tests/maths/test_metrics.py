"""Output metrics, against the quadratic forms that they stand for, summed over samples one by one."""

import pytest
import torch

from mla_convert.maths.metrics import attention_output_metric, balanced_metric, mixed_metric, rotate_moment
from tests.maths.samples import complex_normal, max_difference, normal, second_moment

GROUPS, GROUP, DIM, WIDTH, TOKENS = 2, 3, 4, 10, 30
HEADS, PAIRS = GROUPS * GROUP, DIM // 2


def as_complex(x: torch.Tensor) -> torch.Tensor:
    return torch.complex(x[..., :PAIRS], x[..., PAIRS:])


@pytest.fixture
def layer() -> dict[str, torch.Tensor]:
    return {
        "queries": normal(TOKENS, HEADS, DIM) + 0.3,
        "constants": complex_normal(HEADS, PAIRS, seed=1),
        "values": normal(TOKENS, GROUPS, DIM, seed=2) - 0.2,
        "w_o": normal(WIDTH, HEADS, DIM, seed=3),
    }


def metric_of(layer: dict[str, torch.Tensor]) -> torch.Tensor:
    return attention_output_metric(
        second_moment(layer["queries"]), layer["constants"], second_moment(layer["values"]), layer["w_o"]
    )


def test_a_value_error_costs_what_it_moves_each_heads_output(layer):
    errors = normal(GROUPS, DIM, seed=7)
    stacked = torch.cat((torch.zeros(GROUPS * DIM, dtype=torch.float64), errors.flatten()))
    expected = sum((layer["w_o"][:, h] @ errors[h // GROUP]).square().sum() for h in range(HEADS))
    assert max_difference(stacked @ metric_of(layer) @ stacked, expected) <= 1e-12


def test_a_key_error_costs_the_squared_change_of_scores_times_the_energy_they_distribute(layer):
    errors = normal(GROUPS, DIM, seed=8)
    stacked = torch.cat((errors.flatten(), torch.zeros(GROUPS * DIM, dtype=torch.float64)))
    expected = torch.zeros((), dtype=torch.float64)
    for h in range(HEADS):
        outputs = layer["values"][:, h // GROUP] @ layer["w_o"][:, h].mT
        energy = outputs.square().sum(1).mean()
        content_query = layer["constants"][h].conj() * as_complex(layer["queries"][:, h])
        # the score of real vectors is Re Σ conj(a) z
        change = (content_query.conj() * as_complex(errors[h // GROUP])).sum(1).real
        expected += energy * change.square().mean() / DIM
    assert max_difference(stacked @ metric_of(layer) @ stacked, expected) <= 1e-12


def test_heads_keys_and_values_do_not_mix(layer):
    metric = metric_of(layer)
    assert torch.equal(metric, metric.mT) or max_difference(metric, metric.mT) <= 1e-14
    for block in range(2 * GROUPS):
        rows = slice(block * DIM, (block + 1) * DIM)
        outside = metric[rows].clone()
        outside[:, rows] = 0
        assert not outside.any()


def test_constants_of_one_leave_queries_as_they_are(layer):
    moments = second_moment(layer["queries"]).contiguous()
    assert torch.equal(rotate_moment(moments, torch.ones(HEADS, PAIRS, dtype=torch.complex128)), moments)


def test_a_rotated_moment_is_the_moment_of_rotated_samples(layer):
    factors = complex_normal(HEADS, PAIRS, seed=4)
    turned = as_complex(layer["queries"]) * factors
    expected = second_moment(torch.cat((turned.real, turned.imag), dim=-1))
    assert max_difference(rotate_moment(second_moment(layer["queries"]), factors), expected) <= 1e-13


def test_balance_gives_keys_and_values_the_same_energy():
    scales = torch.cat((torch.full((6,), 20.0), torch.full((6,), 0.1))).double()
    samples = normal(50, 12) * scales
    metric = balanced_metric(second_moment(samples))
    assert torch.equal(metric, torch.diag(metric.diagonal()))
    assert metric.diagonal().unique().numel() == 2
    energies = [
        (samples[:, rows] @ metric[rows, rows]).mul(samples[:, rows]).sum(1).mean() for rows in (slice(6), slice(6, 12))
    ]
    torch.testing.assert_close(energies[0], energies[1], rtol=1e-12, atol=0)


def test_balance_without_content_keys_weighs_values_alone():
    samples = torch.cat((torch.zeros(20, 3), torch.ones(20, 3)), dim=1).double()
    metric = balanced_metric(second_moment(samples))
    assert torch.isfinite(metric).all()
    assert not metric[:3].any()
    assert (metric.diagonal()[3:] > 0).all()


def test_a_mixture_does_not_depend_on_either_metrics_unit():
    first, second = second_moment(normal(9, 5)), second_moment(normal(9, 5, seed=1))
    mixed = mixed_metric(first, second)
    assert mixed.trace().item() == pytest.approx(1.0, rel=1e-14)
    assert max_difference(mixed_metric(1e6 * first, 1e-3 * second), mixed) <= 1e-14
    direction = normal(5, seed=2)
    share = [direction @ m @ direction / m.trace() for m in (first, second)]
    assert max_difference(direction @ mixed @ direction, (share[0] + share[1]) / 2) <= 1e-13


def test_a_metric_without_signal_leaves_the_other_alone() -> None:
    metric = torch.diag(torch.arange(1.0, 5.0, dtype=torch.float64))
    for mixed in (mixed_metric(metric, torch.zeros_like(metric)), mixed_metric(torch.zeros_like(metric), metric)):
        torch.testing.assert_close(mixed, metric / 10)

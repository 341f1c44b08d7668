"""RoPE in complex form, against rotations written out as cosines and sines and moments of drawn samples."""

import math

import pytest
import torch

from mla_convert.maths.rope import (
    from_pairs,
    pair_moments,
    pair_rows,
    real_operator,
    real_rows,
    to_pairs,
    unrotate,
)
from tests.maths.samples import complex_normal, max_difference, normal, second_moment

POSITIONS, DIM, GROUPS = 9, 6, 3
PAIRS = DIM // 2
FREQUENCIES = [1.0, 0.3, 0.004]


def rotated_by_hand(x: torch.Tensor) -> torch.Tensor:
    """RoPE from its definition: dims l and l + K/2 of x [... S K] turned by position times frequency."""
    out = torch.empty_like(x)
    for position in range(x.shape[-2]):
        for pair, frequency in enumerate(FREQUENCIES):
            angle = position * frequency
            first, second = x[..., position, pair], x[..., position, pair + PAIRS]
            out[..., position, pair] = math.cos(angle) * first - math.sin(angle) * second
            out[..., position, pair + PAIRS] = math.sin(angle) * first + math.cos(angle) * second
    return out


def angles() -> tuple[torch.Tensor, torch.Tensor]:
    turned = torch.arange(POSITIONS)[:, None] * torch.tensor(FREQUENCIES, dtype=torch.float64)
    return turned.cos(), turned.sin()


def test_unrotate_undoes_rope():
    x = normal(2, GROUPS, POSITIONS, DIM)
    back = unrotate(rotated_by_hand(x), *angles())
    torch.testing.assert_close(back, x, rtol=0, atol=1e-14)


def test_unrotate_keeps_the_callers_dtype():
    cos, sin = angles()
    assert unrotate(normal(POSITIONS, DIM).float(), cos.float(), sin.float()).dtype == torch.float32


def test_rotation_multiplies_a_pair_by_a_unit_complex_number():
    x = normal(POSITIONS, DIM)
    cos, sin = angles()
    torch.testing.assert_close(to_pairs(rotated_by_hand(x)), to_pairs(x) * torch.complex(cos, sin), rtol=0, atol=1e-14)


def test_pairs_are_dims_half_a_head_apart_and_come_back():
    x = torch.arange(6.0)
    assert to_pairs(x).tolist() == [0 + 3j, 1 + 4j, 2 + 5j]
    assert torch.equal(from_pairs(to_pairs(x)), x.double())


def test_rows_of_a_projection_go_to_pairs_and_back():
    w = normal(GROUPS, DIM, 5)
    rows = pair_rows(w)
    assert rows.shape == (GROUPS, PAIRS, 5)
    assert torch.equal(real_rows(rows), w)
    x = normal(5, seed=1)
    torch.testing.assert_close(rows @ x.to(torch.complex128), to_pairs(w @ x), rtol=0, atol=1e-14)


def test_pair_moments_are_those_of_complex_samples():
    samples = normal(50, GROUPS, DIM) @ normal(DIM, DIM, seed=1) + 0.5  # correlated within heads
    samples[:, 1] += 0.7 * samples[:, 0]  # and across
    moment = second_moment(samples.flatten(1))
    expected = second_moment(to_pairs(samples).transpose(1, 2))  # [F G G]
    assert max_difference(pair_moments(moment, GROUPS), expected) <= 1e-13


def test_the_real_operator_does_what_the_complex_map_does():
    mix = complex_normal(PAIRS, GROUPS, GROUPS)
    keys = normal(7, GROUPS, DIM)
    mixed = torch.einsum("lgh,nhl->ngl", mix, to_pairs(keys))
    expected = torch.cat((mixed.real, mixed.imag), dim=-1).flatten(1)
    assert max_difference(keys.flatten(1) @ real_operator(mix).mT, expected) <= 1e-14


def test_real_operators_compose_as_complex_maps_do():
    first, second = complex_normal(PAIRS, GROUPS, GROUPS), complex_normal(PAIRS, GROUPS, GROUPS, seed=1)
    composed = real_operator(second) @ real_operator(first)
    assert max_difference(real_operator(second @ first), composed) <= 1e-14


@pytest.mark.parametrize("heads", [1, 4])
def test_maps_over_heads_commute_with_rope(heads):
    keys = normal(heads, POSITIONS, DIM)
    operator = real_operator(complex_normal(PAIRS, heads, heads))

    def mixed(x: torch.Tensor) -> torch.Tensor:
        return (x.transpose(0, 1).flatten(1) @ operator.mT).unflatten(1, (heads, DIM)).transpose(0, 1)

    torch.testing.assert_close(mixed(rotated_by_hand(keys)), rotated_by_hand(mixed(keys)), rtol=0, atol=1e-13)

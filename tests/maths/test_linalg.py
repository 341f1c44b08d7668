"""Powers of positive semi-definite matrices, against closed forms and other algorithms than the code's own."""

import pytest
import torch

from mla_convert.maths.linalg import damped_power, hermitian
from tests.maths.samples import complex_normal, max_difference, normal

# Of matrices with condition numbers up to about 1e4, eigen-decompositions and inverses lose four of sixteen digits.
TOLERANCE = 1e-11


def wishart(size: int, rank: int, kind: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """B B^H and B, of `size` rows and `rank` columns."""
    draw = complex_normal if kind == "complex" else normal
    factor = draw(size, rank, seed=seed)
    return factor @ factor.mH, factor


@pytest.mark.parametrize("power", [0.5, -0.5, -1.0, 2.0])
@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_a_diagonal_matrix_has_the_powers_of_its_damped_entries(power, damping):
    entries = torch.tensor([3.0, 0.5, 8.0, 0.01], dtype=torch.float64)
    expected = torch.diag((entries + damping * 11.51 / 4) ** power)
    torch.testing.assert_close(damped_power(torch.diag(entries), power, damping), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kind", ["real", "complex"])
def test_a_square_root_squares_to_the_matrix(kind):
    matrix, _ = wishart(6, 9, kind)
    root = damped_power(matrix, 0.5, 0.0)
    assert max_difference(root @ root, matrix) <= TOLERANCE
    assert max_difference(root.mH, root) <= TOLERANCE
    assert torch.linalg.eigvalsh(root).min() > 0


@pytest.mark.parametrize("kind", ["real", "complex"])
def test_an_inverse_is_the_one_that_elimination_finds(kind):
    matrix, _ = wishart(6, 4, kind)
    damped = matrix + 0.05 * matrix.diagonal().mean() * torch.eye(6, dtype=matrix.dtype)
    assert max_difference(damped_power(matrix, -1.0, 0.05), torch.linalg.inv(damped)) <= TOLERANCE
    inverse_root = damped_power(matrix, -0.5, 0.05)
    assert max_difference(inverse_root @ inverse_root @ damped, torch.eye(6, dtype=matrix.dtype)) <= TOLERANCE


@pytest.mark.parametrize("kind", ["real", "complex"])
def test_of_a_singular_matrix_only_the_range_is_inverted(kind):
    matrix, factor = wishart(7, 3, kind)
    inverse_root = damped_power(matrix, -0.5, 0.0)
    basis = torch.linalg.qr(factor).Q
    assert max_difference(inverse_root @ matrix @ inverse_root, basis @ basis.mH) <= TOLERANCE
    # the null space gets power 0, and not one over a rounding error
    assert inverse_root.abs().max() <= 1 / torch.linalg.svdvals(factor).min() * (1 + TOLERANCE)


@pytest.mark.parametrize("power", [0.5, -0.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_a_matrix_of_zeros_is_read_as_the_identity(power, dtype):
    zeros = torch.zeros(3, 3, dtype=dtype)
    assert torch.equal(damped_power(zeros, power, 0.01), torch.eye(3, dtype=dtype))


def test_each_matrix_of_a_batch_is_taken_alone():
    matrices = torch.stack([wishart(4, 6, "complex", seed)[0] for seed in range(3)] + [torch.zeros(4, 4)])
    powered = damped_power(matrices, -0.5, 0.02)
    for matrix, found in zip(matrices, powered, strict=True):
        assert max_difference(found, damped_power(matrix, -0.5, 0.02)) <= TOLERANCE


def test_negative_eigenvalues_count_as_zero():
    rotation = torch.linalg.qr(normal(3, 3)).Q
    values = torch.tensor([4.0, 1.0, -1e-9], dtype=torch.float64)
    root = damped_power(rotation @ torch.diag(values) @ rotation.mT, 0.5, 0.0)
    expected = rotation @ torch.diag(torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64)) @ rotation.mT
    assert max_difference(root, expected) <= 1e-12


def test_narrow_input_is_worked_on_in_float64():
    matrix, _ = wishart(5, 8, "real")
    narrow = matrix.float()
    root = damped_power(narrow, 0.5, 0.0)
    assert root.dtype == torch.float64
    assert max_difference(root @ root, narrow.double()) <= TOLERANCE


def test_the_argument_is_left_as_it_was():
    matrix, _ = wishart(4, 4, "complex")
    before = matrix.clone()
    damped_power(matrix, 0.5, 0.1)
    assert torch.equal(matrix, before)


def test_the_hermitian_part():
    matrix = complex_normal(2, 3, 3)
    part = hermitian(matrix)
    assert torch.equal(part, part.mH)
    anti = matrix - part
    torch.testing.assert_close(anti, -anti.mH, rtol=0, atol=1e-15)

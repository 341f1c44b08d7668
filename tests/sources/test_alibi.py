from __future__ import annotations

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from mla_convert.sources.alibi import alibi_slopes


def test_eight_heads_have_the_papers_slopes() -> None:
    assert alibi_slopes(8) == tuple(1 / 2**index for index in range(1, 9))


def test_sixteen_heads_have_the_papers_slopes() -> None:
    assert alibi_slopes(16) == pytest.approx([2 ** (-0.5 * index) for index in range(1, 17)])


def test_heads_beyond_a_power_of_two_take_every_other_slope_of_the_next() -> None:
    # Six heads: the four of four heads, 2^-2 to 2^-8, then the first and third of eight heads.
    assert alibi_slopes(6) == (2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 12, 16, 24, 71, 112])
def test_slopes_are_those_of_transformers(heads: int) -> None:
    ones = torch.ones(1, 5, dtype=torch.long)
    bloom = build_alibi_tensor(ones, heads, torch.float32).view(heads, 5)
    mpt = build_mpt_alibi_tensor(heads, 5).view(heads, 5)
    # float32 powers, of bases that are rounded themselves: eight products or so of relative error 6e-8.
    assert torch.allclose(bloom[:, 1], torch.tensor(alibi_slopes(heads)), rtol=1e-5, atol=0)
    assert torch.allclose(mpt[:, 4] - mpt[:, 3], torch.tensor(alibi_slopes(heads)), rtol=1e-5, atol=0)

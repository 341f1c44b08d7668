"""The choice of the next token: its distribution, and temperatures next to 0 or that are none."""

from __future__ import annotations

import pytest
import torch

from mla_convert.decode.sampling import Sampling
from mla_convert.errors import UsageError


@pytest.mark.parametrize(("top_p", "kept"), [(None, 4), (0.75, 2)])
def test_samples_have_the_distribution_that_is_asked_for(top_p: float | None, kept: int) -> None:
    probabilities = torch.tensor([0.1, 0.5, 0.3, 0.1])
    draws = 4000
    sampling = Sampling(temperature=0.5, top_p=top_p)
    # At half the temperature a token of probability p has p² of what all have.
    expected = probabilities**2 / (probabilities**2).sum()
    keep = expected.argsort(descending=True)[:kept]
    expected = torch.zeros(4).index_copy(0, keep, expected[keep] / expected[keep].sum())
    generators = [sampling.generator(i, torch.device("cpu")) for i in range(draws)]
    drawn = torch.tensor(sampling.choose(probabilities.log().expand(draws, 4), generators))
    frequencies = drawn.bincount(minlength=4) / draws
    # five standard deviations of a frequency
    assert ((frequencies - expected).abs() <= 5 * (expected * (1 - expected) / draws).sqrt()).all()


@pytest.mark.parametrize("temperature", [1e-320, 1e-300, 1e-38, 1e-30])
@pytest.mark.parametrize("top_p", [None, 0.5])
def test_a_temperature_next_to_0_is_greedy(temperature, top_p) -> None:
    logits = torch.tensor([[-900.0, 3.0, 4.0, -5.0], [800.0, 1e-3, 799.9, 0.0]])
    sampling = Sampling(temperature, top_p)
    generators = [sampling.generator(i, torch.device("cpu")) for i in range(2)]
    assert sampling.choose(logits, generators) == [2, 0]


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf")])
def test_a_temperature_that_is_none_is_refused(temperature) -> None:
    with pytest.raises(UsageError, match="temperature"):
        Sampling(temperature).check()

"""Spectra and slots as a report keeps them, against the factorisation that they come from."""

import json
from dataclasses import asdict

import pytest
import torch

from mla_convert.maths.factorise import factorise_joint
from mla_convert.report import LayerDetails, ReportDetails
from tests.report.samples import details, record


def moment(size: int, seed: int) -> torch.Tensor:
    """A random second moment whose directions differ much in their energy."""
    made = torch.randn(size, 2 * size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    made *= torch.logspace(0, -2, size, dtype=torch.float64)[:, None]
    return made @ made.mT


@pytest.mark.parametrize("rank", [0, 1, 7, 40])
def test_what_is_lost_at_a_rank_is_what_the_factors_of_that_rank_lose(rank: int) -> None:
    own, metric = moment(40, 0), moment(40, 1)
    spectrum = factorise_joint(own, metric, 40, damping=0.1).spectrum.tolist()
    layer = LayerDetails.of(spectrum, rank, None, num_pairs=0)
    lost = dict(zip(layer.ranks, layer.lost, strict=True))
    # four digits are kept
    assert lost[rank] == pytest.approx(factorise_joint(own, metric, rank, damping=0.1).lost, rel=1e-3, abs=1e-12)
    assert lost[0] == 1
    assert lost[40] == 0
    assert list(layer.lost) == sorted(layer.lost, reverse=True)


def test_a_long_spectrum_is_thinned_and_keeps_its_ends_and_the_chosen_rank() -> None:
    layer = LayerDetails.of([1.0 / (i + 1) for i in range(4096)], 1234, None, num_pairs=0)
    assert len(layer.ranks) == len(layer.lost) <= 65
    assert {0, 1234, 4096} <= set(layer.ranks)
    assert layer.ranks == tuple(sorted(set(layer.ranks)))


def test_a_layer_without_content_loses_nothing() -> None:
    assert set(LayerDetails.of([0.0] * 8, 4, None, num_pairs=0).lost) == {0.0}


def test_slots_are_counted_by_pair() -> None:
    layer = LayerDetails.of([1.0], 1, [2, 0, 2, 2], num_pairs=4)
    assert layer.slots == (1, 0, 3, 0)
    assert LayerDetails.of([1.0], 1, None, num_pairs=4).slots == ()


def test_details_survive_json() -> None:
    made = details(record())
    assert ReportDetails.read(json.loads(json.dumps(asdict(made)))) == made

from pathlib import Path

import pytest

from mla_convert.calibrate import recorder
from mla_convert.calibrate.statistics import Statistics, save_statistics
from tests.calibrate.models import MODELS, Tiny, described
from tests.calibrate.samples import PROVENANCE, layer
from tests.tiny import tiny_llama


@pytest.fixture(autouse=True)
def blocks(monkeypatch) -> None:
    """The short contexts of these tests take several blocks of queries, the last of them a part of one."""
    monkeypatch.setattr(recorder, "BLOCK", 4)


@pytest.fixture(scope="package", params=MODELS)
def tiny(request, tmp_path_factory) -> Tiny:
    """Each of the models in turn; tests leave it as it was."""
    return described(MODELS[request.param](), tmp_path_factory.mktemp("calibrate"))


@pytest.fixture(scope="package")
def gqa(tmp_path_factory) -> Tiny:
    """A model with grouped queries; tests leave it as it was."""
    return described(tiny_llama("GQA"), tmp_path_factory.mktemp("calibrate-gqa"))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A file of the statistics of two layers, of made-up numbers."""
    file = tmp_path / "statistics.safetensors"
    save_statistics(Statistics((layer(1), layer(2)), PROVENANCE), file)
    return file

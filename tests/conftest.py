"""Settings for the whole test process, made before triton is imported."""

import os

# Tests multiply small matrices, in which threads cost more than they give. For this process and those it starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    # The kernels' own tests run on the CPU, interpreted. On a GPU the same tests run the compiled kernels.
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Triton 3.9 warns that this setting's default is going to change.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def plain_reports(request: pytest.FixtureRequest) -> Iterator[None]:
    """Conversions write their report's page without sections, which takes longer to draw than a tiny model to convert.

    Tests of reports (in modules or functions named so) draw them.
    """
    if "report" in request.node.nodeid:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mla_convert.report.writing.render", lambda _data, _folder: "<title>a report</title>\n")
        yield

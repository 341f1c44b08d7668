"""The benchmark runs on tiny shapes, in the interpreter, and says what it is meant to say. Nothing timed is tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.cpu_layers import SOURCE_FORMS, LatentLayer, SourceLayer
from benchmarks.decode import main
from benchmarks.floors import add_floors, decode_work
from benchmarks.gpu_decode import measure_shape
from benchmarks.model_decode import CONVERTED, CONVERTED_PAGED, SOURCE, SOURCE_STATIC, measure_models
from benchmarks.shapes import TINY, LayerShape
from benchmarks.timing import Spread, interleaved, ratio
from tests.mla.native import native
from tests.tiny import tiny_llama

SCRIPT = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "decode.py"
# Sums of at most 40 numbers of order 1, reordered.
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a quick run wrote; where there is no GPU, its check of the kernel is in the interpreter."""
    file = tmp_path_factory.mktemp("bench") / "bench.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--json", str(file), "--only", "layers", "checks"]
    environment = os.environ | ({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "| tiny H=4 C=32 R=16 |" in ended.stdout
    return json.loads(file.read_text(encoding="utf-8"))


def test_it_says_what_it_ran_on(report: dict[str, Any]) -> None:
    assert report["errors"] == []
    assert report["machine"]["versions"]["torch"] == torch.__version__
    assert report["machine"].keys() >= {"processor", "cores", "load_average", "gpu"}
    assert set(report["seconds"]) == {"layers", "checks"}


def test_a_layer_is_measured_whole_and_as_attention_alone(report: dict[str, Any]) -> None:
    assert [(found["part"], found["projections_included"]) for found in report["layers"]] == [
        ("layer", True),
        ("core", False),
    ]
    for found in report["layers"]:
        assert set(found["milliseconds"]) == {"absorbed", "expanding", *SOURCE_FORMS}
        assert set(found["ratios"]) == {"expanding", "source", "source_fastest"}
        assert found["ratios"]["source_fastest"]["median"] == found["forms"][found["fastest_form"]]["median"]


def test_the_kernel_is_compared_with_float64(report: dict[str, Any]) -> None:
    assert [(found["dtype"], found["fp8"], found["passed"]) for found in report["checks"]] == [
        ("float32", False, True),
        ("float16", True, True),
    ]


def test_a_shape_has_its_bytes_products_and_sdpa() -> None:
    shapes = add_floors(list(measure_shape(TINY, quick=True, end=inf)), ceilings=None)
    assert [found["cache"] for found in shapes] == ["bf16", "fp8"]
    assert set(shapes[0]["splits"]["by_splits"]) == {"1", "2"}
    for found in shapes:
        assert found["flop"] == 2 * 2 * 4 * 192 * (2 * 32 + 16)
        assert found["bytes"] > 2 * 192 * found["cache_row_bytes"]
        assert found["relative_error_of_last_sequence"] < 1e-2  # the output is rounded to bfloat16, 2^-9 apart
        assert found["sdpa"]["form"] in found["sdpa"]["all_forms"]
        assert found["bytes_ratio"] == pytest.approx(2 * 2 * 2 * 16 / found["cache_row_bytes"], abs=1e-3)


def test_a_section_that_cannot_run_costs_only_itself(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    assert main(["--quick", "--json", str(file), "--only", "model", "layers"]) == 1
    content = json.loads(file.read_text(encoding="utf-8"))
    assert [error["section"] for error in content["errors"]] == ["model"]
    assert "--model" in content["errors"][0]["error"]
    assert len(content["layers"]) == 2


def test_the_forms_of_a_layer_compute_the_same() -> None:
    """Else their times would not be comparable: absorbed is expanding, and the source's forms are one another."""
    latent, source = LatentLayer(TINY, 40, torch.float32), SourceLayer(TINY, 40, torch.float32)
    torch.testing.assert_close(latent.absorbed(), latent.expanding(), **CLOSE)
    outputs = [source.step(form) for form in SOURCE_FORMS]
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], **CLOSE)


def test_whole_models_are_measured_on_every_cache() -> None:
    (found,) = measure_models(tiny_llama(), native(), (20,), threads=1, rounds=2, tokens_a_turn=2)
    assert set(found["tokens_per_second"]) == {SOURCE, SOURCE_STATIC, CONVERTED, CONVERTED_PAGED}
    assert set(found["speedup_over_source"]) == {SOURCE_STATIC, CONVERTED, CONVERTED_PAGED}
    # Two layers of K and V for two heads of 16, and three of C + R = 10 + 6, four bytes each.
    assert found["cache_bytes_a_token"] == {"source": 4 * 2 * 2 * 2 * 16, "converted": 4 * 3 * 16}


def test_rounds_take_turns_and_the_first_is_dropped() -> None:
    calls: list[str] = []
    ticks = iter(range(100))
    named: dict[str, Callable[[], None]] = {name: lambda name=name: calls.append(name) for name in "ab"}
    seconds = interleaved(named, 2, lambda: float(next(ticks)), before=lambda: calls.append("-"))
    assert "".join(calls) == "-a-b" * 3
    assert seconds == {"a": [1.0, 1.0], "b": [1.0, 1.0]}


def test_a_ratio_is_taken_round_by_round() -> None:
    """Both slowed down threefold in the second round: the ratio is 2 in each, and so is its spread."""
    assert ratio({"slow": [2.0, 6.0, 2.0], "fast": [1.0, 3.0, 1.0]}, "slow", "fast") == Spread(2.0, 2.0, 2.0)


def test_the_floor_is_the_slower_of_bytes_and_products() -> None:
    """Round numbers: 64 tokens' rows of 100 bytes dominate the bytes, and the ceilings make the floors 1 s and 2 s."""
    shape = LayerShape("round", 1, 1, 0, 1, 1, 1, 1, 1)
    work = decode_work(shape, batch=1, tokens=64, row_bytes=100, element_bytes=2, page=64)
    assert work.nbytes == 6400 + 2 * (2 + 1) + 4 + 4 * 2
    assert work.flop == 2 * 64 * 3
    result = {"shape": "round", "batch": 1, "tokens": 64, "cache": "bf16", "bytes": work.nbytes, "flop": work.flop}
    result |= {"microseconds": {"median": 4e6, "low": 4e6, "high": 4e6}}
    sdpa = {"sdpa_of": "round", "batch": 1, "tokens": 64, "microseconds": {"median": 8e6}}
    ceilings = {"copy_bytes_per_s": work.nbytes, "read_bytes_per_s": work.nbytes, "bf16_flop_per_s": work.flop / 2}
    (found,) = add_floors([result, sdpa], ceilings)
    assert (found["bound"], found["floor_microseconds"], found["share_of_floor"]) == ("compute", 2e6, 0.5)
    assert found["speedup_over_sdpa"] == 2.0

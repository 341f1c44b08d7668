"""A conversion that is killed, at any moment, goes on with the same command to the same bytes."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from mla_convert.pipeline import ConvertRequest, convert
from tests.tiny import save_source, tiny_llama

# With two recipes and two ways of working, a dozen in all.
KILLS = 3

# What differs between two runs of the same conversion: how long its stages took, and what shows it.
TIMED = ("report.html", "report.json")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tiny_llama(num_hidden_layers=6), tmp_path_factory.mktemp("killed") / "source")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("killed-text") / "text.txt"
    file.write_text("".join(f"Line {i}: the cat sat on mat {i * i} and saw {i % 7} dogs.\n" for i in range(120)))
    return file


def contents(folder: Path) -> dict[str, Any]:
    """Every file's bytes; of conversion.json what is not a time."""
    found: dict[str, Any] = {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and file.name not in TIMED
    }
    record = json.loads(found["conversion.json"])
    del record["timings"]
    return found | {"conversion.json": record}


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize("recipe", ["fast", "forward"])
def test_killed_at_random_moments_it_ends_in_the_same_bytes(
    source: Path, text: Path, tmp_path: Path, recipe: str, low_memory: bool
) -> None:
    """In forked children, after random shares of the time that a whole run takes."""

    def request(out: Path) -> ConvertRequest:
        return ConvertRequest(
            source=str(source), out=out, recipe=recipe, cache=0.5, calibration=(str(text),), calibration_tokens=512,
            low_memory=low_memory,
        )  # fmt: skip

    convert(request(tmp_path / "straight"))
    wanted = contents(tmp_path / "straight")
    start = time.perf_counter()
    convert(request(tmp_path / "again"))
    seconds = time.perf_counter() - start
    shutil.rmtree(tmp_path / "again")
    chance = random.Random(f"{recipe} {low_memory}")
    context = multiprocessing.get_context("fork")
    killed = 0
    for _ in range(20):
        child = context.Process(target=convert, args=(request(tmp_path / "out"),))
        child.start()
        child.join(chance.uniform(0.02, 0.9) * seconds)
        if child.exitcode is None:
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
            killed += 1
        child.join()
        if (tmp_path / "out").exists():  # done before it could be killed: begin anew
            assert contents(tmp_path / "out") == wanted
            shutil.rmtree(tmp_path / "out")
        if killed == KILLS:
            break
    if not (tmp_path / "out").exists():
        convert(request(tmp_path / "out"))
    assert killed == KILLS
    assert contents(tmp_path / "out") == wanted
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "straight"]

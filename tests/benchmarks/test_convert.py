"""The comparison of conversions runs on a tiny model and reports what it is meant to. Nothing timed is tested."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from benchmarks.convert import main, run, split_topics
from tests.tiny import save_source, tiny_llama


def test_every_candidate_is_measured_at_one_size_of_cache(tmp_path: Path, capsys) -> None:
    source = save_source(tiny_llama(), tmp_path / "source")
    command = ["--source", str(source), "--json", str(tmp_path / "found.json"), "--folder", str(tmp_path)]
    command += ["--tokens", "512", "--context", "64", "--evaluation-tokens", "256", "--cache", "0.75"]
    main([*command, "--recipes", "forward", "--modes", "low-memory", "--threads", "1"])
    found = json.loads((tmp_path / "found.json").read_text())
    assert set(found["candidates"]) == {"reference", "forward --low-memory"}
    assert "| forward --low-memory |" in capsys.readouterr().out
    for candidate in found["candidates"].values():
        assert candidate["cache_bytes"] == 0.75 * found["source"]["cache_bytes"]
        assert 0 < sum(candidate["timings"].values()) < candidate["seconds"]
        # Python with torch and transformers takes more than this, and a megabyte of weights not much besides.
        assert 100e6 < candidate["peak_bytes"] < 4e9
        assert candidate["perplexity"] > 1
    reference = found["candidates"]["reference"]
    assert (reference["speedup"], reference["memory_ratio"]) == (1, 1)


def test_what_is_unseen_is_in_no_calibration(tmp_path: Path) -> None:
    calibration, unseen = (file.read_text(encoding="utf-8") for file in split_topics(tmp_path))
    assert len(calibration) > 200_000
    assert len(unseen) > 50_000
    assert set(calibration.split("\n\n")).isdisjoint(unseen.split("\n\n"))


def test_a_run_is_measured_by_itself() -> None:
    size = 150 * 2**20
    found = run(["-c", f"held = bytearray(b'x') * {size}; print('{{\"held\": 1}}')"], threads=1)
    assert found["printed"] == {"held": 1}
    started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # before it is replaced, a child is its parent
    assert size < found["peak_bytes"] < size + max(400 * 2**20, started)


def test_a_run_that_fails_ends_the_comparison_with_what_it_said() -> None:
    with pytest.raises(SystemExit, match="no such thing"):
        run(["-c", "raise ValueError('no such thing')"], threads=1)

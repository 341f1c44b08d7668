"""What holds across processes: one that is killed and repeated, and two that share the work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mla_convert.heal.distil import DistilResult, DistilSettings, distil
from tests.heal.distil_process import DROPOUT, run
from tests.heal.pair import healing_text_of, student_and_teacher

SETTINGS = {"learning_rate": 3e-3, "batch_size": 2, "evaluate_every": 4, "checkpoint_every": 3}
ROOT = Path(__file__).resolve().parents[2]
# `accelerate launch --cpu --num_processes 2` starts a single process where there is no MPI; torchrun starts both, and
# accelerate finds itself among two.
TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def start(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run Python with the arguments, as a process of its own."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)


def distilled(**changes: Any) -> DistilResult:
    """The same without checkpoints, in this process, in one go."""
    student, teacher = student_and_teacher()
    student.config.attention_dropout = changes.pop("dropout", 0.0)
    return distil(student, teacher, healing_text_of(), DistilSettings(**SETTINGS | changes))


def read_curve(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "curve.json").read_text())


def test_killed_and_repeated_it_ends_with_the_same_bits(tmp_path):
    # Dropout, so that random numbers are drawn in every step. The first kill comes before the first checkpoint.
    options = json.dumps(SETTINGS | {DROPOUT: 0.1})
    for stop in (2, 11):
        killed = start("-m", "tests.heal.distil_process", tmp_path, options, stop)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    run(tmp_path, json.loads(options))
    straight = distilled(dropout=0.1)
    assert read_curve(tmp_path) == [asdict(point) for point in straight.curve]
    assert len(straight.curve) == 25
    weights = load_file(tmp_path / "weights.safetensors")
    assert weights.keys() == straight.weights.keys()
    assert all(torch.equal(weights[name], value) for name, value in straight.weights.items())


@pytest.mark.parametrize(
    ("optimizer", "tolerance"),
    # Muon orthogonalises in bfloat16, which rounds what differs in the last bit to one side or the other, and more or
    # less of it from processor to processor: curves were 1.1e-4 apart on one without bfloat16 units.
    [("adamw", 1e-4), ("muon", 5e-4)],
)
def test_two_processes_killed_and_repeated_are_one_with_twice_the_batch(tmp_path, optimizer, tolerance):
    options = json.dumps(SETTINGS | {"batch_size": 1, "optimizer": optimizer})
    assert start(*TWO, "-m", "tests.heal.distil_process", tmp_path, options, 8).returncode != 0
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1
    done = start(*TWO, "-m", "tests.heal.distil_process", tmp_path, options)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "processes").read_text() == "2"

    single = distilled(optimizer=optimizer)
    for ours, theirs in zip(single.curve, read_curve(tmp_path), strict=True):
        assert theirs["tokens"] == ours.tokens
        # float32 sums in another order, through two dozen steps
        assert theirs["loss"] == pytest.approx(ours.loss, abs=tolerance)
        assert theirs["held_out"] == pytest.approx(ours.held_out, abs=tolerance)
    for name, value in load_file(tmp_path / "weights.safetensors").items():
        torch.testing.assert_close(value, single.weights[name], atol=10 * tolerance, rtol=0)


def test_sharded_weights_and_optimiser_are_read_whole_and_put_back(tmp_path):
    done = start(*TWO, "-m", "tests.heal.sharded_process", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "compared").read_text() == "2"

"""The command `heal` with its stage `global`, and both stages together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mla_convert.cli import run
from mla_convert.evaluate import compare, load_for_evaluation
from mla_convert.heal.data import healing_text

TEXT = ("--tokens", "512", "--context", "32", "--held-out", "0.2", "--passes", "2")
GLOBAL = ("--learning-rate", "0.003", "--batch-size", "2", "--evaluate-every", "4")
LAYERS = ("--layer-steps", "10", "--layer-batch", "4", "--layer-rate", "0.01")


@pytest.fixture
def command(converted: Path, source: Path, text: Path) -> Any:
    """The arguments of a healing into a folder, at a stage."""

    def make(out: Path, stage: str) -> list[str]:
        names = [str(converted), str(out), "--teacher", str(source), "--text", str(text), "--stage", stage]
        return ["heal", *names, *TEXT, *GLOBAL, *LAYERS, "--json"]

    return make


def test_distillation_brings_the_model_closer_and_writes_its_course(
    command: Any, converted: Path, source: Path, text: Path, tmp_path: Path, capfd: Any
) -> None:
    out = tmp_path / "healed"
    assert run(command(out, "global")) == 0
    said = json.loads(capfd.readouterr().out)
    course = said["global"]
    assert course["held_out_kl"][str(course["best_step"])] < course["held_out_kl"]["0"]
    assert course["tokens"] <= 512
    assert len((out / "loss.jsonl").read_text().splitlines()) > 1
    record = json.loads((out / "conversion.json").read_text())
    assert record["healing"][0]["global"]["held_out_kl"] == course["held_out_kl"]
    assert "Distilled from its source" in (out / "README.md").read_text()
    teacher, tokenizer = load_for_evaluation(str(source), torch.float32)
    held_out = healing_text(
        tokenizer, [str(text)], context=32, tokens=512, held_out_share=0.2, seed=0, passes=2
    ).held_out
    before, after = (
        compare(load_for_evaluation(str(folder), torch.float32)[0], teacher, held_out).kl for folder in (converted, out)
    )
    assert after < before


def test_both_stages_killed_in_the_second_come_to_the_same_bits(command: Any, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "healed"
    assert run(command(whole, "all")) == 0
    arguments = [sys.executable, "-m", "mla_convert", *command(out, "all")]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    work = tmp_path / ".healed.heal" / "global"
    deadline = time.monotonic() + 240
    while not list(work.glob("step-*.safetensors")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    if out.exists():
        pytest.skip("the run was over before it could be killed")
    assert list(work.glob("step-*.safetensors"))
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    first, second = load_file(whole / "model.safetensors"), load_file(out / "model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not work.parent.exists()


def test_an_interrupted_run_of_other_settings_is_not_gone_on_with(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    from mla_convert.heal import healing

    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "healed"
    monkeypatch.setattr(healing, "distil", stopped)
    assert run(command(out, "all")) == 130
    monkeypatch.undo()
    changed = [*command(out, "all"), "--layer-rate", "0.02"]
    capfd.readouterr()
    assert run(changed) not in (0, 70, 130)
    err = capfd.readouterr().err
    assert "another run" in err
    assert "learning_rate" in err
    assert not out.exists()

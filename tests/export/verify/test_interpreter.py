"""The interpreter that is named starts from any folder, and is the one of its environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mla_convert.errors import VerificationError
from mla_convert.export.verify.answers import Probe
from mla_convert.export.verify.engines import ENGINES, engine_named
from mla_convert.export.verify.interpreter import interpreter


def _program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_path_from_here_is_one_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = _program(tmp_path / "env" / "bin" / "python", "echo here")
    (tmp_path / "env" / "bin" / "python3").symlink_to(program)
    for name in ("python", "python3"):
        found = interpreter(Path("env/bin", name))
        assert found == str(program.with_name(name))
        assert subprocess.run([found], cwd="/", capture_output=True, text=True, check=True).stdout == "here\n"
    monkeypatch.setenv("PATH", "env/bin", prepend=os.pathsep)
    assert interpreter(Path("python3")) == str(program.with_name("python3"))
    assert interpreter(None) == sys.executable
    assert interpreter(Path("nowhere/python")) == "nowhere/python"


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_no_interpreter_has_no_engine(engine: str, tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path, _program(tmp_path / "silent", "exit 0"), Path("/dev/null")):
        assert engine_named(engine).version(path) is None


def test_what_claims_to_have_transformers_and_answers_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    silent = _program(tmp_path / "silent", "exit 0")
    with pytest.raises(VerificationError, match="exit status 0"):
        engine_named("transformers").answer(tmp_path, Probe((1, 2)), python=silent)

"""A tiny source, its conversion to half the cache, and a text to heal on."""

from __future__ import annotations

from pathlib import Path

import pytest

from mla_convert.cli import run
from tests.tiny import save_source, tiny_llama


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("heal-text") / "text.txt"
    file.write_text("".join(f"Line {i}: the cat sat on mat {i * i} and saw {i % 7} dogs.\n" for i in range(300)))
    return file


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tiny_llama(), tmp_path_factory.mktemp("heal") / "source")


@pytest.fixture(scope="session")
def converted(source: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("heal-converted") / "mla"
    arguments = ["convert", source, out, "--cache", 0.5, "--calibration", text, "--calibration-tokens", 1024, "--quiet"]
    assert run([str(argument) for argument in arguments]) == 0
    return out

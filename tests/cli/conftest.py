"""A tiny source folder, a hub, and a command line that answers with its exit code and both streams."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mla_convert.cli import run
from tests.hub_stub import running_hub
from tests.tiny import save_source, tiny_llama


@dataclass(frozen=True)
class Answer:
    """What a command line gave: its exit code and its two streams."""

    code: int
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        """Standard output as the one JSON object that it must be."""
        assert self.code == 0, self.err
        return json.loads(self.out)


@pytest.fixture
def cli(capfd):
    """Run a command line in this process and return its answer."""

    def call(*arguments: object) -> Answer:
        capfd.readouterr()
        code = run([str(argument) for argument in arguments])
        streams = capfd.readouterr()
        return Answer(code, streams.out, streams.err)

    return call


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """The folder of a tiny Llama with grouped queries; tests do not change it."""
    return save_source(tiny_llama(), tmp_path_factory.mktemp("cli") / "tiny")


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    """Some thousand tokens of English for calibration and evaluation."""
    file = tmp_path_factory.mktemp("cli-text") / "text.txt"
    file.write_text("".join(f"Line {i}: the cat sat on mat {i * i} and saw {i % 7} dogs.\n" for i in range(300)))
    return file


@pytest.fixture(scope="session")
def converted(tiny_folder, text_file, tmp_path_factory) -> Path:
    """The tiny source at half its cache; tests do not change it."""
    out = tmp_path_factory.mktemp("cli-converted") / "mla"
    sizes = ["--cache", "0.5", "--calibration", str(text_file), "--calibration-tokens", "1024"]
    assert run(["convert", str(tiny_folder), str(out), *sizes, "--quiet", "--json"]) == 0
    return out


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A running hub; the client sends to it, over LFS, and knows no token of the machine's."""
    from huggingface_hub import constants

    with running_hub() as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield running

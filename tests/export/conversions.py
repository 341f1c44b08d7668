"""Tiny sources taken through the command line: folders as users have them, with records and cards."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from mla_convert.cli import run
from tests.tiny import save_source


def converted_folder(model: PreTrainedModel, folder: Path, *options: str) -> Path:
    """Convert ``model`` into ``folder`` / "mla", with options of ``convert`` besides, and return where it is."""
    source = save_source(model, folder / "source")
    text = folder / "text.txt"
    text.write_text("".join(f"Line {i}: the cat sat on mat {i * i} and saw {i % 7} dogs.\n" for i in range(200)))
    arguments = ["convert", str(source), str(folder / "mla"), "--calibration", str(text), "--quiet", "--json"]
    assert run([*arguments, "--calibration-tokens", "1024", *options]) == 0
    return folder / "mla"

"""Prompts from a file."""

from __future__ import annotations

import json
from pathlib import Path

from mla_convert.errors import UsageError


def read_prompts(file: Path) -> list[str]:
    """Return the prompts of a UTF-8 file: its lines, those with nothing but space in them left out.

    In a file named ``.jsonl`` each line is a JSON string or an object with a string ``prompt``, so that a prompt may
    hold line breaks.

    Raises:
        UsageError: the file cannot be read or holds no prompt, or a line is not what its name says.
    """
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read prompts from {file}: {error}", "name a UTF-8 text file") from error
    numbered = [(i, line.removesuffix("\r")) for i, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise UsageError(f"{file} holds no prompt", "write one on each line")
    if file.suffix != ".jsonl":
        return [line for _, line in numbered]
    return [_from_json(line, f"line {i} of {file}") for i, line in numbered]


def _from_json(line: str, place: str) -> str:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{place} is not JSON: {error}", "write a JSON value on each line, or name it .txt") from error
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str) or not prompt:
        raise UsageError(f"{place} gives no prompt", 'write a JSON string, or an object with "prompt": a string')
    return prompt

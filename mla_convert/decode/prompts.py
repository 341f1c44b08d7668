"""Prompts from a file, and what every prompt must be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from mla_convert.errors import UsageError


def check_prompts(prompts: Sequence[str]) -> None:
    """Raise UsageError where there is no prompt, or for one that is empty or no Unicode text."""
    if not prompts:
        raise UsageError("there is no prompt", "give at least one")
    for i, prompt in enumerate(prompts, start=1):
        place = "the prompt" if len(prompts) == 1 else f"prompt {i} of {len(prompts)}"
        if not prompt:
            raise UsageError(f"{place} is empty", "give a prompt with some text")
        _check_text(prompt, place)


def read_prompts(file: Path) -> list[str]:
    """Return the prompts of a UTF-8 file: its lines, those with nothing but space in them left out.

    A byte order mark at its beginning belongs to no prompt.
    In a file named ``.jsonl`` each line is a JSON string or an object with a string ``prompt``, so that a prompt may
    hold line breaks.

    Raises:
        UsageError: the file cannot be read or holds no prompt, or a line is not what its name says.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
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
    except (ValueError, RecursionError) as error:  # the latter for a value that is nested too deep
        raise UsageError(f"{place} is not JSON: {error}", "write a JSON value on each line, or name it .txt") from error
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str) or not prompt:
        raise UsageError(f"{place} gives no prompt", 'write a JSON string, or an object with "prompt": a string')
    _check_text(prompt, place)
    return prompt


def _check_text(prompt: str, place: str) -> None:
    """Raise UsageError for lone surrogates: they come from escapes in JSON, and from arguments that are not UTF-8."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{place} is no Unicode text: its character {error.start + 1} is U+{ord(prompt[error.start]):04X}, half of "
            "a surrogate pair",
            "give the prompt in UTF-8",
        ) from error

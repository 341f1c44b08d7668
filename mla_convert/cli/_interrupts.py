"""What is said when a command is interrupted: what it keeps, and how to go on."""

from __future__ import annotations

import glob
import shlex
from collections.abc import Sequence
from pathlib import Path

NOTHING_LEFT = "nothing unfinished is left"


class InterruptedRunError(Exception):
    """A command was interrupted and has cleaned up.

    Attributes:
        kept: what the next run of the same command goes on with; empty if it starts anew.
        left: what else to say.
    """

    def __init__(self, kept: Sequence[Path] = (), left: str = NOTHING_LEFT) -> None:
        super().__init__(left)
        self.kept = tuple(kept)
        self.left = left


def kept_beside(out: Path) -> tuple[Path, ...]:
    """Return what runs for the folder ``out`` have left beside it to go on with."""
    target = out.absolute()
    found = sorted(target.parent.glob(f".{glob.escape(target.name)}.*"))
    own = len(f".{target.name}")
    return tuple(path for path in found if not any(kind in path.name[own:] for kind in (".partial-", ".replaced-")))


def interruption(error: InterruptedRunError, arguments: Sequence[str]) -> str:
    """Return the two lines that an interrupted command ends with."""
    command = shlex.join(("mla-convert", *_without_secrets(arguments)))
    if not error.kept:
        return f"interrupted: {error.left}\n  to start again: {command}"
    kept = ", ".join(f"{path.name} ({_bytes(path) / 1e6:,.1f} MB)" for path in error.kept)
    place = error.kept[0].parent
    return f"interrupted: kept in {place} for the next run: {kept}\n  to go on: {command}"


def _without_secrets(arguments: Sequence[str]) -> list[str]:
    """The arguments with three dots for an access token, since terminals are logged."""
    shown = list(arguments)
    for i, argument in enumerate(shown):
        if argument.startswith("--token="):
            shown[i] = "--token=..."
        elif argument == "--token" and i + 1 < len(shown):
            shown[i + 1] = "..."
    return shown


def _bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else (path,)
    return sum(file.stat().st_size for file in files if file.is_file())

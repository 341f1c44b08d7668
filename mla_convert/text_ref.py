"""What the name of a text says of it."""

from __future__ import annotations

from pathlib import Path

_SUFFIXES = frozenset({".txt", ".md", ".rst", ".jsonl"})


def is_file_ref(ref: str) -> bool:
    """Whether a text's name is that of a file, which need not be there: anything else is a dataset's or built in."""
    if ref.startswith("builtin:"):
        return False
    return Path(ref).exists() or ref.startswith(("/", "./", "../", "~")) or Path(ref).suffix in _SUFFIXES

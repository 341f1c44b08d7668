"""How long work reports where it is: the library calls back, the caller draws."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called after each unit of work: ``done`` of ``total`` units of the named stage are finished."""

    def __call__(self, stage: str, done: int, total: int) -> None: ...


def silent(stage: str, done: int, total: int) -> None:
    """Report nothing: what ``progress=None`` means everywhere."""

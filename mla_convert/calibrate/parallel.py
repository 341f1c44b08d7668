"""Calibration on several devices at once: each has the model, takes its share of the contexts, and the sums add up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from threading import Event, Lock

from mla_convert.progress import Progress

# What a context is recorded for, and its place among the contexts.
Stage = tuple[str, int]


def shares(stages: Sequence[Stage], count: int) -> list[list[Stage]]:
    """Deal the stages of each kind out to so many devices, in turn; the first gets no fewer than any other."""
    dealt: list[list[Stage]] = [[] for _ in range(count)]
    seen: dict[str, int] = {}
    for stage in stages:
        turn = seen.get(stage[0], 0)
        dealt[turn % count].append(stage)
        seen[stage[0]] = turn + 1
    return dealt


def on_each(count: int, work: Callable[[int, Event], None]) -> None:
    """Call ``work`` with 0, ..., count - 1, each in a thread of its own, and wait for all.

    The event that it is given is set when another of them has failed, or the run is interrupted: then it is to return.
    What was raised first is raised here. A single one is called in this thread.
    """
    stop = Event()
    if count == 1:
        work(0, stop)
        return
    with ThreadPoolExecutor(count) as pool:
        try:
            for future in as_completed([pool.submit(work, i, stop) for i in range(count)]):
                future.result()
        finally:
            stop.set()


class Steps:
    """Counts what threads have done, and reports it."""

    def __init__(self, report: Progress, stage: str, total: int) -> None:
        self.done = 0
        self._report, self._stage, self._total = report, stage, total
        self._lock = Lock()

    def step(self) -> None:
        """One more is done."""
        with self._lock:
            self.done += 1
            self._report(self._stage, self.done, self._total)

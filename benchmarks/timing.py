"""Clocks: interleaved rounds on a CPU, graph replays on a GPU, and the summary of both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

WARM_UP_REPLAYS = 3
MIN_REPEATS, MAX_REPEATS = 7, 50


@dataclass(frozen=True)
class Spread:
    """A median and the range that the middle half of the samples lies in."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Summarise one or more samples."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high)

    def scaled(self, factor: float) -> dict[str, float]:
        """Return the three numbers times ``factor``, to four significant digits, as JSON holds them."""
        return {name: float(f"{getattr(self, name) * factor:.4g}") for name in ("median", "low", "high")}


def cpu_clock(threads: int) -> tuple[Callable[[], float], str]:
    """Return a clock in seconds and its name.

    One thread is timed by the CPU time that it took, which other programs' turns on the core are no part of; several
    threads by the time that passed.
    """
    if threads == 1:
        return time.thread_time, "CPU time of the thread"
    return time.perf_counter, "time that passed"


def interleaved(
    calls: Mapping[str, Callable[[], Any]],
    rounds: int,
    clock: Callable[[], float],
    before: Callable[[], Any] | None = None,
) -> dict[str, list[float]]:
    """Return each call's seconds, round by round: A B C A B C ..., so that all meet the same disturbances.

    ``before`` runs ahead of each call and is not timed. One round ahead of the others is not kept.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            if before is not None:
                before()
            started = clock()
            call()
            passed = clock() - started
            if number:
                seconds[name].append(passed)
    return seconds


class Eviction:
    """Writes more memory than a processor's caches hold, so that the next call finds nothing of its own there.

    Inside a model it does not either: the other layers' weights and caches have passed through since.
    """

    def __init__(self, nbytes: int) -> None:
        self.buffer = torch.zeros(nbytes // 4)

    def __call__(self) -> None:
        self.buffer.add_(1.0)


def ratio(seconds: Mapping[str, Sequence[float]], slow: str, fast: str) -> Spread:
    """Return how many times longer ``slow`` took than ``fast``, from the ratios of single rounds."""
    return Spread.of([a / b for a, b in zip(seconds[slow], seconds[fast], strict=True)])


def fastest(seconds: Mapping[str, Sequence[float]], names: Sequence[str]) -> str:
    """Return the name with the least median."""
    return min(names, key=lambda name: statistics.median(seconds[name]))


def event_times(call: Callable[[], Any], repeats: int) -> list[float]:
    """Return seconds of ``call`` on the current CUDA device, between events, one sample a repeat."""
    for _ in range(WARM_UP_REPLAYS):
        call()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in pairs:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]


def graph_times(calls: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """Return seconds a call, from ``repeats`` replays of one CUDA graph that holds all ``calls`` once.

    Each call should read a cache of its own: together more than the L2 holds, so that none is found there. Calls are
    run once before capture, which compiles what they need.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    samples = [sample / len(calls) for sample in event_times(graph.replay, repeats)]
    graph.reset()
    return samples


def call_times(calls: Sequence[Callable[[], Any]], repeats: int, device: torch.device) -> list[float]:
    """Return seconds a call: graph replays on a GPU; elsewhere the clock around all calls, to try the code only."""
    if device.type == "cuda":
        return graph_times(calls, repeats)
    samples = []
    for _ in range(repeats):
        started = time.perf_counter()
        for call in calls:
            call()
        samples.append((time.perf_counter() - started) / len(calls))
    return samples


def repeats_within(call: Callable[[], Any], seconds: float, device: torch.device) -> int:
    """Return how often ``call`` runs within ``seconds``, at least MIN_REPEATS times and at most MAX_REPEATS."""
    if device.type != "cuda":
        return 2
    once = min(event_times(call, 3))
    return max(MIN_REPEATS, min(MAX_REPEATS, int(seconds / once)))

"""Decode steps on the GPU: the latent cache in bf16 and fp8, and torch SDPA on the source layer's keys and values.

Times are of calls inside CUDA graphs, each call on a cache of its own: together several times the L2, so that none of
a cache is found there. Every sequence of a batch is equally long, pages are 64 tokens and lie in random order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.floors import decode_work
from benchmarks.gpu_checks import difference
from benchmarks.gpu_sdpa import measure_sdpa
from benchmarks.inputs import PAGE, make_cache, softmax_scale
from benchmarks.shapes import LayerShape
from benchmarks.timing import Spread, call_times, repeats_within
from mla_kernels import mla_decode
from mla_kernels.checks import check_inputs
from mla_kernels.choice import choose_launch
from mla_kernels.fp8 import dequantize_latent, fp8_layout
from mla_kernels.reference import reference_decode

CASES = ((1, 8192), (16, 8192), (64, 8192), (128, 8192), (1, 131072))
# Caches that take turns hold at least this many times the L2, in at most MAX_CACHES pieces.
L2_TIMES = 4
MAX_CACHES = 64
ASSUMED_L2_BYTES = 128 << 20
MEMORY_SHARE = 0.8
# Seconds of replays for one number.
TIMED_SECONDS = 0.15
SWEPT_SPLITS = (1, 2, 4, 8, 16, 32, 64, 132)


@dataclass(frozen=True)
class Rotation:
    """How many caches take turns, and whether together they exceed the L2."""

    caches: int
    exceeds_l2: bool


def measure_shape(shape: LayerShape, *, quick: bool, end: float) -> Iterator[dict[str, Any]]:
    """Yield a result for every batch and context of one shape, until ``end``: ours, then SDPA's, then other splits.

    SDPA comes after ours because its backends may fail, and a failure can take the process's CUDA context with it. Its
    results carry ``sdpa_of`` and those of other splits ``splits_of``; :func:`benchmarks.floors.add_floors` joins them.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases = ((2, 192),) if quick else CASES
    tasks: list[tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = []
    for batch, tokens in cases:
        name = {"shape": shape.label, "batch": batch, "tokens": tokens}
        for fp8 in (False, True):
            kind = {"cache": "fp8" if fp8 else "bf16"}
            tasks.append((name | kind, lambda b=batch, t=tokens, f=fp8: _measure(shape, b, t, f, device)))
    for batch, tokens in cases if shape.kv_heads else ():
        name = {"sdpa_of": shape.label, "batch": batch, "tokens": tokens}
        tasks.append((name, lambda b=batch, t=tokens: measure_sdpa(shape, b, t, rotation, device)))
    for batch, tokens in cases:
        name = {"splits_of": shape.label, "batch": batch, "tokens": tokens}
        tasks.append((name, lambda b=batch, t=tokens: _sweep(shape, b, t, device)))
    for name, task in tasks:
        if time.monotonic() > end:
            yield name | {"skipped": "no time was left"}
            continue
        try:
            yield name | task()
        except Exception as error:
            yield name | {"error": f"{type(error).__name__}: {error}"[:600]}
        if device.type == "cuda":
            torch.cuda.empty_cache()


def rotation(nbytes: int, device: torch.device) -> Rotation | None:
    """Return how many caches of ``nbytes`` take turns; None if not even one fits the memory that is free."""
    if device.type != "cuda":
        return Rotation(2, False)
    properties = torch.cuda.get_device_properties(device)
    l2 = getattr(properties, "L2_cache_size", 0) or ASSUMED_L2_BYTES
    fitting = int(torch.cuda.mem_get_info(device)[0] * MEMORY_SHARE) // nbytes
    if fitting == 0:
        return None
    caches = max(1, min(-(-L2_TIMES * l2 // nbytes), MAX_CACHES, fitting))
    return Rotation(caches, caches * nbytes > l2)


@dataclass(frozen=True)
class _Step:
    """A decode step at full size: its arguments, with several caches to take turns.

    Attributes:
        q: [B, 1, H, C + R] in bfloat16.
        table: int32 [B, pages], a random order.
        lengths: int32 [B], all the same.
    """

    q: Tensor
    caches: list[Tensor]
    table: Tensor
    lengths: Tensor
    rank: int
    scale: float
    turns: Rotation

    def calls(self, num_splits: int | None = None) -> list[Callable[[], tuple[Tensor, Tensor]]]:
        """Return the step on each of the caches."""
        return [lambda cache=cache: self._decode(cache, num_splits) for cache in self.caches]

    def _decode(self, cache: Tensor, num_splits: int | None) -> tuple[Tensor, Tensor]:
        return mla_decode(self.q, cache, self.table, self.lengths, self.rank, self.scale, num_splits=num_splits)

    def times(self, seconds: float, num_splits: int | None = None) -> list[float]:
        """Return seconds of a call, from about ``seconds`` of them."""
        calls = self.calls(num_splits)
        return call_times(calls, repeats_within(calls[0], seconds / len(calls), self.q.device), self.q.device)


def _step(shape: LayerShape, batch: int, tokens: int, fp8: bool, device: torch.device) -> _Step | None:
    """Return the step, or None if its cache does not fit the memory that is free."""
    rank, rope_dim = shape.rank, shape.rope_dim
    turns = rotation(batch * tokens * _row_bytes(shape, fp8), device)
    if turns is None:
        return None
    caches = [make_cache(batch * tokens, rank, rope_dim, fp8=fp8, device=device, seed=i) for i in range(turns.caches)]
    generator = torch.Generator(device).manual_seed(1)
    table = torch.randperm(batch * tokens // PAGE, device=device, generator=generator).to(torch.int32).view(batch, -1)
    lengths = torch.full((batch,), tokens, dtype=torch.int32, device=device)
    q = torch.randn(batch, 1, shape.heads, rank + rope_dim, device=device, generator=generator).mul_(3.0)
    return _Step(q.to(torch.bfloat16), caches, table, lengths, rank, softmax_scale(rank, rope_dim), turns)


def _row_bytes(shape: LayerShape, fp8: bool) -> int:
    return fp8_layout(shape.rank, shape.rope_dim).row_bytes if fp8 else 2 * shape.latent_numbers


def _measure(shape: LayerShape, batch: int, tokens: int, fp8: bool, device: torch.device) -> dict[str, Any]:
    step = _step(shape, batch, tokens, fp8, device)
    if step is None:
        return {"skipped": "more than the free memory"}
    out, _ = step.calls()[0]()
    error = _error(out, step, tokens, shape)
    samples = step.times(TIMED_SECONDS)
    row_bytes = _row_bytes(shape, fp8)
    work = decode_work(shape, batch, tokens, row_bytes, element_bytes=2, page=PAGE)
    source_bytes = shape.source_numbers * 2
    launch = choose_launch(check_inputs(step.q, step.caches[0], step.table, step.lengths, shape.rank))
    return {
        "microseconds": Spread.of(samples).scaled(1e6),
        "bytes": work.nbytes,
        "flop": work.flop,
        "cache_row_bytes": row_bytes,
        "bytes_ratio": round(source_bytes / row_bytes, 3) if source_bytes else None,
        "tile": list(astuple(launch.tile)),
        "blocks_per_multiprocessor": launch.blocks_per_multiprocessor,
        "num_splits": launch.splits,
        "caches_in_turn": step.turns.caches,
        "together_exceed_l2": step.turns.exceeds_l2,
        "samples": len(samples),
        "relative_error_of_last_sequence": error,
        "timed_by": "CUDA graph replays" if device.type == "cuda" else "clock, no GPU",
    }


def _sweep(shape: LayerShape, batch: int, tokens: int, device: torch.device) -> dict[str, Any]:
    """Return microseconds of the bf16 cache for other numbers of splits: whether the choice is a good one."""
    step = _step(shape, batch, tokens, False, device)
    if step is None:
        return {"skipped": "more than the free memory"}
    most = max(1, tokens // PAGE)
    counts = [count for count in SWEPT_SPLITS if count <= most]
    return {"by_splits": {str(n): Spread.of(step.times(TIMED_SECONDS / 3, n)).scaled(1e6)["median"] for n in counts}}


def _error(out: Tensor, step: _Step, tokens: int, shape: LayerShape) -> float | None:
    """Relative error of the batch's last sequence at the timed shape, against float64 on the same device."""
    rows = step.caches[0][step.table[-1].long()].reshape(1, tokens, -1)
    if rows.dtype == torch.uint8:
        rows = dequantize_latent(rows, shape.rank, shape.rope_dim, torch.float64)
    lengths = torch.tensor([tokens], dtype=torch.int32)
    wanted, _ = reference_decode(step.q[-1:], rows, None, lengths, shape.rank, step.scale)
    return difference(out[-1:], wanted)["relative"]

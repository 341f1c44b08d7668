"""The two ceilings of a GPU, measured: how fast it moves bytes and how fast it multiplies."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.machine import describe_device
from benchmarks.timing import Spread, event_times

COPY_BYTES = 4 << 30
MATMUL_SIZES = (4096, 8192, 12288)
REPEATS = 15


def measure_ceilings(copy_bytes: int = COPY_BYTES, sizes: tuple[int, ...] = MATMUL_SIZES) -> dict[str, Any]:
    """Return bytes a second of a device-to-device copy (read and written), of a sum (read), and bf16 FLOP a second.

    Decoding reads nearly all of its bytes and writes next to none. The copy is the ceiling that others report and the
    one that floors are computed from; the sum shows what reading alone reaches through one of torch's own kernels, and
    is a lower bound.
    """
    copy_bytes = min(copy_bytes, torch.cuda.mem_get_info()[0] // 4)
    generator = torch.Generator("cuda").manual_seed(0)
    source = torch.randn(copy_bytes // 4, device="cuda", generator=generator)
    target = torch.empty_like(source)
    copied = Spread.of(event_times(lambda: target.copy_(source), REPEATS))
    summed = Spread.of(event_times(source.sum, REPEATS))
    del target
    rates = {str(size): _matmul_rate(size, generator) for size in sizes}
    return {
        "copy_bytes_per_s": 2 * source.nbytes / copied.median,
        "read_bytes_per_s": source.nbytes / summed.median,
        "bf16_flop_per_s": max(rates.values()),
        "bf16_flop_per_s_by_size": rates,
        "copied_bytes": source.nbytes,
        "device": describe_device(),
    }


def _matmul_rate(size: int, generator: torch.Generator) -> float:
    """FLOP a second of a square bf16 product of random numbers; zeros would run faster."""
    a, b = (torch.randn(size, size, device="cuda", generator=generator).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / Spread.of(event_times(lambda: torch.mm(a, b, out=out), REPEATS)).median

"""What this machine computes a second, measured."""

from __future__ import annotations

import time

import torch

_SIZE = 768


def matmul_rate(seconds: float = 0.3) -> float:
    """Return the floating-point operations a second of a float32 product of 768 rows, on torch's threads of the CPU.

    The fastest of the products that are made in that time counts, since other work only ever slows one down.
    """
    factor, product = torch.ones(_SIZE, _SIZE), torch.empty(_SIZE, _SIZE)
    best, deadline = float("inf"), time.perf_counter() + seconds
    while True:
        started = time.perf_counter()
        torch.mm(factor, factor, out=product)
        ended = time.perf_counter()
        best = min(best, ended - started)
        if ended > deadline:
            return 2.0 * _SIZE**3 / best

"""Torch SDPA on the keys and values of the unconverted layer: every backend that takes the shape, and the best."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.shapes import LayerShape
from benchmarks.timing import Spread, call_times, repeats_within

TIMED_SECONDS = 0.08
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
CPU_BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION}


def measure_sdpa(
    shape: LayerShape, batch: int, tokens: int, rotation: Callable[..., Any], device: torch.device
) -> dict[str, Any]:
    """Return microseconds of every form that ran, and the fastest, on contiguous bf16 caches [B, G, T, K].

    Two forms of each backend: ``gqa`` lets SDPA share the KV heads; ``rows`` gives a group's query heads as query rows,
    which is right for a single new token and reads each key once. ``matmul`` is two products and a softmax.
    """
    row_bytes = shape.source_numbers * 2
    turns = rotation(batch * tokens * row_bytes, device)
    if turns is None:
        return {"skipped": "more than the free memory"}
    caches = [_cache(shape, batch, tokens, device, seed) for seed in range(turns.caches)]
    generator = torch.Generator(device).manual_seed(1)
    q = torch.randn(batch, shape.heads, 1, shape.head_dim, device=device, generator=generator).to(torch.bfloat16)
    found: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for name, attend in _forms(q, shape).items():
        calls = [lambda k=k, v=v, attend=attend: attend(k, v) for k, v in caches]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                repeats = repeats_within(calls[0], TIMED_SECONDS / len(calls), device)
                found[name] = Spread.of(call_times(calls, repeats, device)).scaled(1e6)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    if not found:
        return {"error": "no form of SDPA ran", "not_run": failed}
    best = min(found, key=lambda name: found[name]["median"])
    return {
        "form": best,
        "microseconds": found[best],
        "bytes": batch * tokens * row_bytes,
        "caches_in_turn": turns.caches,
        "together_exceed_l2": turns.exceeds_l2,
        "all_forms": found,
        "not_run": failed,
    }


def _cache(shape: LayerShape, batch: int, tokens: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    rows = (batch, shape.kv_heads, tokens, shape.head_dim)
    key, value = (torch.empty(rows, dtype=torch.bfloat16, device=device).normal_(generator=generator) for _ in range(2))
    return key, value


def _forms(q: Tensor, shape: LayerShape) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    grouped = q.view(q.shape[0], shape.kv_heads, -1, shape.head_dim)
    forms: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}
    for name, backend in (BACKENDS if q.is_cuda else CPU_BACKENDS).items():

        def shared(key: Tensor, value: Tensor, backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, key, value, enable_gqa=True)

        def rows(key: Tensor, value: Tensor, backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(grouped, key, value)

        forms |= {f"{name} gqa": shared, f"{name} rows": rows}

    def products(key: Tensor, value: Tensor) -> Tensor:
        scores = torch.matmul(grouped, key.transpose(2, 3)) * shape.head_dim**-0.5
        return torch.matmul(torch.softmax(scores, dim=-1), value)

    return forms | {"matmul": products}

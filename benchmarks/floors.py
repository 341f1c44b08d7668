"""The floor of a decode step: its bytes at the copy's rate, or its products at the matmul's, whichever takes longer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.shapes import LayerShape

_NAMES = frozenset({"sdpa_of", "splits_of", "batch", "tokens"})


@dataclass(frozen=True)
class Work:
    """What one call must do at the least.

    Attributes:
        nbytes: each cached row once, the query once, the output, its LSE, lengths and block table once.
        flop: 2·B·H·T·(2C + R), the two products over the latent.
    """

    nbytes: int
    flop: int


def decode_work(shape: LayerShape, batch: int, tokens: int, row_bytes: int, element_bytes: int, page: int) -> Work:
    """Return the work of one new token for each of ``batch`` sequences of ``tokens`` tokens."""
    rows = batch * shape.heads
    query_and_output = rows * (shape.latent_numbers + shape.rank) * element_bytes + 4 * rows
    table = 4 * batch * (1 + -(-tokens // page))
    flop = 2 * rows * tokens * (2 * shape.rank + shape.rope_dim)
    return Work(batch * tokens * row_bytes + query_and_output + table, flop)


def add_floors(results: list[dict[str, Any]], ceilings: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the decode results with rates, the floor and the share of it that was reached, SDPA and splits beside."""
    beside: dict[str, dict[tuple[str, int, int], dict[str, Any]]] = {"sdpa": {}, "splits": {}}
    for kind, found in beside.items():
        for result in results:
            if shape := result.get(f"{kind}_of"):
                found[shape, result["batch"], result["tokens"]] = _without_names(result)
    joined = []
    for result in results:
        if "shape" in result:
            case = result["shape"], result["batch"], result["tokens"]
            found = {"sdpa": beside["sdpa"].get(case)}
            if result["cache"] == "bf16":
                found["splits"] = beside["splits"].get(case)
            joined.append(_with_floor(result | {name: value for name, value in found.items() if value}, ceilings))
    return joined


def _without_names(result: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name not in _NAMES}


def _with_floor(result: dict[str, Any], ceilings: dict[str, Any] | None) -> dict[str, Any]:
    if "microseconds" not in result:
        return result
    seconds = result["microseconds"]["median"] * 1e-6
    found = result | {
        "gbytes_per_s": _short(result["bytes"] / seconds / 1e9),
        "tflop_per_s": _short(result["flop"] / seconds / 1e12),
    }
    if (sdpa := result.get("sdpa")) and "microseconds" in sdpa:
        found["speedup_over_sdpa"] = _short(sdpa["microseconds"]["median"] * 1e-6 / seconds)
    if ceilings is None:
        return found
    moving = result["bytes"] / ceilings["copy_bytes_per_s"]
    multiplying = result["flop"] / ceilings["bf16_flop_per_s"]
    floor = max(moving, multiplying)
    return found | {
        "bound": "memory" if moving >= multiplying else "compute",
        "floor_microseconds": _short(floor * 1e6),
        "share_of_floor": _short(floor / seconds),
        "share_of_read_rate": _short(result["bytes"] / ceilings["read_bytes_per_s"] / seconds),
    }


def _short(value: float) -> float:
    return float(f"{value:.4g}")

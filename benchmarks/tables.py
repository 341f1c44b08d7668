"""The results as Markdown tables, as the README shows them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def render(content: dict[str, Any]) -> str:
    """Return the report's tables, errors last."""
    parts = [_machine(content["machine"])]
    if content["ceilings"]:
        parts.append(_ceilings(content["ceilings"]))
    if content["checks"]:
        parts.append(_checks(content["checks"]))
    if content["shapes"]:
        parts.append(_shapes(content["shapes"]))
    if content["layers"]:
        parts += [_layers(content["layers"]), _bars(content["bars"])]
    if content["model"]:
        parts.append(_model(content["model"]))
    parts += [f"error in {error['section']}: {error['error'].strip().splitlines()[-1]}" for error in content["errors"]]
    return "\n\n".join(part for part in parts if part)


def _machine(machine: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    gpu = machine["gpu"] or {}
    card = f"; {gpu['name']}, driver {gpu['driver_version']}" if "name" in gpu else ""
    return f"{machine['processor']}, {machine['cores']} cores, load {machine['load_average']}{card}; {versions}"


def _ceilings(found: dict[str, Any]) -> str:
    return (
        f"copy {found['copy_bytes_per_s'] / 1e12:.2f} TB/s (read and written), "
        f"sum {found['read_bytes_per_s'] / 1e12:.2f} TB/s (read), "
        f"bf16 matmul {found['bf16_flop_per_s'] / 1e12:.0f} TFLOP/s"
    )


def _checks(checks: list[dict[str, Any]]) -> str:
    ran = [check for check in checks if check["check"] != "not run"]
    left = sum(check["cases"] for check in checks if check["check"] == "not run")
    failed = [check for check in ran if not check["passed"]]
    rows = []
    for kind in ("float32", "float16", "bfloat16", "fp8"):
        of_kind = [c for c in ran if c.get("relative") is not None and (("fp8" if c["fp8"] else c["dtype"]) == kind)]
        if of_kind:
            worst = [
                max(c[name] for c in of_kind) for name in ("relative", "max_abs", "one_minus_cosine", "lse_max_abs")
            ]
            rows.append([kind, str(len(of_kind)), *(f"{value:.1e}" for value in worst)])
    table = _table(["inputs", "cases", "relative", "greatest", "1 − cosine", "LSE"], rows)
    others = [f"{c['check']}: {'passed' if c['passed'] else 'FAILED'}" for c in ran if c["check"] != "float64"]
    lines = [f"FAILED: {check}" for check in failed]
    summary = (
        f"correctness, worst of each: {len(ran) - len(failed)} of {len(ran)} passed, {left} not run for lack of time"
    )
    return "\n".join([summary, "", table, "", *others, *lines])


def _shapes(shapes: list[dict[str, Any]]) -> str:
    rows = []
    for found in shapes:
        name = [found["shape"], str(found["batch"]), f"{found['tokens'] // 1024}k", found["cache"]]
        if "microseconds" not in found:
            rows.append([*name, found.get("skipped") or found.get("error", "")[:60]])
            continue
        sdpa = found.get("sdpa", {})
        rows.append(
            [
                *name,
                _number(found["microseconds"]["median"]),
                _number(found.get("floor_microseconds")),
                _percent(found.get("share_of_floor")),
                found.get("bound", ""),
                _number(found["gbytes_per_s"]),
                _number(found["tflop_per_s"]),
                str(found["num_splits"]),
                _number((sdpa.get("microseconds") or {}).get("median")),
                sdpa.get("form", ""),
                _number(found.get("speedup_over_sdpa")),
                _number(found["bytes_ratio"]),
            ]
        )
    head = ["shape", "B", "T", "cache", "µs", "floor µs", "of floor", "bound", "GB/s", "TFLOP/s", "splits"]
    return _table([*head, "SDPA µs", "SDPA form", "speedup", "bytes ratio"], rows)


def _layers(layers: list[dict[str, Any]]) -> str:
    rows = []
    for found in layers:
        times, ratios = found["milliseconds"], found["ratios"]
        rows.append(
            [
                found["shape"],
                str(found["tokens"]),
                str(found["threads"]),
                found["part"],
                *(_number(times[name]["median"]) for name in ("absorbed", "expanding", found["stock_form"])),
                f"{_number(times[found['fastest_form']]['median'])} ({found['fastest_form']})",
                *(_spread(ratios[name]) for name in ("expanding", "source", "source_fastest")),
            ]
        )
    head = [
        "shape",
        "tokens",
        "threads",
        "part",
        "absorbed ms",
        "expanding ms",
        "source ms",
        "source's fastest form ms",
    ]
    return _table([*head, "expanding ÷ absorbed", "source ÷ absorbed", "fastest ÷ absorbed"], rows)


def _bars(bars: list[dict[str, Any]]) -> str:
    return "\n".join(
        f"bar: at least {bar['bar']} x {bar['against']}, measured {_spread(bar['measured'])}: "
        f"{'met' if bar['met'] else 'not met'}"
        for bar in bars
    )


def _model(results: list[dict[str, Any]]) -> str:
    rows = []
    for found in results:
        for name, speed in found["tokens_per_second"].items():
            ratio = found["speedup_over_source"].get(name)
            rows.append(
                [str(found["context"]), str(found["threads"]), name, _spread(speed), _spread(ratio) if ratio else "1"]
            )
    return _table(["context", "threads", "decoder", "tokens/s", "× source, DynamicCache"], rows)


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join([*row, *[""] * (len(head) - len(row))]) + " |" for row in rows)])


def _spread(spread: dict[str, float]) -> str:
    return f"{_number(spread['median'])} ({_number(spread['low'])}–{_number(spread['high'])})"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"

"""``mla-convert evaluate --tasks``: the figures of benchmark tasks, of one model or of two side by side."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mla_convert.cli._console import Screen
    from mla_convert.evaluate.tasks import TaskScore


def run_tasks(out: Screen, model: str, against: str | None, dtype: str, **options: Any) -> None:
    """Evaluate the tasks and show them."""
    import torch

    from mla_convert.errors import UsageError
    from mla_convert.evaluate import load_for_evaluation
    from mla_convert.evaluate.tasks import evaluate_tasks, harness_version

    loading = {name: options.pop(name) for name in ("revision", "token")}
    options["tasks"] = [name.strip() for given in options["tasks"] for name in given.split(",") if name.strip()]
    include: Path | None = options["include_path"]
    if not options["tasks"]:
        raise UsageError("--tasks names no task", "--tasks hellaswag, for example")
    if include is not None and not include.is_dir():
        raise UsageError(f"--include-path {include} is not a folder", "a folder of task files")
    version = harness_version()
    out.silence_loading()
    refs = [model] if against is None else [against, model]
    scores: list[tuple[TaskScore, ...]] = []
    for ref in refs:
        loaded, tokenizer = load_for_evaluation(ref, getattr(torch, dtype), **loading)
        scores.append(evaluate_tasks(loaded, tokenizer, **options))
    result: dict[str, Any] = {
        "model": model,
        "harness": version,
        "dtype": dtype,
        "limit": options["limit"],
        "tasks": [asdict(score) for score in scores[-1]],
    }
    if against is not None:
        result["against"] = {"source": against, "tasks": [asdict(score) for score in scores[0]]}
    out.result(result)
    titles = ("", model) if against is None else ("", f"before: {against}", f"after: {model}")
    rows = [
        (f"{alike[0].task} {alike[0].metric}", *(_figure(score) for score in alike))
        for alike in zip(*scores, strict=True)
    ]
    limited = "" if options["limit"] is None else f", the first {options['limit']} documents of each task only"
    out.table(f"lm-evaluation-harness {version}{limited}", titles, rows)


def _figure(score: TaskScore) -> str:
    return f"{score.value:.4f}" + ("" if score.error is None else f" ± {score.error:.4f}")

"""Benchmark tasks of the lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness), an extra."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from mla_convert.errors import SourceError, UsageError

INSTALL = "pip install 'mla-convert[tasks]'"


@dataclass(frozen=True)
class TaskScore:
    """One figure of one task.

    Attributes:
        task: its name; groups of tasks are listed with their members.
        metric: such as ``acc`` or ``acc_norm``; with the filter after a comma where it is not ``none``.
        value: of the model.
        error: the standard error, where the harness gives one.
        version: the task's, which a figure cannot be compared without.
        samples: how many documents were asked.
    """

    task: str
    metric: str
    value: float
    error: float | None
    version: str
    samples: int | None


def harness_version() -> str:
    """Return the version of the harness.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return metadata.version("lm_eval")
    except metadata.PackageNotFoundError as error:
        raise UsageError("--tasks needs the lm-evaluation-harness, which is not installed", INSTALL) from error


def evaluate_tasks(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    include_path: Path | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 1,
) -> tuple[TaskScore, ...]:
    """Return the harness's figures for a model in memory, in the order of the tasks.

    Args:
        tasks: names that the harness knows, or that task files in ``include_path`` define.
        include_path: a folder of task files (YAML); tasks whose data is local need no network.
        limit: ask this many documents of each task, the first ones; for trying out, not for reporting.
        num_fewshot: examples before each question; None for each task's own.

    Raises:
        UsageError: the harness is not installed, or knows no such task.
        SourceError: a task's data cannot be loaded.
    """
    harness_version()
    # An extra, and typed too loosely to be checked against.
    harness: Any = import_module("lm_eval")
    models: Any = import_module("lm_eval.models.huggingface")
    known: Any = import_module("lm_eval.tasks")

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = known.TaskManager(include_path=None if include_path is None else str(include_path))
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        where = "" if include_path is None else f", nor does {include_path} define it"
        raise UsageError(
            f"the lm-evaluation-harness knows no task {', '.join(unknown)}{where}", "`lm_eval ls tasks` lists them"
        )
    asked = models.HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size)
    try:
        results = harness.simple_evaluate(
            model=asked,
            tasks=list(tasks),
            num_fewshot=num_fewshot,
            limit=limit,
            task_manager=manager,
            log_samples=False,
        )
    except Exception as error:  # task files bring code of their own, which raises errors of no common kind
        said = " ".join(str(error).split()) or type(error).__name__
        raise SourceError(
            f"a task cannot be evaluated: {said}", "check the task's data and the network; see its YAML file"
        ) from error
    return _scores(results)


def _scores(results: Mapping[str, Any]) -> tuple[TaskScore, ...]:
    found: list[TaskScore] = []
    for task, figures in results["results"].items():
        samples = results.get("n-samples", {}).get(task, {}).get("effective")
        version = str(results.get("versions", {}).get(task, ""))
        for key, value in figures.items():
            name, _, kept_by = key.partition(",")
            if name.endswith("_stderr") or not isinstance(value, int | float) or isinstance(value, bool) or not kept_by:
                continue
            error = figures.get(f"{name}_stderr,{kept_by}")
            metric = name if kept_by == "none" else f"{name},{kept_by}"
            stated = float(error) if isinstance(error, int | float) else None
            found.append(TaskScore(str(task), metric, float(value), stated, version, samples))
    return tuple(found)

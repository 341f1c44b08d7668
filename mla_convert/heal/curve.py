"""The loss curve of a run: as JSON lines, and as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mla_convert.errors import OutputError
from mla_convert.record import LOSS_NAME

PNG_NAME = "loss.png"


@dataclass(frozen=True)
class CurvePoint:
    """One optimiser step.

    Attributes:
        step: steps made.
        tokens: tokens trained on so far.
        loss: of this step's windows before its update; None before the first.
        learning_rate: of this step.
        held_out: KL(teacher || student) on the held-out windows after it, nats a token, where it was measured.
    """

    step: int
    tokens: int
    loss: float | None
    learning_rate: float
    held_out: float | None = None


def write_curve(folder: Path, curve: Sequence[CurvePoint]) -> None:
    """Write ``loss.jsonl``, a line a point, and ``loss.png``, into ``folder``.

    Raises:
        OutputError: a file cannot be written.
    """
    lines = [json.dumps(asdict(point)) for point in curve]
    try:
        (folder / LOSS_NAME).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        _draw(folder / PNG_NAME, curve)
    except OSError as error:
        raise OutputError(
            f"the loss curve cannot be written to {folder}: {error.strerror or error}", "free some disk space"
        ) from error


def _draw(path: Path, curve: Sequence[CurvePoint]) -> None:
    """Draw both losses over tokens, on a logarithmic axis."""
    from matplotlib.figure import Figure

    # Figure alone has no window and no state shared with other figures, unlike pyplot.
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    trained = [(point.tokens, point.loss) for point in curve if point.loss is not None]
    measured = [(point.tokens, point.held_out) for point in curve if point.held_out is not None]
    if trained:
        axes.plot(*zip(*trained, strict=True), linewidth=0.8, alpha=0.6, label="training windows")
    if measured:
        axes.plot(*zip(*measured, strict=True), marker="o", label="held-out windows")
    if any(value > 0 for _, value in trained + measured):
        axes.set_yscale("log")
    axes.set_xlabel("tokens trained on")
    axes.set_ylabel("loss (nats a token)")
    if trained or measured:
        axes.legend()
    figure.savefig(path, dpi=150)

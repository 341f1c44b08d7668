"""All that a report shows, read from a converted folder: the record, the layers' details and the loss curve."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from mla_convert.errors import SourceError
from mla_convert.record import LOSS_NAME, RECORD_NAME, json_safe
from mla_convert.report.details import LayerDetails, ReportDetails

JSON_NAME = "report.json"
SCHEMA_VERSION = 1
# Training losses are one a step; this many means of neighbouring steps show the course.
_LOSS_POINTS = 200

logger = logging.getLogger(__name__)

_REMEDY = "name a folder that convert or heal wrote"


@dataclass(frozen=True)
class ReportData:
    """What a report is made from.

    Attributes:
        record: conversion.json.
        details: of the layers; None where nothing is known of them.
        training_loss: (step, mean loss around it) of the last distillation, where its curve lies in the folder.
    """

    record: Mapping[str, Any]
    details: ReportDetails | None = None
    training_loss: tuple[tuple[float, float], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return report.json: plain JSON values."""
        stored = {
            "schema_version": SCHEMA_VERSION,
            "conversion": self.record,
            "details": None if self.details is None else asdict(self.details),
            "training_loss": self.training_loss,
        }
        return json_safe(stored)


def read_record(folder: Path) -> dict[str, Any]:
    """Return a folder's conversion.json.

    Raises:
        SourceError: there is none, or it is none of this project's.
    """
    path = folder / RECORD_NAME
    if not path.is_file():
        raise SourceError(f"{folder} has no {RECORD_NAME}", _REMEDY)
    record = _read(path)
    if not isinstance(record, dict) or not {"source", "plan", "recipe", "format"} <= set(record):
        raise SourceError(f"{path} is not the record of a conversion", _REMEDY)
    return record


def read_data(folder: Path, details: ReportDetails | None = None) -> ReportData:
    """Return what a folder's report shows.

    Args:
        details: of the layers; for None those of the report.json that is there, else what config.json says of slots.

    Raises:
        SourceError: the folder has no readable conversion.json, config.json or loss curve.
    """
    record = read_record(folder)
    if details is None:
        details = _kept_details(folder) or _slots_alone(folder)
    return ReportData(record, details, _training_loss(folder))


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} cannot be read: {error}", _REMEDY) from error


def _kept_details(folder: Path) -> ReportDetails | None:
    path = folder / JSON_NAME
    if not path.is_file():
        return None
    try:
        kept = _read(path)["details"]
        return None if kept is None else ReportDetails.read(kept)
    except (SourceError, KeyError, TypeError) as error:
        # What asked for a report may have worked for hours; without these it lacks the spectra and nothing else.
        logger.warning("the report is made without what %s should say of spectra: %s", path, error)
        return None


def _slots_alone(folder: Path) -> ReportDetails | None:
    """What config.json says of RoPE slots: the frequencies that any layer has are taken for the source's pairs."""
    path = folder / "config.json"
    config = _read(path) if path.is_file() else {}
    rows: Sequence[Sequence[float]] | None = config.get("rope_inv_freq")
    if not rows:
        return None
    frequencies = sorted({frequency for row in rows for frequency in row if frequency > 0}, reverse=True)
    layers = tuple(LayerDetails((), (), tuple(list(row).count(f) for f in frequencies)) for row in rows)
    return ReportDetails(layers, (tuple(frequencies),))


def _training_loss(folder: Path) -> tuple[tuple[float, float], ...]:
    """The training losses of a distillation as means of neighbouring steps: (mean step, mean loss)."""
    path = folder / LOSS_NAME
    if not path.is_file():
        return ()
    try:
        points = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        losses = [(point["step"], point["loss"]) for point in points if point["loss"] is not None]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{path} cannot be read: {error}", f"move it away from {folder}") from error
    count = min(len(losses), _LOSS_POINTS)
    edges = [len(losses) * i // count for i in range(count + 1)] if count else []
    bins = (losses[start:end] for start, end in pairwise(edges))
    return tuple((sum(s for s, _ in part) / len(part), sum(x for _, x in part) / len(part)) for part in bins)

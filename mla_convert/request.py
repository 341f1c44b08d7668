"""What a conversion is asked for, and what can be checked of it before any long work."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mla_convert.calibrate.statistics import Statistics, load_statistics
from mla_convert.calibrate.statistics_file import is_statistics
from mla_convert.devices import computing_devices
from mla_convert.errors import StatisticsError, UsageError
from mla_convert.plan import ConversionPlan
from mla_convert.recipe import Recipe
from mla_convert.sources import Source
from mla_convert.spec import OutputFormat, StockRope

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ConvertRequest:
    """What the user asked for; see ``mla-convert convert --help`` for each field."""

    source: str
    out: Path
    recipe: str = "default"
    overrides: tuple[str, ...] = ()
    cache: float | None = None
    kv_rank: int | None = None
    rope_dim: int | None = None
    format: OutputFormat = "native"
    stock_rope: StockRope = "default"
    calibration: tuple[str, ...] = ()
    calibration_tokens: int | None = None
    seed: int = 0
    dtype: str | None = None
    overwrite: bool = False
    revision: str | None = None
    token: str | None = None
    statistics: Path | None = None
    save_statistics: Path | None = None
    max_shard_size: str = "5GB"
    low_memory: bool | None = None
    devices: tuple[str, ...] = ()


def check_request(request: ConvertRequest, planned: ConversionPlan) -> None:
    """Check files and options against each other and the recipe.

    Raises:
        UsageError: they contradict each other, or a file that is read or kept is one that would be replaced.
    """
    recipe = planned.recipe
    computing_devices(request.devices)
    _check_files(request, recipe)
    if request.statistics is None:
        return
    reads = "refits" if recipe.refits else "heals" if recipe.heal is not None else None
    if reads is not None and not request.calibration:
        raise UsageError(
            f"the recipe {recipe.name} {reads} on text, and --statistics holds none",
            "name the text with --calibration, besides",
        )
    if reads is None and request.calibration:
        logger.warning("--calibration is not read: the recipe %s needs --statistics only", recipe.name)


def given_statistics(path: Path, source: Source, recipe: Recipe) -> Statistics:
    """Return the statistics in a file.

    Raises:
        StatisticsError: it cannot be read, or is not of this source or not what the recipe needs.
    """
    given = load_statistics(path)
    given.check(source.digests(), source.spec, gradients=recipe.needs_gradients, held_out=recipe.needs_held_out)
    return given


def _check_files(request: ConvertRequest, recipe: Recipe) -> None:
    """Check that no file the run reads or keeps is one that it would replace.

    Raises:
        UsageError: one is, or an option asks for statistics that the run does not collect.
    """
    out, source = Path(request.out).resolve(), Path(request.source).resolve()
    read_or_kept: dict[str, str | Path | None] = {
        **{f"the calibration text {ref}": ref for ref in request.calibration},
        "the source": request.source,
        "--statistics": request.statistics,
        "--save-statistics": request.save_statistics,
    }
    for name, path in read_or_kept.items():
        if path is None or not (Path(path).exists() or name == "--save-statistics"):
            continue
        if Path(path).resolve() == out or out in Path(path).resolve().parents:
            raise UsageError(f"{name} {path} lies in the output folder {request.out}", "choose another folder")
    saved = request.save_statistics
    if saved is None:
        return
    if recipe.calibration is None or request.statistics is not None:
        raise UsageError("--save-statistics, but this run collects none", "leave it out")
    if source in saved.resolve().parents:
        raise UsageError(f"--save-statistics {saved} lies in the source", "choose another place")
    if saved.is_dir() or (saved.exists() and not is_statistics(saved)):
        raise UsageError(f"--save-statistics {saved} exists and is not a file of statistics", "choose another name")
    folder = next(above for above in saved.absolute().parents if above.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise StatisticsError(
            f"--save-statistics {saved} cannot be written: {error.strerror or error}", "choose another place"
        ) from error

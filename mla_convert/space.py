"""Whether a disk has room for a conversion, before its work begins.

A conversion of hours that ends on a full disk could have been refused at once: what it writes follows from sizes. It is
refused only where it certainly would end so. What is counted is a little less than what is written
(:mod:`mla_convert.scratch`); what an interrupted run has left, which this one goes on from or replaces, takes no more
room; and where all depends on how many tokens of text there are, they are counted.
"""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from mla_convert.calibration import Places, calibration_contexts, low_memory
from mla_convert.errors import OutputError
from mla_convert.estimate import output_bytes
from mla_convert.plan import ConversionPlan
from mla_convert.request import ConvertRequest
from mla_convert.scratch import Tokens, layer_statistics, scratch, tokens_in, tokens_of
from mla_convert.sources import Source

_ROOM = "free some disk space, or choose an OUT on another disk"


def check_space(request: ConvertRequest, planned: ConversionPlan, source: Source) -> None:
    """Check that the disk of ``request.out`` has room for it, and for what lies beside it until it is written.

    Raises:
        OutputError: it has not.
        TextError: the text of calibration cannot be read, or is too short.
    """
    target = Path(os.path.realpath(request.out))
    written = output_bytes(planned, request.dtype or source.spec.dtype)
    place, beside = _existing(target.parent), _existing(request.out.parent)
    # What a killed run was writing is removed before this one writes, but after it has calibrated.
    staged = _taken(place.glob(f".{glob.escape(target.name)}.partial-*"))
    room = _free(place) + staged
    if written > room:
        smaller = "" if request.dtype in ("bfloat16", "float16") else ", or give --dtype bfloat16"
        raise OutputError(f"{place} has {_gb(room)} free, and the output takes {_gb(written)}", _ROOM + smaller)
    if place.stat().st_dev != beside.stat().st_dev:  # OUT is a link that leads elsewhere
        written, staged, room = 0, 0, _free(beside)
    places = Places.beside(request.out)
    left = [places.statistics, *places.layers.glob("*")]
    room += _taken(file for file in left if ".partial-" not in file.name)
    by_layer, done = low_memory(request, source), len(list(places.layers.glob("statistics.*.safetensors")))

    def lack(tokens: Tokens) -> str | None:
        """What does not fit, as a sentence; None if all does."""
        kept = scratch(planned, tokens, by_layer=by_layer, calibrates=request.statistics is None)
        if written + kept.writing > room:
            return (
                f"{beside} has room for {_gb(room)}, and the output takes {_gb(written)} and what is kept beside it "
                f"until it is written {_gb(kept.writing)}"
            )
        hidden, now = kept.calibrating(min(done, kept.layers)), room - staged
        if hidden > now:
            return f"{beside} has room for {_gb(now)}, and what calibration keeps takes {_gb(hidden)}"
        return None

    wanted = tokens_of(planned, request.calibration_tokens, max(1, len(request.calibration)))
    without, calibration = lack(Tokens(0, 0, 0, 0)), planned.recipe.calibration
    lacking = without or lack(wanted)
    if lacking and not without and calibration is not None:  # a matter of tokens, of which a text may have fewer
        asked = request.calibration_tokens or calibration.tokens
        contexts, _ = calibration_contexts(request, source, planned.recipe, asked)
        lacking = lack(tokens_in(planned, *contexts.shape, refit=wanted.refit))
    if request.save_statistics is not None:
        folder, size = _existing(request.save_statistics.parent), planned.source.num_layers * layer_statistics(planned)
        if size > (free := _free(folder) + _taken([request.save_statistics])):
            raise OutputError(
                f"{folder} has {_gb(free)} free, and the statistics to save take {_gb(size)}",
                "free some disk space, or choose another place for --save-statistics",
            )
    if lacking is not None:
        fewer = "" if without else ", or calibrate on fewer tokens (--calibration-tokens)"
        raise OutputError(lacking, _ROOM + fewer)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    folder = folder.absolute()
    return next(above for above in (folder, *folder.parents) if above.is_dir())


def _free(folder: Path) -> float:
    """Bytes free for this user; without end where the file system does not say."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return float("inf")
    return usage.free if usage.total else float("inf")


def _taken(paths: Iterable[Path]) -> int:
    """Bytes on the disk of files, and of those in folders."""
    total = 0
    for path in paths:
        for file in path.rglob("*") if path.is_dir() else (path,):
            try:
                found = file.stat()
            except OSError:
                continue
            total += getattr(found, "st_blocks", found.st_size // 512) * 512  # of a file with holes what is there
    return total


def _gb(size: float) -> str:
    return f"{size / 1e9:.4g} GB"

"""A recipe from its first stage to its last: the conversion, and the healing that it asks for after it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mla_convert import __version__
from mla_convert.calibrate.text import BUILTIN_TEXT, read_text
from mla_convert.errors import OutputError, TextError, UsageError
from mla_convert.export.folder import check_output, sole_run
from mla_convert.heal.distil_settings import DistilSettings
from mla_convert.heal.healing import HealRequest, TextSettings, heal, text_of, work_folder
from mla_convert.heal.layers import LayerSettings
from mla_convert.pipeline import convert, plan
from mla_convert.plan import ConversionPlan
from mla_convert.progress import Progress, silent
from mla_convert.recipe import Recipe
from mla_convert.record import RECORD_NAME
from mla_convert.request import ConvertRequest, check_request, given_statistics
from mla_convert.sources import open_source

log = logging.getLogger(__name__)

_REQUEST = "request.json"
# What a conversion keeps beside its output, which another request may still use.
_DONE = frozenset({".converted.calibration.safetensors", ".converted.layers"})
_ANY = 10**9
_SHORT = "give a longer text, or another one with a second --calibration, or a recipe that heals on fewer tokens"


def convert_and_heal(
    request: ConvertRequest, progress: Progress | None = None, *, bf16: bool = False
) -> dict[str, Any]:
    """Convert and heal as the recipe says, write ``request.out`` and return what its conversion.json says.

    Stages lie in a folder beside the output, ``.NAME.stages``, until the output is there: the same call goes on with
    the one that was interrupted. Stages of another request are removed, but for a calibration. Every stage writes its
    weights in the output's dtype, and the next one reads them.

    Args:
        bf16: heal in bfloat16.

    Raises:
        MLAConvertError: anything the project expects to go wrong; nothing is left at ``request.out`` then.
    """
    progress = progress or silent
    planned = plan(request)
    recipe = planned.recipe
    if recipe.heal is None:
        with sole_run(request.out, "convert"):
            return convert(request, progress)
    if planned.format != "native":
        raise UsageError(
            f"the recipe {recipe.name} heals, which the {planned.format} format does not allow",
            "take --format native, or a recipe without a heal section",
        )
    check_output(request.out, overwrite=request.overwrite)
    check_request(request, planned)
    if request.statistics is not None and recipe.calibration is not None:
        given_statistics(request.statistics, open_source(request.source, revision=request.revision), recipe)
    stages = _healings(request, planned, bf16)
    with sole_run(request.out, "stages"):
        out = request.out.resolve()
        work = out.with_name(f".{out.name}.stages")
        _claim(work, _key(request, recipe, bf16), out)
        folder = work / "converted"
        try:
            if not folder.exists():
                convert(replace(request, out=folder, overwrite=False), progress)
        finally:
            if work.is_dir() and [path.name for path in work.iterdir()] == [_REQUEST]:  # nothing to go on with
                shutil.rmtree(work, ignore_errors=True)
        for i, (name, stage) in enumerate(stages):
            last = i == len(stages) - 1
            target = request.out if last else work / name
            if last or not target.exists():
                heal(stage(folder, target, last and request.overwrite), progress)
            folder = target
        _remove(work)
    return json.loads((request.out / RECORD_NAME).read_text(encoding="utf-8"))


_Stage = tuple[str, Callable[[Path, Path, bool], HealRequest]]


def _healings(request: ConvertRequest, planned: ConversionPlan, bf16: bool) -> list[_Stage]:
    """The stages of healing in their order, each to be told its model, its output and whether that is replaced.

    Raises:
        TextError: a text cannot be read, or is too short for what a stage trains on.
    """
    recipe = planned.recipe.heal
    assert recipe is not None
    tokenizer = open_source(request.source, revision=request.revision, token=request.token).load_tokenizer()
    texts, seed = request.calibration or (BUILTIN_TEXT,), request.seed
    context = min(recipe.context, planned.source.max_position_embeddings)
    common: dict[str, Any] = {
        "teacher": request.source,
        "texts": texts,
        "revision": request.revision,
        "token": request.token,
    }
    found: list[tuple[str, HealRequest]] = []
    if (local := recipe.layers) is not None:
        # Contexts are drawn anew at every step: a text of any length will do.
        text = TextSettings(tokens=local.tokens, passes=_ANY, context=context, seed=seed)
        layers = LayerSettings(
            steps=local.steps, batch=local.batch, learning_rate=local.learning_rate, bf16=bf16, seed=seed
        )
        found.append(("layers", HealRequest(Path(), Path(), stage="layers", text=text, layers=layers, **common)))
    if (whole := recipe.whole) is not None:
        text = TextSettings(tokens=whole.tokens, passes=whole.passes, context=context, seed=seed)
        distil = DistilSettings(learning_rate=whole.learning_rate, accumulate=whole.batch, bf16=bf16, seed=seed)
        found.append(("global", HealRequest(Path(), Path(), stage="global", text=text, distil=distil, **common)))

    # What one stage checks itself on, no other trains on: all hold out as much as the one that holds out most.
    try:
        held_out = max(len(text_of(stage, tokenizer).held_out) for _, stage in found) // len(texts)
        found = [(name, replace(stage, text=replace(stage.text, held_out=held_out))) for name, stage in found]
        for _, stage in found:
            text_of(stage, tokenizer)
    except TextError as error:
        raise TextError(error.message, _SHORT) from error
    return [(name, partial(_placed, stage)) for name, stage in found]


def _placed(stage: HealRequest, model: Path, out: Path, overwrite: bool) -> HealRequest:
    return replace(stage, model=model, out=out, overwrite=overwrite)


def _key(request: ConvertRequest, recipe: Recipe, bf16: bool) -> dict[str, Any]:
    """What the stages of an interrupted run depend on, digests of source and texts included; plain JSON values."""
    source = open_source(request.source, revision=request.revision, token=request.token)
    texts = [read_text(ref) for ref in request.calibration or (BUILTIN_TEXT,)]
    shown = {name: str(value) for name, value in vars(request).items() if name not in ("out", "overwrite", "token")}
    return {
        "version": __version__,
        "request": shown,
        "recipe": recipe.to_dict(),
        "bf16": bf16,
        "source": dict(source.digests()),
        "statistics": None if request.statistics is None else _digest(request.statistics),
        "texts": [text.digest for text in texts],
    }


def _digest(path: Path) -> str | None:
    """SHA-256 of a file; None where it cannot be read, which the conversion says better."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def _claim(work: Path, key: dict[str, Any], out: Path) -> None:
    """Make the folder of the stages, or keep it if it is of the same request.

    Raises:
        OutputError: it cannot be made, or is something else.
    """
    written = json.dumps(key, indent=2, sort_keys=True)
    path = work / _REQUEST
    if os.path.lexists(work) and not path.is_file() and not _is_rest(work):
        raise OutputError(f"{work} is in the way, and was not written by mla-convert", "move it, or choose another OUT")
    try:
        if path.is_file() and path.read_text(encoding="utf-8") == written:
            log.info("going on with the stages in %s", work)
            return
        if work.exists():
            log.info("removing %s, stages of another run", work)
            for entry in work.iterdir():
                if entry.name in _DONE:
                    continue
                if entry.is_dir():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
        shutil.rmtree(work_folder(out), ignore_errors=True)
        work.mkdir(parents=True, exist_ok=True)
        path.write_text(written, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write {work}: {error.strerror or error}", "choose another output folder") from error


def _is_rest(work: Path) -> bool:
    """Whether a folder is what is left of stages that were being removed."""
    return work.is_dir() and {path.name for path in work.iterdir()} <= _DONE | {"converted", "layers"}


def _remove(work: Path) -> None:
    """Remove the stages; first what says whose they are, so that a part of them is never taken up."""
    with suppress(OSError):
        (work / _REQUEST).unlink()
    shutil.rmtree(work, ignore_errors=True)

"""A recipe from its first stage to its last: the conversion, and the healing that it asks for after it."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mla_convert import __version__
from mla_convert.calibrate.text import BUILTIN_TEXT, read_text
from mla_convert.errors import OutputError, UsageError
from mla_convert.export.folder import check_output
from mla_convert.heal.data import healing_text
from mla_convert.heal.distil_settings import DistilSettings
from mla_convert.heal.healing import HealRequest, TextSettings, heal
from mla_convert.heal.layers import LayerSettings
from mla_convert.pipeline import ConvertRequest, convert, plan
from mla_convert.progress import Progress, silent
from mla_convert.recipe import Recipe
from mla_convert.record import RECORD_NAME
from mla_convert.sources import open_source

log = logging.getLogger(__name__)

_REQUEST = "request.json"


def convert_and_heal(
    request: ConvertRequest, progress: Progress | None = None, *, bf16: bool = False
) -> dict[str, Any]:
    """Convert and heal as the recipe says, write ``request.out`` and return what its conversion.json says.

    Stages lie in a folder beside the output, ``.NAME.stages``, until the output is there: the same call goes on with
    the one that was interrupted. Stages of another request are removed.

    Args:
        bf16: heal in bfloat16.

    Raises:
        MLAConvertError: anything the project expects to go wrong; nothing is left at ``request.out`` then.
    """
    progress = progress or silent
    planned = plan(request)
    recipe = planned.recipe
    stages = _healings(request, recipe, bf16)
    if not stages:
        return convert(request, progress)
    if planned.format != "native":
        raise UsageError(
            f"the recipe {recipe.name} heals, which the {planned.format} format does not allow",
            "take --format native, or a recipe without a heal section",
        )
    check_output(request.out, overwrite=request.overwrite)
    _check_texts(request, recipe)
    out = request.out.resolve()
    work = out.with_name(f".{out.name}.stages")
    _claim(work, _key(request, recipe, bf16))
    folder = work / "converted"
    try:
        if not folder.exists():
            convert(replace(request, out=folder, overwrite=False), progress)
    finally:
        if [path.name for path in work.iterdir()] == [_REQUEST]:  # nothing to go on with
            shutil.rmtree(work, ignore_errors=True)
    for i, (name, stage) in enumerate(stages):
        last = i == len(stages) - 1
        target = request.out if last else work / name
        if last or not target.exists():
            heal(stage(folder, target, last and request.overwrite), progress)
        folder = target
    shutil.rmtree(work, ignore_errors=True)
    return json.loads((request.out / RECORD_NAME).read_text(encoding="utf-8"))


def _check_texts(request: ConvertRequest, recipe: Recipe) -> None:
    """Check before the conversion that the texts have what the stages after it train on.

    Raises:
        TextError: they do not.
    """
    tokenizer = open_source(request.source, revision=request.revision, token=request.token).load_tokenizer()
    for _, stage in _healings(request, recipe, bf16=False):
        wanted = stage(Path(), Path(), False)
        healing_text(
            tokenizer,
            wanted.texts,
            context=wanted.text.context,
            tokens=wanted.text.tokens,
            held_out_share=wanted.text.held_out_share,
            seed=wanted.text.seed,
            passes=wanted.text.passes,
        )


_Stage = tuple[str, Callable[[Path, Path, bool], HealRequest]]


def _healings(request: ConvertRequest, recipe: Recipe, bf16: bool) -> list[_Stage]:
    """The stages of healing in their order, each to be told its model, its output and whether that is replaced."""
    if recipe.heal is None:
        return []
    texts, context, seed = request.calibration or (BUILTIN_TEXT,), recipe.heal.context, request.seed
    common: dict[str, Any] = {
        "teacher": request.source,
        "texts": texts,
        "revision": request.revision,
        "token": request.token,
    }
    found: list[_Stage] = []
    if (local := recipe.heal.layers) is not None:
        text = TextSettings(tokens=local.tokens, passes=local.passes, context=context, seed=seed)
        layers = LayerSettings(
            steps=local.steps, batch=local.batch, learning_rate=local.learning_rate, bf16=bf16, seed=seed
        )

        def heal_layers(model: Path, out: Path, overwrite: bool) -> HealRequest:
            return HealRequest(model, out, stage="layers", text=text, layers=layers, overwrite=overwrite, **common)

        found.append(("layers", heal_layers))
    if (whole := recipe.heal.whole) is not None:
        whole_text = TextSettings(tokens=whole.tokens, passes=whole.passes, context=context, seed=seed)
        distil = DistilSettings(learning_rate=whole.learning_rate, accumulate=whole.batch, bf16=bf16, seed=seed)

        def heal_whole(model: Path, out: Path, overwrite: bool) -> HealRequest:
            return HealRequest(
                model, out, stage="global", text=whole_text, distil=distil, overwrite=overwrite, **common
            )

        found.append(("global", heal_whole))
    return found


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


def _claim(work: Path, key: dict[str, Any]) -> None:
    """Make the folder of the stages, or keep it if it is of the same request.

    Raises:
        OutputError: it cannot be made.
    """
    written = json.dumps(key, indent=2, sort_keys=True)
    path = work / _REQUEST
    try:
        if path.is_file() and path.read_text(encoding="utf-8") == written:
            log.info("going on with the stages in %s", work)
            return
        if work.exists():
            log.info("removing %s, stages of another run", work)
            shutil.rmtree(work)
        work.mkdir(parents=True)
        path.write_text(written, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write {work}: {error.strerror or error}", "choose another output folder") from error

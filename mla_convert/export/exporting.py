"""``mla-convert export``: plan, write, ask the engine, and only then let the folder appear."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

from mla_convert.calibrate.text import BUILTIN_TEXT, read_text
from mla_convert.card import CARD_NAME, model_card
from mla_convert.errors import FormatError, SourceError, UsageError, VerificationError
from mla_convert.export.converted import ConvertedModel
from mla_convert.export.custom import unwindowed_positions
from mla_convert.export.folder import check_output, staged_folder
from mla_convert.export.shards import parse_size
from mla_convert.export.targets.registry import TARGETS, target_named
from mla_convert.export.targets.target import ExportOptions, ExportPlan
from mla_convert.export.verify.checking import Reference, Verdict, check, save_reference
from mla_convert.export.verify.engines import engine_named, installed_version
from mla_convert.export.verify.reference import make_probe, reference_answers
from mla_convert.progress import Progress, silent
from mla_convert.record import RECORD_NAME, json_safe

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Exported:
    """What :func:`export_model` did.

    Attributes:
        plan: what was written.
        verdict: what the engine made of it; None where nothing was asked.
    """

    plan: ExportPlan
    verdict: Verdict | None


def plan_exports(model: ConvertedModel, options: ExportOptions, target: str | None = None) -> tuple[ExportPlan, ...]:
    """Return what each target, or the one named, would write; no weight is read.

    Raises:
        UsageError: there is no such target.
    """
    targets = TARGETS.values() if target is None else (target_named(target),)
    return tuple(one.plan(model, options) for one in targets)


def export_model(
    model: ConvertedModel,
    out: Path,
    target: str,
    options: ExportOptions,
    *,
    verify: bool = True,
    python: Path | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write ``model`` for a target into ``out``, which appears whole and verified or not at all.

    Args:
        verify: have an engine load the folder and answer as the model does: the target's own where it is installed,
            else transformers where it can load the form. Without it nothing is asked, and the record says so.
        python: the interpreter of the environment in which the target's engine is installed; None for this one.

    Raises:
        FormatError: the target cannot hold the model, with the reasons.
        VerificationError: the engine answers otherwise. What was written is kept as ``out`` with ``.rejected`` added.
            So where the engine does not load it.
        OutputError: ``out`` exists, or cannot be written.
        SourceError: the model's tokenizer or conversion.json cannot be read, or it answers with no finite numbers.
        UsageError: there is no such target, or ``out`` would replace the model itself.
    """
    report = progress or silent
    plan = check_export(model, out, target, options, verify=verify, python=python, overwrite=overwrite)
    chosen = target_named(target)
    record, tokenizer = _read_record(model, plan), model.load_tokenizer()
    with staged_folder(out, overwrite) as folder:
        chosen.write(model, plan, options, folder, report)
        verdict = None
        if verify:
            report("verification", 0, 1)
            reference = _reference(model, tokenizer, folder, plan)
            save_reference(folder, reference)
            try:
                verdict = _ask(folder, plan, reference, python)
            except VerificationError as error:
                _write_record(record, folder, plan, None)
                kept = _keep_rejected(folder, out)
                raise VerificationError(
                    error.message.replace(str(folder), str(kept)),
                    f"file an issue with the conversion.json of {kept}, where what was written is kept; {out} was not "
                    "made",
                ) from error
            report("verification", 1, 1)
        _write_record(record, folder, plan, verdict)
        if verdict is not None and not verdict.passed:
            kept = _keep_rejected(folder, out)
            raise VerificationError(
                f"the export does not answer as the model does. {verdict.sentence()}",
                f"file an issue with the conversion.json of {kept}, where what was written is kept; {out} was not made",
            )
    return Exported(plan, verdict)


def check_export(
    model: ConvertedModel,
    out: Path,
    target: str,
    options: ExportOptions,
    *,
    verify: bool = True,
    python: Path | None = None,
    overwrite: bool = False,
) -> ExportPlan:
    """Return what :func:`export_model` would write, once all is checked that can be before a weight is read.

    Raises:
        MLAConvertError: as :func:`export_model`, of what it refuses before it writes.
    """
    plan = target_named(target).plan(model, options)
    if plan.form is None:
        raise FormatError(
            f"--target {target} cannot hold this model: {' '.join(plan.reasons)}",
            "another --target; `mla-convert export MODEL --dry-run` shows what each would write",
        )
    parse_size(options.max_shard_size)
    _check_apart(model.folder, out)
    check_output(out, overwrite=overwrite)
    _read_record(model, plan)
    if verify and python is not None and plan.engine is not None:
        installed_version(plan.engine, python)
    return plan


def _check_apart(folder: Path, out: Path) -> None:
    """Raise where ``out``, once replaced, would take the model with it."""
    model, target = Path(os.path.realpath(folder)), Path(os.path.realpath(out))
    if model.is_relative_to(target):
        raise UsageError(
            f"{out} {'is' if model == target else 'holds'} the model that is exported, which an export does not "
            "replace: what it writes cannot be exported or healed again",
            "choose another output folder",
        )


def _reference(model: ConvertedModel, tokenizer: Any, folder: Path, plan: ExportPlan) -> Reference:
    probe = make_probe(tokenizer, read_text(BUILTIN_TEXT).text, positions=_positions(model, folder))
    if len(probe.prompt) < 2 or max(probe.prompt) >= model.spec.vocab_size:
        raise SourceError(
            f"the tokenizer in {model.folder} is not the model's: it makes tokens {probe.prompt[:3]} ... of English, "
            f"where the embedding has {model.spec.vocab_size} rows",
            "put the tokenizer of the model's source into the folder, or pass --no-verify",
        )
    answers, tolerance = reference_answers(model.folder, probe, plan.dtype)
    return Reference(probe, answers, tolerance, plan.dtype)


def _positions(model: ConvertedModel, folder: Path) -> int:
    """The context of what was written, which ends at a sliding window where the form has none."""
    config = folder / "config.json"
    if not config.is_file():
        return unwindowed_positions(model)
    return int(json.loads(config.read_text(encoding="utf-8"))["max_position_embeddings"])


def _ask(folder: Path, plan: ExportPlan, reference: Reference, python: Path | None) -> Verdict | None:
    """Ask the plan's engine, or where it is not installed transformers, which loads every form but GGUF."""
    engine = plan.engine
    if engine is not None and (python is not None or engine_named(engine).version(None) is not None):
        return check(folder, reference, engine, python)
    if plan.form != "gguf":
        log.warning("%s is not installed: the folder is verified in transformers instead", engine or plan.target)
        return check(folder, reference, "transformers")
    log.warning("%s is not installed: nothing has verified what was written", engine)
    return None


def _read_record(model: ConvertedModel, plan: ExportPlan) -> Mapping[str, Any]:
    """Return the model's conversion.json, which a card of this export can be made from."""
    path = model.folder / RECORD_NAME
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        model_card({**record, "export": export_section(plan, None)})
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise SourceError(
            f"{path} cannot be read: {type(error).__name__}: {error}", "export a folder that convert or heal wrote"
        ) from error
    return record


def _write_record(record: Mapping[str, Any], folder: Path, plan: ExportPlan, verdict: Verdict | None) -> None:
    """Write the model's conversion.json with an ``export`` section, and the card made from it.

    Figures that were measured on other weights than those written are named there, as ``measured_before``.
    """
    section = dict(export_section(plan, verdict))
    if record["measurements"] and (plan.dtype != record["dtype"] or not plan.exact):
        section["measured_before"] = record["measurements"]
    record = {**record, "export": section}
    (folder / RECORD_NAME).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    (folder / CARD_NAME).write_text(model_card(record), encoding="utf-8")


def export_section(plan: ExportPlan, verdict: Verdict | None) -> Mapping[str, Any]:
    """Return what conversion.json says of an export."""
    checked = None if verdict is None else asdict(verdict)
    return json_safe({**asdict(plan), "verification": checked})


def _keep_rejected(folder: Path, out: Path) -> Path:
    """Move what was written to ``out`` with ``.rejected`` added, and a number where that name is taken."""
    target = Path(os.path.realpath(out))  # beside what a link leads to, where the staged folder is
    names = (f"{target.name}.rejected{number}" for number in chain([""], (f"-{i}" for i in count(2))))
    kept = next(target.with_name(name) for name in names if not os.path.lexists(target.with_name(name)))
    folder.rename(kept)
    return kept

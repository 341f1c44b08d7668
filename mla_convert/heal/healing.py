"""Heal a converted model: train its MLA weights against the model it came from, and write it as a new folder."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import PartialState
from safetensors import safe_open
from torch import Tensor

from mla_convert.card import CARD_NAME, model_card
from mla_convert.errors import FormatError, SourceError, UsageError, VerificationError
from mla_convert.evaluate.load import NATIVE_MODEL_TYPE, folder_model_type, load_for_evaluation
from mla_convert.export.folder import check_output, sole_run, staged_folder
from mla_convert.export.shards import ShardWriter
from mla_convert.heal.balance import balance
from mla_convert.heal.checkpoint import Checkpoints, fingerprint, weight_digests
from mla_convert.heal.curve import PNG_NAME, write_curve
from mla_convert.heal.data import HealingText, healing_text
from mla_convert.heal.distil import DistilResult, DistilSettings, distil
from mla_convert.heal.gradients import output_metrics
from mla_convert.heal.layers import LayerResult, LayerSettings, Streams, heal_layers, layers_of
from mla_convert.heal.teacher import check_teacher, check_tokenizers
from mla_convert.memory import keep_freed_memory
from mla_convert.positions import check_positions
from mla_convert.progress import Progress, silent
from mla_convert.record import LOSS_NAME, RECORD_NAME, json_safe
from mla_convert.report import write_report
from mla_convert.sources import open_source

Stage = Literal["layers", "global", "all"]

# Contexts whose gradients say what errors in stage ``layers`` matter.
METRIC_CONTEXTS = 16
# What makes a native model that is not a tensor; a folder must be written with that which was trained.
_SHAPE = ("kv_lora_rank", "kv_lora_ranks", "qk_rope_head_dim", "qk_rope_head_dims", "rope_inv_freq", "attention_scale")
# Relative and absolute: weights may be stored in bfloat16.
_ROUNDING = 2**-8

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TextSettings:
    """What is trained on.

    Attributes:
        tokens: training tokens, in contexts of ``context``, in equal shares from every text.
        held_out_share: how much of each text is kept for validation, from its end.
        seed: of the choice and order of contexts.
        passes: how often stage ``global`` may train on a context; more lets a shorter text do for both.
        held_out: contexts of each text kept for validation, instead of a share.
    """

    tokens: int = 32768
    context: int = 512
    held_out_share: float = 0.05
    seed: int = 0
    passes: int = 1
    held_out: int | None = None


@dataclass(frozen=True)
class HealRequest:
    """A healing.

    Attributes:
        model: a converted folder of the native format.
        out: the folder to write.
        teacher: the model that it was made from, as `convert` was given it.
        texts: what to train on, as `convert --calibration` takes it.
    """

    model: Path
    out: Path
    teacher: str
    texts: tuple[str, ...]
    stage: Stage = "layers"
    text: TextSettings = field(default_factory=TextSettings)
    layers: LayerSettings = field(default_factory=LayerSettings)
    distil: DistilSettings = field(default_factory=DistilSettings)
    revision: str | None = None
    token: str | None = None
    overwrite: bool = False


@dataclass(frozen=True)
class HealResult:
    """What was done.

    Attributes:
        layers: the layers' errors; none without that stage.
        distil: the distillation's course; None without that stage.
        timings: seconds a stage, of this run where it was resumed.
    """

    layers: tuple[LayerResult, ...]
    distil: DistilResult | None
    timings: Mapping[str, float]


def heal(request: HealRequest, progress: Progress | None = None) -> HealResult:
    """Heal ``request.model`` and write it as ``request.out``, whole or not at all.

    What is finished lies in a folder beside the output, ``.NAME.heal``, until the output is there: the same call goes
    on from it after an interruption, to the same result.

    Raises:
        FormatError: the model is not of the native format.
        HealError: the teacher does not belong to the model, a loss is not finite, or an interrupted run was another.
        UsageError: several processes, where one is needed, or a context longer than a model can read.
        TextError: a text cannot be read or is too short.
        OutputError: the output exists or cannot be written, or another run is writing it.
        VerificationError: what was written does not load as what was trained.
    """
    keep_freed_memory()
    check_heal(request)
    with sole_run(request.out, "heal") if is_writer() else nullcontext():
        return _heal(request, progress or silent)


def is_writer() -> bool:
    """Whether this is the one process of several that writes the output."""
    return PartialState().is_main_process


def check_heal(request: HealRequest) -> None:
    """Check what can be checked before a model is loaded.

    Raises:
        FormatError: the model is not of the native format.
        SourceError: there is no model.
        UsageError: several processes, where one is needed.
        OutputError: the output exists or cannot be written.
    """
    if request.stage != "global" and PartialState().num_processes > 1:
        raise UsageError(
            "the layers are healed by one process", "run stage layers by itself, then stage global under accelerate"
        )
    check_output(request.out, overwrite=request.overwrite)
    model_type = folder_model_type(str(request.model))
    if model_type is None:
        raise SourceError(f"{request.model} is no folder with a model", "name a folder that convert wrote")
    if model_type != NATIVE_MODEL_TYPE:
        raise FormatError(f"{request.model} holds a {model_type} model", "convert with --format native to heal it")


def work_folder(out: Path) -> Path:
    """Return where a healing that is to write ``out`` keeps its checkpoints."""
    return out.resolve().with_name(f".{out.resolve().name}.heal")


def _heal(request: HealRequest, report: Progress) -> HealResult:
    student, tokenizer = load_for_evaluation(str(request.model), torch.float32)
    teacher, its_tokenizer = _teacher(request, by_layers=request.stage != "global")
    check_teacher(student, teacher, hidden=request.stage != "global")
    check_tokenizers(tokenizer, its_tokenizer)
    check_positions(student, request.text.context)
    check_positions(teacher, request.text.context)
    text = text_of(request, tokenizer)
    work = work_folder(request.out)
    origin = _origin(request, text)
    results: tuple[LayerResult, ...] = ()
    distilled: DistilResult | None = None
    timings: dict[str, float] = {}
    if request.stage in ("layers", "all"):
        started = time.perf_counter()
        results = _stage_layers(request, student, teacher, text, Checkpoints(work / "layers", origin), report)
        timings["layers"] = time.perf_counter() - started
    if request.stage in ("global", "all"):
        started = time.perf_counter()
        if request.stage == "all":
            teacher = None  # or both would be in memory
            teacher, _ = _teacher(request, by_layers=False)
            check_positions(teacher, request.text.context)
        settings = {name: json.dumps(value) for name, value in asdict(request.distil).items()}
        checkpoints = Checkpoints(
            work / "global", origin | {f"distil {name}": value for name, value in settings.items()}
        )
        distilled = distil(student, teacher, text, request.distil, checkpoints, report)
        timings["global"] = time.perf_counter() - started
    result = HealResult(results, distilled, timings)
    if is_writer():
        _write(request, student, text, result)
        shutil.rmtree(work, ignore_errors=True)
    return result


def _teacher(request: HealRequest, *, by_layers: bool) -> tuple[Any, Any]:
    """Return the teacher and its tokenizer; by layers, a source becomes the native model around its own attention."""
    if by_layers and folder_model_type(request.teacher) != NATIVE_MODEL_TYPE:
        source = open_source(request.teacher, revision=request.revision, token=request.token)
        return source.load_decoder(dtype=torch.float32), source.load_tokenizer()
    return load_for_evaluation(request.teacher, torch.float32, revision=request.revision, token=request.token)


def text_of(request: HealRequest, tokenizer: Any) -> HealingText:
    """Return the windows that ``request`` trains on.

    Raises:
        TextError: a text cannot be read or is too short.
    """
    return healing_text(
        tokenizer,
        request.texts,
        context=request.text.context,
        tokens=request.text.tokens,
        held_out_share=request.text.held_out_share,
        seed=request.text.seed,
        passes=request.text.passes,
        held_out=request.text.held_out,
    )


def _origin(request: HealRequest, text: HealingText) -> dict[str, str]:
    """Return what an interrupted run must have in common with this one to be gone on with."""
    return fingerprint(
        model=weight_digests(request.model),
        teacher=request.teacher,
        settings=request.layers,
        texts=dict(zip(text.refs, text.digests, strict=True)),
        stage=request.stage,
        tokens=text.digest,
    )


def _stage_layers(
    request: HealRequest, student: Any, teacher: Any, text: HealingText, checkpoints: Checkpoints, report: Progress
) -> tuple[LayerResult, ...]:
    """Heal the student's layers in place, going on where an earlier run was stopped; one checkpoint a layer."""
    balance(student)
    results: list[LayerResult] = []
    healed: dict[str, Tensor] = {}
    resume: tuple[int, Streams] | None = None
    found = checkpoints.load()
    if found is not None:
        results = [LayerResult(**result) for result in found.state["results"]]
        healed = {name: value for name, value in found.tensors.items() if "." in name}
        student.load_state_dict(healed, strict=False)
        resume = found.step, Streams(found.tensors["teacher"], found.tensors["student"], len(text.held_out))
        log.info("going on with layer %d of %d", found.step, len(layers_of(student)))

    metrics = None
    if request.layers.metric == "fisher":
        rows = list(dict.fromkeys(text.order.tolist()))[:METRIC_CONTEXTS]  # the texts in turns
        metrics = output_metrics(teacher, text.train[rows], seed=request.layers.seed, progress=report)

    def finished(result: LayerResult, weights: Mapping[str, Tensor], streams: Streams) -> None:
        results.append(result)
        healed.update({f"model.layers.{result.layer}.self_attn.{name}": value for name, value in weights.items()})
        tensors = {**healed, "teacher": streams.teacher, "student": streams.student}
        checkpoints.save(result.layer + 1, tensors, {"results": [asdict(result) for result in results]})

    for result in heal_layers(
        student,
        teacher,
        text.train,
        text.held_out,
        request.layers,
        finished=finished,
        metrics=metrics,
        resume=resume,
        progress=report,
    ):
        log.info("layer %d: held-out error %.4f -> %.4f", result.layer, result.held_out_before, result.held_out_after)
    return tuple(results)


def _write(request: HealRequest, student: Any, text: HealingText, result: HealResult) -> None:
    """Write the healed model: the folder's own files, with what was trained in the dtype it was stored in.

    Matrices made from the old weights (`absorb`) are left out, and so are measurements of the old model.
    """
    # The distilled weights are whole where the student's own are sharded.
    changed = {name: value for name, value in student.state_dict().items() if ".self_attn." in name}
    changed |= result.distil.weights if result.distil is not None else {}
    with staged_folder(request.out, request.overwrite) as folder:
        for file in sorted(request.model.iterdir()):
            old = file.suffix == ".safetensors" or file.name.endswith(".index.json")
            if file.is_file() and not old and file.name not in (LOSS_NAME, PNG_NAME):
                shutil.copyfile(file, folder / file.name)
        with ShardWriter(folder, "5GB") as writer:
            for shard in sorted(request.model.glob("model*.safetensors")):
                with safe_open(shard, framework="pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118 - not a mapping
                        stored = tensors.get_tensor(name)
                        writer.add(name, changed[name].to(stored.dtype) if name in changed else stored)
        if result.distil is not None:
            write_curve(folder, result.distil.curve)
        record = json.loads((request.model / RECORD_NAME).read_text(encoding="utf-8"))
        record["healing"] = [*record.get("healing", []), _healing_record(request, text, result)]
        record["measurements"] = []
        record["verification"] = None  # of the weights before
        record["notes"] = [*record["notes"], *_notes(text, result)]
        (folder / RECORD_NAME).write_text(json.dumps(json_safe(record), indent=2) + "\n", encoding="utf-8")
        (folder / CARD_NAME).write_text(model_card(record), encoding="utf-8")
        write_report(folder)
        _verify(folder, student, changed, text)


@torch.no_grad()
def _verify(folder: Path, student: Any, changed: Mapping[str, Tensor], text: HealingText) -> None:
    """Load the folder again: its config and every trained tensor must be those in memory, its answers finite.

    Raises:
        VerificationError: they are not.
    """
    remedy = "repeat the command; if that does not help, file an issue with conversion.json"
    loaded, _ = load_for_evaluation(str(folder), torch.float32)
    found = loaded.state_dict()
    differing = [name for name in _SHAPE if getattr(loaded.config, name) != getattr(student.config, name)]
    for name, value in changed.items():
        if not torch.allclose(found[name], value.to(found[name]), rtol=_ROUNDING, atol=_ROUNDING):
            differing.append(name)
    if differing:
        raise VerificationError(f"{folder} does not hold what was trained: {differing[0]} differs", remedy)
    if not loaded(input_ids=text.held_out[:1, :64], use_cache=False).logits.isfinite().all():
        raise VerificationError(f"{folder} gives logits that are not finite", remedy)


def _healing_record(request: HealRequest, text: HealingText, result: HealResult) -> dict[str, Any]:
    record: dict[str, Any] = {
        "stage": request.stage,
        "teacher": request.teacher,
        "texts": dict(zip(text.refs, text.digests, strict=True)),
        "text": asdict(request.text),
        "timings": dict(result.timings),
    }
    if request.stage in ("layers", "all"):
        results = [asdict(layer) for layer in result.layers]
        record["layers"] = {"settings": asdict(request.layers), "results": results}
    if result.distil is not None:
        record["global"] = {
            "settings": asdict(request.distil),
            "tokens": result.distil.tokens,
            "best_step": result.distil.best_step,
            "held_out_kl": {str(step): value for step, value in result.distil.held_out.items()},
        }
    return record


def _notes(text: HealingText, result: HealResult) -> list[str]:
    texts = ", ".join(f"`{ref}`" for ref in text.refs)
    notes = []
    if result.layers:
        notes.append(f"Healed layer by layer on {text.train.numel():,} tokens of {texts}.")
    if result.distil is not None:
        notes.append(f"Distilled from its source on {result.distil.tokens:,} tokens of {texts}.")
    return notes

"""One distillation from its first step to its last: steps, evaluations, checkpoints."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import get_scheduler

from mla_convert.errors import HealError, TextError
from mla_convert.heal.checkpoint import Checkpoints
from mla_convert.heal.curve import CurvePoint
from mla_convert.heal.data import HealingText
from mla_convert.heal.distil_settings import DistilSettings
from mla_convert.heal.divergence import divergence, hidden_distance
from mla_convert.heal.optimisers import make_optimisers
from mla_convert.heal.teacher import Part, Teacher
from mla_convert.heal.training_state import read_optimizers, read_weights, write_optimizers, write_weights
from mla_convert.progress import Progress

logger = logging.getLogger(__name__)

STAGE = "distil"
_LOG_EVERY = 10
# A checkpoint is for a run with the same settings; with another rate it is not taken up.
_LOWER = "start again with a lower learning rate and another output; the last good checkpoint stays as it is"


@dataclass(frozen=True)
class DistilResult:
    """What a run came to.

    Attributes:
        curve: from step 0, before training, on.
        best_step: after which the held-out KL was lowest; its weights are those of the result.
        tokens: trained on.
        weights: the trained parameters at the best step by name, on the CPU; empty but on the first process.
    """

    curve: tuple[CurvePoint, ...]
    best_step: int
    tokens: int
    weights: Mapping[str, Tensor] = field(repr=False)

    @property
    def held_out(self) -> Mapping[int, float]:
        """Held-out KL(teacher || student) by step, nats a token."""
        return {point.step: point.held_out for point in self.curve if point.held_out is not None}


@dataclass
class Course:
    """Where a run is: everything beside the tensors that going on needs."""

    step: int = 0
    best_step: int = 0
    stale: int = 0
    curve: list[CurvePoint] = field(default_factory=list)

    def state(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Course:
        curve = [CurvePoint(**point) for point in state["curve"]]
        return cls(state["step"], state["best_step"], state["stale"], curve)


class DistilRun:
    """One distillation between its first and its last step."""

    def __init__(
        self,
        accelerator: Accelerator,
        student: Any,
        teacher: Any,
        text: HealingText,
        settings: DistilSettings,
        checkpoints: Checkpoints | None,
        trained: Mapping[str, Tensor],
    ) -> None:
        self.accelerator, self.text, self.settings, self.checkpoints = accelerator, text, settings, checkpoints
        self.names = frozenset(trained)
        self.per_step = settings.batch_size * settings.accumulate * accelerator.num_processes
        self.steps = len(text.order) // self.per_step
        if self.steps == 0:
            raise TextError(
                f"{len(text.order)} windows of {text.train.shape[1]} tokens do not fill a step of {self.per_step}",
                "give more tokens, a smaller batch or fewer accumulated batches",
            )
        self.inner_optimizers = make_optimisers(
            trained,
            kind=settings.optimizer,
            learning_rate=settings.learning_rate,
            weight_decay=settings.weight_decay,
        )
        # Not prepared: accelerate would step them once for every process.
        self.schedulers = [
            get_scheduler(
                "cosine",
                optimizer,
                num_warmup_steps=math.ceil(settings.warmup * self.steps),
                num_training_steps=self.steps,
            )
            for optimizer in self.inner_optimizers
        ]
        self.model, *self.optimizers = accelerator.prepare(student, *self.inner_optimizers)
        self.teacher = Teacher(
            teacher.to(accelerator.device),
            temperature=settings.temperature,
            top_k=settings.top_k,
            hidden=settings.hidden_weight > 0,
            bf16=settings.bf16,
            cache=None if settings.top_k is None or checkpoints is None else checkpoints.folder / "teacher",
            key=_teacher_key(text, settings, checkpoints),
        )
        self.course = Course()
        self.best: dict[str, Tensor] = {}

    def to_the_end(self, progress: Progress) -> DistilResult:
        """Go on from the last checkpoint, or begin; leave the model with its best weights."""
        if not self._resume():
            self._evaluate(loss=None, learning_rate=0.0)
        course, settings = self.course, self.settings
        first, started, training = course.step, time.perf_counter(), 0.0
        self._report(progress)
        while course.step < self.steps and not self._is_over():
            learning_rate = float(self.schedulers[0].get_last_lr()[0])
            since = time.perf_counter()
            loss = self._step()
            training += time.perf_counter() - since
            last = course.step == self.steps
            if last or course.step % settings.evaluate_every == 0:
                self._evaluate(loss, learning_rate)
            else:
                self._note(loss, learning_rate, None)
            ends = last or self._is_over()
            if ends or course.step % settings.checkpoint_every == 0:
                self._save()
            if ends or course.step % _LOG_EVERY == 0:
                made = course.step - first
                left = (self.steps - course.step) * (time.perf_counter() - started) / made
                speed = made * self._step_tokens / training
                self._log("loss %.4f, %.0f tokens/s, about %.0f min left", loss, speed, left / 60)
            self._report(progress)
        write_weights(self.model, self.best)
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        return DistilResult(tuple(course.curve), course.best_step, course.step * self._step_tokens, self.best)

    def _report(self, progress: Progress) -> None:
        if self.accelerator.is_main_process:
            progress(STAGE, self.course.step, self.steps)

    def _log(self, message: str, *arguments: float) -> None:
        if self.accelerator.is_main_process:
            logger.info("step %d of %d: " + message, self.course.step, self.steps, *arguments)  # noqa: G003

    @property
    def _step_tokens(self) -> int:
        return self.per_step * self.text.train.shape[1]

    def _is_over(self) -> bool:
        return self.settings.patience is not None and self.course.stale >= self.settings.patience

    def _step(self) -> float:
        """Make one step; return its loss.

        Raises:
            HealError: the loss or the norm of its gradient is not finite; the weights are those of before.
        """
        settings, accelerator, step = self.settings, self.accelerator, self.course.step
        size, processes, rank = settings.batch_size, accelerator.num_processes, accelerator.process_index
        # Every step has a seed of its own, so that one that is repeated after a stop draws the same.
        torch.manual_seed((settings.seed * 1_000_003 + step) * processes + rank)
        self.model.train()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        total = torch.zeros((), device=accelerator.device)
        for batch in range(settings.accumulate):
            start = step * self.per_step + (batch * processes + rank) * size
            rows = self.text.order[start : start + size].tolist()
            with accelerator.accumulate(self.model):
                loss = self._losses("train", rows, hidden_weight=settings.hidden_weight).mean()
                accelerator.backward(loss)
            total += loss.detach() / settings.accumulate
        value = float(cast("Tensor", accelerator.reduce(total, "mean")))
        norm = float(accelerator.clip_grad_norm_(self.model.parameters(), settings.clip) or 0.0)
        if not (math.isfinite(value) and math.isfinite(norm)):
            raise HealError(f"step {step + 1} has a loss of {value} and a gradient of norm {norm}", _LOWER)
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        self.course.step += 1
        return value

    def _losses(self, part: Part, rows: list[int], *, hidden_weight: float = 0.0) -> Tensor:
        """Return the loss of each of the windows."""
        windows = self.text.train if part == "train" else self.text.held_out
        answer = self.teacher.answer(windows, part, rows)
        input_ids = windows[rows].to(self.accelerator.device)
        with torch.autocast(input_ids.device.type, torch.bfloat16, enabled=self.settings.bf16):
            outputs = self.model(input_ids=input_ids, use_cache=False, output_hidden_states=hidden_weight > 0)
        losses = divergence(outputs.logits, answer, temperature=self.settings.temperature)
        if hidden_weight > 0:
            losses = losses + hidden_weight * hidden_distance(outputs.hidden_states[1:], answer.hidden)
        return losses

    def _evaluate(self, loss: float | None, learning_rate: float) -> None:
        """Measure the KL on the held-out windows, and keep the weights if they are the best so far."""
        held_out = self._held_out()
        if not math.isfinite(held_out):
            raise HealError(f"the held-out loss after step {self.course.step} is {held_out}", _LOWER)
        course = self.course
        earlier = [point.held_out for point in course.curve if point.held_out is not None]
        self._note(loss, learning_rate, held_out)
        if earlier and held_out >= min(earlier):
            course.stale += 1
        else:
            course.best_step, course.stale = course.step, 0
            self.best = read_weights(self.model, self.names)
        self._log("held-out KL %.4f nats a token", held_out)

    @torch.no_grad()
    def _held_out(self) -> float:
        """The KL on the held-out windows, nats a token. Processes share them, and make as many passes each."""
        size, processes, rank = self.settings.batch_size, self.accelerator.num_processes, self.accelerator.process_index
        count = len(self.text.held_out)
        self.model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.accelerator.device)
        for start in range(0, count, size * processes):
            mine = range(start + rank * size, start + (rank + 1) * size)
            rows = [min(row, count - 1) for row in mine]
            counts = torch.tensor([row < count for row in mine], device=total.device)
            total += self._losses("held-out", rows).double()[counts].sum()
        return float(cast("Tensor", self.accelerator.reduce(total, "sum"))) / count

    def _note(self, loss: float | None, learning_rate: float, held_out: float | None) -> None:
        step = self.course.step
        self.course.curve.append(CurvePoint(step, step * self._step_tokens, loss, learning_rate, held_out))

    def _save(self) -> None:
        if self.checkpoints is None:
            return
        parts = {
            "model": read_weights(self.model, self.names),
            "best": self.best,
            "optimizer": read_optimizers(self.model, self.inner_optimizers),
        }
        if self.accelerator.is_main_process:
            tensors = {f"{part}/{name}": value for part, named in parts.items() for name, value in named.items()}
            schedules = [scheduler.state_dict() for scheduler in self.schedulers]
            state = self.course.state() | {"per_step": self.per_step, "schedulers": schedules}
            self.checkpoints.save(self.course.step, tensors, state)
        self.accelerator.wait_for_everyone()

    def _resume(self) -> bool:
        """Take up the last checkpoint; return whether there is one."""
        found = None if self.checkpoints is None else self.checkpoints.load()
        if found is None:
            return False
        if found.state["per_step"] != self.per_step:
            raise HealError(
                f"the checkpoint is of a run with {found.state['per_step']} windows a step, not {self.per_step}",
                "go on with as many processes as before, or start over with another output",
            )
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "best": {}, "optimizer": {}}
        if self.accelerator.is_main_process:
            for name, value in found.tensors.items():
                part, _, rest = name.partition("/")
                parts[part][rest] = value
        write_weights(self.model, parts["model"])
        write_optimizers(self.model, self.inner_optimizers, parts["optimizer"])
        for optimizer, scheduler, kept in zip(
            self.inner_optimizers, self.schedulers, found.state["schedulers"], strict=True
        ):
            scheduler.load_state_dict(kept)
            for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = rate
        self.course, self.best = Course.of(found.state), parts["best"]
        self._log("going on from a checkpoint")
        return True


def _teacher_key(text: HealingText, settings: DistilSettings, checkpoints: Checkpoints | None) -> str:
    """What the teacher's kept answers depend on."""
    name = None if checkpoints is None else checkpoints.fingerprint.get("teacher")
    parts = [name, text.digest, settings.top_k, settings.temperature, settings.bf16]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

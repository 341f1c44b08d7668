"""Ask an engine what an export says it answers, and judge."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from mla_convert.errors import SourceError, VerificationError
from mla_convert.export.verify.answers import Answers, Difference, Probe, compare_answers
from mla_convert.export.verify.engines import engine_named, installed_version
from mla_convert.export.verify.reference import passes

log = logging.getLogger(__name__)

# Not safetensors: vLLM loads every file of that kind in a folder as weights.
PROBE_FILE = "verification.json"

_STORED_AS = ("float32", "bfloat16", "float16", "q8_0")


@dataclass(frozen=True)
class Reference:
    """What an export has to answer.

    Attributes:
        probe: what is asked.
        answers: the converted model's, in float32.
        tolerance: see :func:`~mla_convert.export.verify.reference.reference_answers`.
        stored_as: the dtype of the export's weights.
    """

    probe: Probe
    answers: Answers
    tolerance: float
    stored_as: str


@dataclass(frozen=True)
class Verdict:
    """What one engine made of an export.

    Attributes:
        engine, version: who was asked.
        difference: from the reference.
        tolerance: what was allowed.
        passed: whether the answers are the converted model's.
    """

    engine: str
    version: str
    difference: Difference
    tolerance: float
    passed: bool

    def sentence(self) -> str:
        """The verdict for a reader."""
        d = self.difference
        figures = (
            f"|Δ log p| {d.mean_logprob_difference:.2g} on average and {d.max_logprob_difference:.2g} at most over the "
            f"probe (allowed {self.tolerance:.2g}), {d.agreed} of {d.continuation} greedy tokens alike"
        )
        return f"{self.engine} {self.version}: {'passed' if self.passed else 'FAILED'}: {figures}"


def check(folder: Path, reference: Reference, engine: str, python: Path | None = None) -> Verdict:
    """Have an engine load ``folder``, and return how its answers compare with the reference.

    Raises:
        VerificationError: the engine is not installed, or does not load the folder.
        UsageError: there is no such engine.
    """
    found = installed_version(engine, python)
    log.info("asking %s %s", engine, found)
    difference = compare_answers(engine_named(engine).answer(folder, reference.probe, python=python), reference.answers)
    passed = passes(difference, reference.tolerance, reference.stored_as)
    return Verdict(engine, found, difference, reference.tolerance, passed)


def save_reference(folder: Path, reference: Reference) -> None:
    """Write the reference beside an export, so that any engine can be asked later, wherever the folder is by then."""
    fields = {
        "prompt": list(reference.probe.prompt),
        "new_tokens": reference.probe.new_tokens,
        "logprobs": reference.answers.logprobs.tolist(),
        "continuation": list(reference.answers.continuation),
        "tolerance": reference.tolerance,
        "stored_as": reference.stored_as,
    }
    (folder / PROBE_FILE).write_text(json.dumps(fields) + "\n", encoding="utf-8")


def load_reference(folder: Path) -> Reference:
    """Read what :func:`save_reference` wrote.

    Raises:
        SourceError: the folder has none.
        VerificationError: it is damaged.
    """
    file = folder / PROBE_FILE
    if not file.is_file():
        raise SourceError(
            f"{folder} has no {PROBE_FILE}", "name a folder that `mla-convert export` wrote, without --no-verify"
        )
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        probe = Probe(tuple(fields["prompt"]), fields["new_tokens"])
        answers = Answers(torch.tensor(fields["logprobs"], dtype=torch.float64), tuple(fields["continuation"]))
        reference = Reference(probe, answers, fields["tolerance"], fields["stored_as"])
        whole = _is_whole(reference)
    except (OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise VerificationError(f"{file} is damaged: {error}", "export the model again") from error
    if not whole:
        raise VerificationError(f"{file} is damaged: its parts do not fit each other", "export the model again")
    return reference


def _is_whole(reference: Reference) -> bool:
    """Whether there is an answer to each question, and all are of the kinds that they should be."""
    probe, answers = reference.probe, reference.answers
    tokens = (*probe.prompt, *answers.continuation)
    return (
        all(isinstance(token, int) and token >= 0 for token in tokens)
        and len(probe.prompt) >= 2
        and len(answers.continuation) == probe.new_tokens >= 1
        and tuple(answers.logprobs.shape) == (len(probe.prompt) - 1,)
        and bool(answers.logprobs.isfinite().all())
        and 0 < reference.tolerance < float("inf")
        and reference.stored_as in _STORED_AS
    )

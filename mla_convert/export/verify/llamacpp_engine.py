"""llama.cpp as an engine of verification, through the ``xllamacpp`` package, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

import torch

from mla_convert.errors import SourceError, VerificationError
from mla_convert.export.verify import llamacpp_script
from mla_convert.export.verify.answers import Answers, Probe
from mla_convert.export.verify.interpreter import interpreter

PACKAGE = "xllamacpp"

_REMEDY = "file an issue with the conversion.json of the folder"

# Where a probability underflows, llama.cpp gives the lowest float32 for its logarithm; exp(-104) is none in float32.
_LOWEST = -104.0

_VERSION = "import importlib.metadata as m, sys; sys.stdout.write(m.version(sys.argv[1]))"


def version(python: Path | None = None) -> str | None:
    """Return xllamacpp's version in that interpreter (by default this one); None where it is not installed."""
    try:
        run = _run([interpreter(python), "-c", _VERSION, PACKAGE])
    except OSError:
        return None
    return (run.stdout.strip() or None) if run.returncode == 0 else None


def answer(folder: Path, probe: Probe, *, python: Path | None = None) -> Answers:
    """Return what llama.cpp makes of the GGUF file in `folder`, with its cache in float32.

    llama.cpp sums probabilities in float32, most probable first, and so loses up to 1e-3 of a long tail: its
    distributions are normalised again. What has probability below exp(-104) counts as that.

    Raises:
        VerificationError: there is not one GGUF file, it does not load, or it is not answered.
    """
    file = gguf_file(folder)
    vocabulary, letter = _vocabulary(file)
    positions = len(probe.prompt) - 1
    with tempfile.TemporaryDirectory(prefix="mla-convert-") as exchange:
        question, reply, distributions = (Path(exchange, name) for name in ("in.json", "out.json", "distributions"))
        asked = {
            "file": str(file.resolve()),
            "prompt": list(probe.prompt),
            "new_tokens": probe.new_tokens,
            "vocabulary": vocabulary,
            "letter": letter,
            "threads": torch.get_num_threads(),
            "distributions": str(distributions),
        }
        question.write_text(json.dumps(asked), encoding="utf-8")
        script = Path(llamacpp_script.__file__).read_text(encoding="utf-8")
        run = _run([interpreter(python), "-c", script, str(question), str(reply)], folder=exchange)
        if run.returncode != 0 or not reply.is_file():
            raise VerificationError(f"llama.cpp does not run {file}: {_last_words(run)}", _REMEDY)
        continuation = json.loads(reply.read_text(encoding="utf-8"))["continuation"]
        numbers = torch.frombuffer(bytearray(distributions.read_bytes()), dtype=torch.float32)
    whole = numbers.view(positions, vocabulary).double().clamp_min(_LOWEST).log_softmax(-1)
    given = whole.gather(1, torch.tensor(probe.prompt[1:])[:, None])[:, 0]
    return Answers(given, tuple(continuation), whole)


def gguf_file(folder: Path) -> Path:
    """Return the one GGUF file of a folder.

    Raises:
        VerificationError: there is none, or there are several.
    """
    found = sorted(folder.glob("*.gguf"))
    if len(found) != 1:
        raise VerificationError(
            f"{folder} holds {len(found)} GGUF files, expected one", "name a folder of --target gguf"
        )
    return found[0]


def _vocabulary(file: Path) -> tuple[int, int]:
    """How many tokens there are, and one that is a letter."""
    from mla_convert.sources.gguf_reader import open_reader

    try:
        tokens = open_reader(file).get_field("tokenizer.ggml.tokens")
    except SourceError as error:
        raise VerificationError(error.message, _REMEDY) from error
    texts = [] if tokens is None else tokens.contents()
    letter = next((row for row, text in enumerate(texts) if text.isascii() and text.isalpha()), None)
    if letter is None:
        raise VerificationError(f"{file} has no token that is a letter", _REMEDY)
    return len(texts), letter


def _run(command: list[str], folder: str | None = None) -> subprocess.CompletedProcess[str]:
    # Not from a folder with modules of its own, which would come first.
    environment = os.environ | {"PYTHONWARNINGS": "ignore", "PYTHONSAFEPATH": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def _last_words(run: subprocess.CompletedProcess[str]) -> str:
    """Its errors: llama.cpp logs the cause first, as ``TIME E cause``; a failed assertion has a line of its own."""
    lines = [line.strip() for line in run.stderr.splitlines() if line.strip()]
    errors = [line.partition(" E ")[2] or line for line in lines if " E " in line or "GGML_ASSERT" in line]
    return "; ".join(errors[:2] or lines[-1:] or [f"exit status {run.returncode}"])

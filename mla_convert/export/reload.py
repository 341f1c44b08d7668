"""Verification by loading: a folder counts as written only when it answers as it should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from mla_convert.errors import VerificationError

_REMEDY = "file an issue with the conversion.json of the folder, and convert with another --format meanwhile"

# Run by a fresh interpreter: shows that the folder needs nothing of this package.
_FRESH = """
import json, sys
sys.modules["mla_convert"] = sys.modules["mla_kernels"] = None
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
folder, exchange, dtype, trust = sys.argv[1:]
torch.set_num_threads(int(load_file(f"{exchange}/in.safetensors")["threads"]))
model, report = AutoModelForCausalLM.from_pretrained(
    folder, dtype=getattr(torch, dtype), trust_remote_code=trust == "True", output_loading_info=True
)
with torch.no_grad():
    logits = model.eval()(load_file(f"{exchange}/in.safetensors")["input_ids"], use_cache=False).logits
save_file({"logits": logits.float().contiguous()}, f"{exchange}/out.safetensors")
keys = ("missing_keys", "unexpected_keys", "mismatched_keys")
with open(f"{exchange}/report.json", "w") as file:
    json.dump({key: sorted(map(str, report[key])) for key in keys}, file)
"""


@dataclass(frozen=True)
class ReloadCheck:
    """How the logits of what was written differ from the reference.

    Attributes:
        max_logit_difference: max |Δ logit|.
        max_logprob_difference: max |Δ log p|, nats.
        top1_agreement: fraction of positions with the same most probable token.
        tokens: positions compared.
    """

    max_logit_difference: float
    max_logprob_difference: float
    top1_agreement: float
    tokens: int


def reload_logits(
    folder: Path,
    input_ids: Int[Tensor, "B S"],
    *,
    fresh_process: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "B S vocabulary"]:
    """Load a written folder by transformers' Auto class and return its logits in float32.

    The folder's own modelling files run where its config names some (the native format), and no remote code otherwise.

    Args:
        fresh_process: load in a new interpreter in which mla_convert cannot be imported.
        dtype: the dtype computed in; by default more than is stored, so that storage is the only rounding.

    Raises:
        VerificationError: it does not load, or tensors are missing, left over or of the wrong shape.
    """
    if fresh_process:
        return _reload_fresh(folder, input_ids, dtype)
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, trust_remote_code=_has_code(folder), output_loading_info=True
        )
        model, report = loaded
        with torch.no_grad():
            logits = model.eval()(input_ids, use_cache=False).logits.float()
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError) as error:
        raise VerificationError(f"{folder} does not load again: {error}", _REMEDY) from error
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
    _check_report(folder, report)
    return logits


def compare_logits(found: Float[Tensor, "B S vocabulary"], reference: Float[Tensor, "B S vocabulary"]) -> ReloadCheck:
    """Return the differences over all positions.

    Raises:
        VerificationError: the shapes differ, or a logit is not finite.
    """
    if found.shape != reference.shape:
        raise VerificationError(f"logits have shape {tuple(found.shape)}, expected {tuple(reference.shape)}", _REMEDY)
    found, reference = found.double(), reference.double()
    if not bool(found.isfinite().all()):
        raise VerificationError("the model that was written gives logits that are not finite", _REMEDY)
    logprobs = found.log_softmax(-1) - reference.log_softmax(-1)
    return ReloadCheck(
        max_logit_difference=float((found - reference).abs().max()),
        max_logprob_difference=float(logprobs.abs().max()),
        top1_agreement=float((found.argmax(-1) == reference.argmax(-1)).double().mean()),
        tokens=found.shape[0] * found.shape[1],
    )


def verify_folder(
    folder: Path,
    input_ids: Int[Tensor, "B S"],
    reference: Float[Tensor, "B S vocabulary"],
    *,
    tolerance: float,
    fresh_process: bool = False,
    dtype: torch.dtype = torch.float32,
) -> ReloadCheck:
    """Load `folder`, compare its logits on `input_ids` with `reference`, and return the differences.

    Args:
        tolerance: the largest |Δ log p| allowed, nats.

    Raises:
        VerificationError: it does not load whole, or differs by more than the tolerance.
    """
    check = compare_logits(reload_logits(folder, input_ids, fresh_process=fresh_process, dtype=dtype), reference)
    check_tolerance(folder, check, tolerance)
    return check


def check_tolerance(folder: Path, check: ReloadCheck, tolerance: float) -> None:
    """Raise VerificationError where the differences are above the tolerance, in nats."""
    if not check.max_logprob_difference <= tolerance:
        raise VerificationError(
            f"{folder} answers differently from the model that was converted: log-probabilities differ by up to "
            f"{check.max_logprob_difference:.3g}, allowed {tolerance:.3g}",
            _REMEDY,
        )


def _has_code(folder: Path) -> bool:
    try:
        return "auto_map" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise VerificationError(f"{folder} has no readable config.json: {error}", _REMEDY) from error


def _reload_fresh(folder: Path, input_ids: Tensor, dtype: torch.dtype) -> Tensor:
    trust = _has_code(folder)
    with tempfile.TemporaryDirectory(prefix="mla-convert-") as exchange:
        threads = torch.tensor(torch.get_num_threads())
        save_file({"input_ids": input_ids.contiguous(), "threads": threads}, f"{exchange}/in.safetensors")
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_MODULES_CACHE": f"{exchange}/modules",  # the folder's code, not an older copy of it
            "PYTHONWARNINGS": "ignore",
        }
        command = [sys.executable, "-c", _FRESH, str(folder.resolve()), exchange, str(dtype).split(".")[-1], str(trust)]
        run = subprocess.run(command, cwd=exchange, env=environment, capture_output=True, text=True, check=False)
        if run.returncode != 0:
            last = (run.stderr.strip().splitlines() or [f"exit status {run.returncode}"])[-1]
            raise VerificationError(f"{folder} does not load in a fresh interpreter: {last}", _REMEDY)
        _check_report(folder, json.loads(Path(exchange, "report.json").read_text(encoding="utf-8")))
        return load_file(f"{exchange}/out.safetensors")["logits"]


def _check_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Raise where transformers loaded the folder, but not whole: it fills gaps with random numbers."""
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(str(name) for name in report.get(key) or ())
        if names:
            raise VerificationError(f"{folder} loads with {key.replace('_', ' ')}: {', '.join(names[:3])}", _REMEDY)

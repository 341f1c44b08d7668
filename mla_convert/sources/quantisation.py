"""How a checkpoint is quantised, and why most kinds are refused: from its config and file names alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mla_convert.errors import UnsupportedArchitectureError

# Methods of which float8 weights are read; see :mod:`mla_convert.sources.fp8_checkpoint`.
FLOAT8_METHODS = ("fp8", "compressed-tensors")

_ORIGINAL = "use the unquantised checkpoint that it was made from, or a GGUF file"

# Method, as transformers names it -> (what is stored, what to do instead).
_METHODS: Mapping[str, tuple[str, str]] = {
    "gptq": ("GPTQ integers in packed groups", f"{_ORIGINAL}; transformers cannot undo GPTQ"),
    "awq": ("AWQ integers in packed groups", f"{_ORIGINAL}; transformers cannot undo AWQ"),
    "auto-round": ("AutoRound integers in packed groups", _ORIGINAL),
    "bitsandbytes": (
        "bitsandbytes integers",
        f"{_ORIGINAL}; or load it in transformers, call dequantize() and save_pretrained",
    ),
    "compressed-tensors": ("compressed-tensors", f"{_ORIGINAL}; of compressed-tensors only float8 weights are read"),
    "mxfp4": (
        "MXFP4 blocks",
        f"{_ORIGINAL}; or load it in transformers with Mxfp4Config(dequantize=True) and call save_pretrained",
    ),
    "fp8": ("float8 weights", _ORIGINAL),
    "fbgemm_fp8": ("FBGEMM float8 rows", _ORIGINAL),
    "hqq": ("HQQ integers", _ORIGINAL),
    "quanto": ("Quanto integers", _ORIGINAL),
    "torchao": ("torchao's own tensors", _ORIGINAL),
    "modelopt": ("ModelOpt numbers", _ORIGINAL),
}
# What quantisers leave beside a config that says nothing of them.
_METHOD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}


def quantisation_method(fields: Mapping[str, Any], folder: Path) -> str | None:
    """How the weights are quantised, as transformers names the method; None for plain ones."""
    config = fields.get("quantization_config") or fields.get("compression_config")
    if config is None:
        return next((method for name, method in _METHOD_FILES.items() if (folder / name).is_file()), None)
    if not isinstance(config, Mapping):
        return "unnamed"
    if config.get("load_in_4bit") or config.get("load_in_8bit"):
        return "bitsandbytes"
    return str(config.get("quant_method") or "unnamed")


def refuse_quantised(fields: Mapping[str, Any], folder: Path) -> None:
    """Raise where the weights are quantised by a method that is not read.

    Raises:
        UnsupportedArchitectureError: ``quantization_config``, or a file that a quantiser leaves, says so.
    """
    method = quantisation_method(fields, folder)
    if method is not None and method not in FLOAT8_METHODS:
        raise unread_quantisation(method)


def unread_quantisation(method: str, detail: str = "") -> UnsupportedArchitectureError:
    """The refusal of a checkpoint quantised by ``method``; ``detail`` says what of it is not read."""
    stored, remedy = _METHODS.get(method, (f"what the method '{method}' makes", _ORIGINAL))
    return UnsupportedArchitectureError(
        f"the checkpoint is quantised: it holds {stored}" + (f", {detail}" if detail else ""), remedy
    )

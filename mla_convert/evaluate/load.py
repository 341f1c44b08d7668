"""Load whatever a user names for evaluation or generation: what was converted, a stock folder, or a source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from mla_convert.errors import SourceError

# model_type of the folders that are loaded by transformers' Auto classes rather than as a conversion's source.
NATIVE_MODEL_TYPE = "mla_convert"
EXPORTED_MODEL_TYPE = "deepseek_mla"
STOCK_MODEL_TYPES = frozenset({"deepseek_v2", "deepseek_v3"})


def load_for_evaluation(
    ref: str,
    dtype: torch.dtype,
    *,
    revision: str | None = None,
    token: str | None = None,
    attn_implementation: str = "sdpa",
    device: str = "cpu",
) -> tuple[Any, Any]:
    """Return (model in evaluation mode, tokenizer) for a converted or exported folder or any source, in ``dtype``.

    A folder whose config says ``mla_convert`` or ``deepseek_mla`` is loaded with this project's model class, one that
    says ``deepseek_v3`` with transformers' own; everything else is opened as a source.

    Raises:
        SourceError: the folder is not whole (a missing or truncated shard, missing tensors), a weight is not finite, or
            there is no such source.
    """
    model_type = folder_model_type(ref)
    if model_type in (NATIVE_MODEL_TYPE, EXPORTED_MODEL_TYPE) or model_type in STOCK_MODEL_TYPES:
        return _load_folder(Path(ref), model_type, dtype, attn_implementation, device)
    from mla_convert.sources import open_source

    source = open_source(ref, revision=revision, token=token)
    model = source.load_model(dtype=dtype, attn_implementation=attn_implementation, device=device)
    return model, source.load_tokenizer()


def folder_model_type(ref: str) -> str | None:
    """Return ``model_type`` of the folder's config.json; None if ``ref`` is no folder with a config that says so.

    Raises:
        SourceError: config.json is not JSON.
    """
    config = Path(ref) / "config.json"
    if not config.is_file():
        return None
    try:
        return json.loads(config.read_text(encoding="utf-8")).get("model_type")
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
        raise SourceError(f"{config} is not a JSON object: {error}", "convert or download the model again") from error


def _load_folder(
    folder: Path, model_type: str | None, dtype: torch.dtype, attn_implementation: str, device: str
) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from mla_convert.sources.checkpoint import check_finite

    if model_type not in STOCK_MODEL_TYPES:
        import mla_convert.mla  # noqa: F401 - registers this project's classes with transformers
    again = "convert or download the model again"
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, attn_implementation=attn_implementation, output_loading_info=True
        )
        model, info = loaded
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:  # safetensors, tokenizers and transformers raise errors of no common kind
        raise SourceError(f"{folder} cannot be loaded: {_first_line(error)}", again) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise SourceError(f"{folder} lacks {len(missing)} tensors, among them {missing[0]}", again)
    for name, weight in model.named_parameters():
        check_finite(name, weight, folder)
    return model.to(device).eval(), tokenizer


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__

"""Random native models written as the exported class, and loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from mla_convert.export.converted import ConvertedModel, open_converted
from mla_convert.export.custom import write_custom
from mla_convert.export.targets.sizes import smallest_sizes
from mla_convert.mla import DeepseekMLAForCausalLM, MLAForCausalLM
from tests.tiny import tiny_tokenizer


def saved(model: MLAForCausalLM, folder: Path) -> ConvertedModel:
    """The model as a folder of the native format, opened as one that convert wrote."""
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return open_converted(folder)


def written(model: MLAForCausalLM, folder: Path, *, pad: int = 0, **options: Any) -> Path:
    """A folder of the exported class, with `pad` more in C and R than needed."""
    converted = saved(model, folder / "native")
    sizes = smallest_sizes(converted)
    out = folder / "exported"
    out.mkdir()
    write_custom(converted, sizes.kv_rank + pad, sizes.rope_dim + pad, out, **{"dtype": torch.float32, **options})
    return out


def exported(model: MLAForCausalLM, folder: Path, **options: Any) -> DeepseekMLAForCausalLM:
    """The exported class with the model's weights, loaded without remote code."""
    dtype = options.get("dtype", torch.float32)
    return AutoModelForCausalLM.from_pretrained(written(model, folder, **options), dtype=dtype).eval()

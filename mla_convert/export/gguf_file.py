"""Writing a GGUF file, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mla_convert.errors import FormatError, OutputError
from mla_convert.export.gguf_tokenizer import GGUFTokenizer

# ExportOptions' dtype -> the name of the tensors' type in GGUF.
TYPES: Mapping[str, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}

_Q8_BLOCK = 32


def import_gguf() -> ModuleType:
    """The ``gguf`` package.

    Raises:
        FormatError: it is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise FormatError("writing GGUF files needs the gguf package", 'pip install "mla-convert[gguf]"') from error
    return gguf


def stored_type(name: str, shape: tuple[int, ...], wanted: str) -> str:
    """Return the GGUF type that a tensor of `shape` (rows first) is stored as when `wanted` is asked for.

    Norms are float32, as llama.cpp asks for. So is the projection to the latent in F16 and Q8_0 files: its rows are
    scaled down, and both lose what is small. Rows that Q8_0's blocks of 32 do not divide stay F16.
    """
    if len(shape) == 1 or (name.endswith("attn_kv_a_mqa.weight") and wanted in ("F16", "Q8_0")):
        return "F32"
    return "F16" if wanted == "Q8_0" and shape[-1] % _Q8_BLOCK else wanted


def write_gguf(
    path: Path,
    architecture: str,
    fields: Mapping[str, Any],
    tokenizer: GGUFTokenizer,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, Tensor]],
    wanted: str,
) -> None:
    """Write a file whose tensors come in the order of `shapes`, each converted and written when its turn comes.

    Args:
        fields: metadata below ``architecture.``; their Python types decide the types in the file.
        wanted: see :func:`stored_type`.

    Raises:
        FormatError: the ``gguf`` package is missing, or float16 cannot hold a weight.
        OutputError: the file cannot be written.
        ValueError: the tensors are not those of `shapes`.
    """
    gguf = import_gguf()
    writer = gguf.GGUFWriter(path, architecture)
    file_type = {"F32": "ALL_F32"}.get(wanted, f"MOSTLY_{wanted}")
    writer.add_file_type(gguf.LlamaFileType[file_type])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in fields.items():
        _add(writer, f"{architecture}.{key}", value)
    _add_tokenizer(writer, tokenizer)
    types = {name: gguf.GGMLQuantizationType[stored_type(name, shape, wanted)] for name, shape in shapes.items()}
    for name, shape in shapes.items():
        block, size = gguf.GGML_QUANT_SIZES[types[name]]
        count = int(np.prod(shape))
        writer.add_tensor_info(name, shape, np.dtype(np.float32), count // block * size, raw_dtype=types[name])
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for (name, tensor), expected in zip(tensors, shapes, strict=True):
            if name != expected or tuple(tensor.shape) != shapes[name]:
                raise ValueError(f"tensor {name} {tuple(tensor.shape)} came in the place of {expected}")
            writer.write_tensor_data(_stored(name, tensor, types[name], gguf))
    except OSError as error:
        why = error.strerror or f"the disk did not take all of it ({error})"  # numpy's error has no number
        raise OutputError(
            f"cannot write {path}: {why}", "free some disk space or choose another output folder"
        ) from error
    finally:
        writer.close()


def _stored(name: str, tensor: Tensor, kind: Any, gguf: ModuleType) -> np.ndarray:
    values = tensor.to(torch.float32).contiguous().numpy()
    if kind.name == "F16" and np.abs(values).max(initial=0.0) > np.finfo(np.float16).max:
        raise FormatError(f"float16 cannot hold a weight of {name}", "--dtype bfloat16 or float32")
    return gguf.quants.quantize(values, kind)


def _add(writer: Any, key: str, value: bool | int | float | str) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case _:
            writer.add_string(key, value)


def _add_tokenizer(writer: Any, tokenizer: GGUFTokenizer) -> None:
    writer.add_tokenizer_model(tokenizer.model)
    writer.add_tokenizer_pre(tokenizer.pre)
    writer.add_token_list(list(tokenizer.tokens))
    writer.add_token_types([int(kind) for kind in tokenizer.kinds])
    if tokenizer.scores:
        writer.add_token_scores(list(tokenizer.scores))
    if tokenizer.merges:
        writer.add_token_merges(list(tokenizer.merges))
    for name, row in tokenizer.ids.items():
        getattr(writer, f"add_{name}_token_id")(row)
    writer.add_add_bos_token(tokenizer.add_bos)
    writer.add_add_eos_token(tokenizer.add_eos)
    writer.add_add_space_prefix(tokenizer.add_space)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)

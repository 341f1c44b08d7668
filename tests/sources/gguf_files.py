"""Tiny GGUF files as llama.cpp's converter would write them, from the models of ``tests.tiny``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import PreTrainedModel

from tests.tiny import VOCAB_SIZE, tiny_tokenizer

_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    architecture: str = "llama",
    *,
    quantisation: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    extra_metadata: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write ``model`` to ``path``; matrices in ``quantisation``, vectors in float32; returns ``path``.

    ``extra_metadata`` keys are below the architecture; strings, integers and floats are written as such.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(VOCAB_SIZE)
    for key, value in (extra_metadata or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(f"{architecture}.{key}", value)
    _add_tokenizer(writer)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = value.float().numpy()
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            array = _interleaved(array, heads)
        _add_tensor(writer, _gguf_name(name), array, quantisation)
    for name, array in (extra_tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokenizer = tiny_tokenizer()
    tokens = [tokenizer.convert_ids_to_tokens(i) for i in range(VOCAB_SIZE - 1)]
    tokens.append("th")  # what the merge makes
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (VOCAB_SIZE - 2))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(7)


def _interleaved(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from [real parts, imaginary parts] to pairs side by side, one row at a time."""
    out = np.empty_like(array)
    dim = array.shape[0] // heads
    for head in range(heads):
        for pair in range(dim // 2):
            out[head * dim + 2 * pair] = array[head * dim + pair]
            out[head * dim + 2 * pair + 1] = array[head * dim + pair + dim // 2]
    return out


def _gguf_name(name: str) -> str:
    outside = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if not name.startswith("model.layers."):
        return outside.get(name, "output.weight")
    _, _, layer, rest = name.split(".", 3)
    stem, _, suffix = rest.rpartition(".")
    return f"blk.{layer}.{_NAMES[stem]}.{suffix}"


def _add_tensor(writer: gguf.GGUFWriter, name: str, array: np.ndarray, quantisation: gguf.GGMLQuantizationType) -> None:
    if array.ndim == 1 or quantisation == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, np.ascontiguousarray(array))
    else:
        writer.add_tensor(name, gguf.quants.quantize(array, quantisation), raw_dtype=quantisation)

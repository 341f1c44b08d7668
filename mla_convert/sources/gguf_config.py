"""The transformers config of a GGUF file, from its metadata.

transformers reads the same metadata, but leaves out RoPE scaling, the ids of special tokens, biases and sliding
windows of these architectures, and would go on with defaults in their place. Here what cannot be expressed is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mla_convert.errors import SourceError, UnsupportedArchitectureError
from mla_convert.sources.gguf_reader import import_gguf
from mla_convert.sources.refusals import refuse_gguf_architecture

if TYPE_CHECKING:
    from gguf import GGUFReader

# GGUF architecture -> the transformers class that computes the same. llama.cpp files Mistral under "llama".
ARCHITECTURES: Mapping[str, str] = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}

# Architectures whose query and key rows llama.cpp interleaves.
INTERLEAVED = ("llama",)

_SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
}
_TOKEN_IDS = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}
# Metadata that changes the result and that these architectures do not have: key -> harmless values.
_FOREIGN = {
    "expert_count": (None, 0),
    "attention.scale": (None, 0.0),
    "attention.causal": (None, True),
    "attn_logit_softcapping": (None, 0.0),
    "final_logit_softcapping": (None, 0.0),
    "logit_scale": (None, 0.0, 1.0),
    "residual_scale": (None, 0.0, 1.0),
    "embedding_scale": (None, 0.0, 1.0),
    "rope.scaling.attn_factor": (None, 0.0, 1.0),
    "rope.scaling.yarn_attn_factor": (None, 0.0, 1.0),
    "rope.scaling.yarn_ext_factor": (None, -1.0, 1.0),
    "rope.scaling.yarn_beta_fast": (None, 32.0),
    "rope.scaling.yarn_beta_slow": (None, 1.0),
    "rope.scaling.yarn_log_multiplier": (None, 0.0),
    "rope.scale_linear": (None, 0.0, 1.0),
}


def gguf_architecture(reader: GGUFReader, path: Path) -> str:
    """The ``general.architecture`` of the file.

    Raises:
        UnsupportedArchitectureError: it is not one of :data:`ARCHITECTURES`.
    """
    found = str(_value(reader, "general.architecture"))
    refuse_gguf_architecture(found, path.name, tuple(ARCHITECTURES))
    return found


def gguf_config(reader: GGUFReader, path: Path) -> dict[str, Any]:
    """The fields of a transformers config, ``architectures`` among them.

    Raises:
        UnsupportedArchitectureError: the architecture has no adapter, or the metadata asks for something its class
            cannot do.
        SourceError: the metadata lacks a size.
    """
    kind = gguf_architecture(reader, path)
    for key, harmless in _FOREIGN.items():
        value = _value(reader, f"{kind}.{key}")
        if value not in harmless:
            raise UnsupportedArchitectureError(
                f"'{path.name}' sets {kind}.{key} = {value}, which {ARCHITECTURES[kind]} cannot express",
                "use the model's original checkpoint, or one of a plain model of this family",
            )
    config: dict[str, Any] = {"architectures": [ARCHITECTURES[kind]]}
    for key, name in _SIZES.items():
        value = _value(reader, f"{kind}.{key}")
        if value is None or isinstance(value, list):
            raise SourceError(f"'{path.name}' states no single {kind}.{key}", "use a file converted by llama.cpp")
        config[name] = value
    heads = config["num_attention_heads"]
    kv_heads = _value(reader, f"{kind}.attention.head_count_kv") or heads
    if isinstance(kv_heads, list):
        raise UnsupportedArchitectureError(
            f"the layers of '{path.name}' have KV heads of their own number", "use a source whose layers are all alike"
        )
    config["num_key_value_heads"] = kv_heads
    config["head_dim"] = _head_dim(reader, kind, path, config["hidden_size"] // heads)
    names = {tensor.name for tensor in reader.tensors}
    embedding = next((tensor for tensor in reader.tensors if tensor.name == "token_embd.weight"), None)
    if embedding is not None:
        config["vocab_size"] = int(embedding.shape[1])
    config["tie_word_embeddings"] = "output.weight" not in names
    for key, name in _TOKEN_IDS.items():
        config[name] = _value(reader, key)
    if kind == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in names
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in names
        window = _value(reader, "llama.attention.sliding_window")
        if window:
            config |= {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    config["rope_parameters"] = _rope_parameters(reader, kind, path, config["head_dim"])
    return config


def _head_dim(reader: GGUFReader, kind: str, path: Path, default: int) -> int:
    """The head dim K, after checking that values have the same and that all of it rotates."""
    head_dim = _value(reader, f"{kind}.attention.key_length") or default
    for key in ("attention.value_length", "rope.dimension_count"):
        other = _value(reader, f"{kind}.{key}") or head_dim
        if other != head_dim:
            raise UnsupportedArchitectureError(
                f"'{path.name}' sets {kind}.{key} = {other} for heads of {head_dim} dims",
                "use a source whose heads have one size and rotate whole",
            )
    return int(head_dim)


def _rope_parameters(reader: GGUFReader, kind: str, path: Path, head_dim: int) -> dict[str, Any]:
    """transformers' ``rope_parameters``, from the scaling keys or the stored factors of Llama 3."""
    theta = float(_value(reader, f"{kind}.rope.freq_base") or 10000.0)
    scaling = _value(reader, f"{kind}.rope.scaling.type") or "none"
    factor = _value(reader, f"{kind}.rope.scaling.factor") or 1.0
    original = _value(reader, f"{kind}.rope.scaling.original_context_length")
    factors = next((tensor for tensor in reader.tensors if tensor.name == "rope_freqs.weight"), None)
    if factors is not None:
        stored = import_gguf().quants.dequantize(factors.data, factors.tensor_type).reshape(-1)
        if not np.all(stored == 1.0):
            return _llama3_parameters(np.asarray(stored), theta, head_dim, path)
    if scaling == "none" or factor == 1.0:
        return {"rope_type": "default", "rope_theta": theta}
    if scaling == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": float(factor)}
    if scaling == "yarn" and original:
        yarn = {"rope_type": "yarn", "rope_theta": theta, "factor": float(factor)}
        return yarn | {"original_max_position_embeddings": int(original)}
    raise UnsupportedArchitectureError(
        f"'{path.name}' scales RoPE by '{scaling}'", "use the model's original checkpoint, or an unscaled one"
    )


def _llama3_parameters(stored: np.ndarray, theta: float, head_dim: int, path: Path) -> dict[str, Any]:
    """The Llama-3 parameters whose factors are the stored ones.

    The file keeps only the factor of each frequency. All published Llama 3.1 to 3.3 models use low 1, high 4 and an
    original context of 8192; the scale is the largest factor. The result is accepted only when it reproduces every
    stored factor to float32 accuracy.
    """
    parameters: dict[str, Any] = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": float(stored.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = llama3_factors(parameters, head_dim)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-5, atol=0):
        raise UnsupportedArchitectureError(
            f"the RoPE factors stored in '{path.name}' are not those of Llama 3's scaling",
            "use the model's original checkpoint, whose config states the scaling",
        )
    return parameters


def llama3_factors(parameters: Mapping[str, Any], head_dim: int) -> np.ndarray:
    """What Llama 3's scaling divides each of the K/2 frequencies by.

    Frequencies of wavelength below original/high stay, those above original/low are divided by the factor, and between
    them the divisor is interpolated in its inverse.
    """
    frequencies = parameters["rope_theta"] ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = parameters["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / parameters["factor"] + smooth)


def _value(reader: GGUFReader, key: str) -> Any:
    """A metadata value, or None; float32 values as the shortest decimal that means them (1e-05, not 9.99999974e-06)."""
    field = reader.get_field(key)
    if field is None:
        return None
    value = field.contents()
    if isinstance(value, float) and field.types[-1] == import_gguf().GGUFValueType.FLOAT32:
        return float(str(np.float32(value)))
    return value

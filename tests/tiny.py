"""Tiny random source models: two layers, four query heads of 16 dims, and a byte-level tokenizer trained on the spot.

Weights are scaled so that attention is far from uniform, norms are not all one and no bias is zero: a conversion that
loses one of them shows it in the logits.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.core_model_loading import revert_weight_conversion

VOCAB_SIZE = 288
HIDDEN_SIZE = 64
HEAD_DIM = 16
HEADS = 4
KV_HEADS = {"MHA": 4, "GQA": 2, "MQA": 1}

# Original context 32 puts the second of the eight frequencies between the two cut-offs and the others on both sides.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# Weights that make queries and keys, as the families name them.
_QUERIES_AND_KEYS = (".q_proj.", ".k_proj.", ".qkv_proj.", ".query_key_value.", ".c_attn.", ".Wqkv.")

CHAT_TEMPLATE = "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}"


def tiny_llama(
    kind: str = "GQA",
    *,
    bias: bool = False,
    mlp_bias: bool = False,
    tied: bool = False,
    llama3: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **fields: Any,
) -> PreTrainedModel:
    """A random ``LlamaForCausalLM``; ``bias`` is on all four attention projections, ``fields`` go to its config."""
    rope = dict(LLAMA3_ROPE) if llama3 else {"rope_type": "default", "rope_theta": 10000.0}
    config = LlamaConfig(
        **{**sizes(kind, tied), "attention_bias": bias, "mlp_bias": mlp_bias, "rope_parameters": rope, **fields}
    )
    return randomised(LlamaForCausalLM, config, dtype, seed)


def tiny_mistral(
    kind: str = "GQA",
    *,
    window: int | None = None,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **fields: Any,
) -> PreTrainedModel:
    """A random ``MistralForCausalLM`` with a sliding window of ``window`` tokens in every layer, or none."""
    config = MistralConfig(**{**sizes(kind, tied), "sliding_window": window, **fields})
    return randomised(MistralForCausalLM, config, dtype, seed)


def tiny_qwen2(
    kind: str = "GQA",
    *,
    window: int | None = None,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **fields: Any,
) -> PreTrainedModel:
    """A random ``Qwen2ForCausalLM``, with Q, K and V biases; ``window`` holds from the second layer on."""
    windows = {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": 1}
    common = sizes(kind, tied)
    del common["head_dim"]  # the family's config has no such field; it is D/H
    return randomised(Qwen2ForCausalLM, Qwen2Config(**{**common, **windows, **fields}), dtype, seed)


def tiny_qwen3(
    kind: str = "GQA",
    *,
    window: int | None = None,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **fields: Any,
) -> PreTrainedModel:
    """A random ``Qwen3ForCausalLM``, with norms of query and key heads; ``window`` holds from the second layer on."""
    windows = {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": 1}
    config = Qwen3Config(**{**sizes(kind, tied), **windows, **fields})
    return randomised(Qwen3ForCausalLM, config, dtype, seed)


def tiny_phi3(
    kind: str = "GQA",
    *,
    window: int | None = None,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **fields: Any,
) -> PreTrainedModel:
    """A random ``Phi3ForCausalLM``, with fused projections and a window in every layer, or none."""
    common = sizes(kind, tied)
    del common["head_dim"]  # the family's config has no such field; it is D/H
    return randomised(Phi3ForCausalLM, Phi3Config(**{**common, "sliding_window": window, **fields}), dtype, seed)


def tiny_gemma2(
    kind: str = "GQA",
    *,
    window: int = 8,
    tied: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **fields: Any,
) -> PreTrainedModel:
    """A random ``Gemma2ForCausalLM``: window and none in turn, caps that bend scores and logits, a scale of its own."""
    own = {"sliding_window": window, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}
    config = Gemma2Config(**{**sizes(kind, tied), **own, "query_pre_attn_scalar": 24, **fields})
    return randomised(Gemma2ForCausalLM, config, dtype, seed, norm_weight=0.0)


def tiny_gemma3(
    kind: str = "GQA",
    *,
    window: int = 8,
    tied: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **fields: Any,
) -> PreTrainedModel:
    """A random ``Gemma3ForCausalLM`` of three layers: two with a window, and one without, whose RoPE is slower."""
    own = {
        "num_hidden_layers": 3,
        "sliding_window": window,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
        },
    }
    config = Gemma3TextConfig(**{**sizes(kind, tied), **own, **fields})
    return randomised(Gemma3ForCausalLM, config, dtype, seed, norm_weight=0.0)


def tiny_olmo2(
    kind: str = "GQA", *, tied: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0, **fields: Any
) -> PreTrainedModel:
    """A random ``Olmo2ForCausalLM``, with output norms and norms of all queries and of all keys together."""
    common = sizes(kind, tied)
    del common["head_dim"]  # the family's config has no such field; it is D/H
    return randomised(Olmo2ForCausalLM, Olmo2Config(**{**common, **fields}), dtype, seed)


def save_source(model: PreTrainedModel, folder: Path, shards: int = 1) -> Path:
    """Write ``model`` with a tokenizer as a Hugging Face folder of ``shards`` safetensors files; returns ``folder``.

    Tensors have the names and shapes of files on the hub: experts that a class holds stacked are written one by one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    save_tensors(stored_tensors(model), folder, shards)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def stored_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors of ``model`` as its files hold them; of tied embeddings only the input's."""
    tensors = model.state_dict()
    if model.config.tie_word_embeddings:
        output = model.get_output_embeddings()
        del tensors[next(f"{path}.weight" for path, module in model.named_modules() if module is output)]
    stored = revert_weight_conversion(model, tensors)
    return {name: value.detach().clone().contiguous() for name, value in stored.items()}


def save_tensors(tensors: dict[str, torch.Tensor], folder: Path, shards: int = 1) -> None:
    """Write ``tensors`` as ``shards`` safetensors files, with an index when there are several."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard::shards]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of :data:`VOCAB_SIZE` tokens that can write any text, with a chat template."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()), bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@functools.cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([__doc__ or "", save_source.__doc__ or "", "the cat sat on the mat. " * 8], trainer)
    return tokenizer.to_str()


def sizes(kind: str, tied: bool) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS[kind],
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": tied,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    }


def randomised(
    model_class: Any, config: Any, dtype: torch.dtype = torch.float32, seed: int = 0, *, norm_weight: float = 1.0
) -> PreTrainedModel:
    """The model with every parameter drawn anew: scores have a standard deviation of about 2.5.

    Args:
        norm_weight: what the weights of norms are drawn around; 0 where a family adds 1 to them.
    """
    model = model_class(config).eval()
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(".bias"):
                parameter.copy_(0.3 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(norm_weight + 0.2 * noise)
            elif id(parameter) in embeddings:
                parameter.copy_(0.5 * noise)
            elif any(part in name for part in _QUERIES_AND_KEYS):
                parameter.copy_(0.2 * noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    # Parameters alone: model.to() would round the float32 rotary frequencies as well.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model

"""The native output format: this project's own transformers class, shipped beside the weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from mla_convert.export.carried import common_config, common_names, copied_tensors
from mla_convert.export.shards import ShardWriter
from mla_convert.mla import (
    MLAConfig,
    MLAForCausalLM,
    MLAWeights,
    attention_mla,
    blocks_mla,
    configuration_mla,
    modeling_mla,
)
from mla_convert.mla.names import to_hf
from mla_convert.mla.spec_fields import attention_fields, block_fields, rope_fields, window_fields
from mla_convert.progress import Progress, silent
from mla_convert.sources import Source
from mla_convert.spec import MLAShape, RopeSpec, SourceSpec

AUTO_MAP = {
    "AutoConfig": "configuration_mla.MLAConfig",
    "AutoModel": "modeling_mla.MLAModel",
    "AutoModelForCausalLM": "modeling_mla.MLAForCausalLM",
}


def write_native(
    source: Source,
    layers: Iterable[tuple[int, MLAWeights]],
    shape: MLAShape | Sequence[MLAShape],
    folder: Path,
    *,
    dtype: torch.dtype,
    max_shard_size: int | str = "5GB",
    progress: Progress | None = None,
) -> None:
    """Write a folder that ``AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`` loads.

    `layers` yields every layer once, with its index, in any order. It is consumed one layer at a time, and the copied
    tensors are read and written one at a time, so that at most one layer is in memory.
    `shape` is that of every layer, or there is one for each.

    Raises:
        FormatError: the source has sliding windows of different lengths, or layers' RoPE differs in more than its
            frequencies.
        OutputError: the folder cannot be written.
        ValueError: a layer is missing or of another shape, or only some layers have a bias.
    """
    progress = progress or silent
    window_fields(source.spec)
    rope_fields(_ropes(source.spec), [()] * source.spec.num_layers)
    shapes = _by_layer(shape, source.spec)
    written: dict[int, frozenset[str]] = {}
    slots: dict[int, tuple[list[float], tuple[int, ...] | None]] = {}
    with ShardWriter(folder, max_shard_size) as writer:
        for name, tensor in copied_tensors(source, None, dtype):
            writer.add(name, tensor)
        for i, weights in layers:
            if weights.shape != shapes[i]:
                raise ValueError(f"layer {i} has shape {weights.shape}, expected {shapes[i]}")
            tensors = to_hf(weights)
            for name, tensor in tensors.items():
                writer.add(f"model.layers.{i}.self_attn.{name}", tensor.to(dtype))
            for name, tensor in copied_tensors(source, i, dtype):
                writer.add(name, tensor)
            written[i], slots[i] = frozenset(tensors), (list(weights.inv_freq), weights.pairs)
            del weights, tensors  # or they would live on while the next layer is made
            progress("write", len(written), source.spec.num_layers)
    names = common_names(written, source.spec.num_layers)
    frequencies, pairs = zip(*(slots[i] for i in range(source.spec.num_layers)), strict=True)
    config = native_config(
        source, shapes, dtype=dtype, names=names, rope_inv_freq=list(frequencies), rope_pairs=list(pairs)
    )
    config.save_pretrained(folder)
    for module in (configuration_mla, attention_mla, blocks_mla, modeling_mla):
        shutil.copyfile(str(module.__file__), folder / Path(str(module.__file__)).name)
    source.save_companions(folder)


def native_config(
    source: Source,
    shape: MLAShape | Sequence[MLAShape],
    *,
    dtype: torch.dtype,
    names: frozenset[str],
    rope_inv_freq: list[list[float]],
    rope_pairs: Sequence[tuple[int, ...] | None],
) -> MLAConfig:
    """Return the native config of layers that hold the tensors `names` and turn at `rope_inv_freq` [layers, R/2].

    Args:
        rope_pairs: which pair of a source head each slot turns as, by layer; needed where RoPE changes with length.

    Raises:
        FormatError: layers' RoPE differs in more than its frequencies.
        ValueError: layers differ in their content or value dims, or pairs that are needed are not known.
    """
    spec = source.spec
    shapes = _by_layer(shape, spec)
    if len({(one.nope_dim, one.value_dim) for one in shapes}) > 1:
        raise ValueError(f"content and value dims must be those of all layers, got {sorted(set(shapes), key=repr)}")
    ranks, rope_dims = [one.kv_rank for one in shapes], [one.rope_dim for one in shapes]
    alike = len(set(shapes)) == 1
    fields: dict[str, Any] = {
        "architectures": [MLAForCausalLM.__name__],
        "auto_map": AUTO_MAP,
        "dtype": dtype,
        "kv_lora_rank": max(ranks),
        "qk_rope_head_dim": max(rope_dims),
        "qk_nope_head_dim": shapes[0].nope_dim,
        "v_head_dim": shapes[0].value_dim,
        "kv_lora_ranks": None if alike else ranks,
        "qk_rope_head_dims": None if alike else rope_dims,
        "rope_inv_freq": rope_inv_freq,
        "max_position_embeddings": spec.max_position_embeddings,
        "query_bias": not names.isdisjoint(("q_proj.bias", "q_a_proj.bias")),
        "key_norm_bias": "k_norm_proj.bias" in names,
        "latent_bias": "kv_a_proj_with_mqa.bias" in names,
        "output_bias": "o_proj.bias" in names,
        "tie_word_embeddings": spec.tie_word_embeddings,
    }
    described = (
        window_fields(spec) | attention_fields(spec) | block_fields(spec) | rope_fields(_ropes(spec), rope_pairs)
    )
    return MLAConfig(**common_config(source) | fields | described)


def _ropes(spec: SourceSpec) -> list[RopeSpec]:
    return [spec.rope_of(layer) for layer in range(spec.num_layers)]


def _by_layer(shape: MLAShape | Sequence[MLAShape], spec: SourceSpec) -> tuple[MLAShape, ...]:
    shapes = (shape,) * spec.num_layers if isinstance(shape, MLAShape) else tuple(shape)
    if len(shapes) != spec.num_layers:
        raise ValueError(f"{len(shapes)} shapes for {spec.num_layers} layers")
    return shapes

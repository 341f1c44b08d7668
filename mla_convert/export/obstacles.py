"""What of a model no form but the native one holds: whatever DeepSeek's decoder, in any engine, has not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

from mla_convert.features import block_features
from mla_convert.spec import BlockSpec, SourceSpec

if TYPE_CHECKING:
    from mla_convert.mla import MLAConfig


def source_obstacles(spec: SourceSpec) -> Iterator[str]:
    """Why a source, once converted, cannot be written as any DeepSeek class, a sentence each; none for Llama's kin."""
    yield from _of_attention(
        spec.attention_softcap,
        alibi=spec.alibi_slopes is not None,
        qk_norm=None if spec.qk_norm is None else spec.qk_norm.scope,
        update=next((rope.update.kind for rope in (spec.rope, *(spec.layer_ropes or ())) if rope.update), None),
    )
    yield from _of_block(spec.block)


def model_obstacles(config: MLAConfig) -> Iterator[str]:
    """Why a converted model cannot be written as any DeepSeek class, a sentence each."""
    yield from _of_attention(
        config.attention_softcap,
        alibi=config.alibi_slopes is not None,
        qk_norm=config.qk_norm,
        update=None if config.rope_update is None else str(config.rope_update["kind"]),
    )
    if config.rope_attention_scaling != 1.0 and any(0.0 in row for row in config.rope_inv_freq or ()):
        yield "Some RoPE slots do not turn and have no factor, and DeepSeek's attention has one factor for all slots."
    given = {field.name: getattr(config, field.name) for field in fields(BlockSpec)}
    yield from _of_block(BlockSpec(**given))


def engine_obstacles(spec: SourceSpec) -> Iterator[str]:
    """Why the DeepSeek classes that engines have themselves cannot hold a source or a converted model, besides."""
    biases = {
        "queries": spec.query_bias,
        "the latent": spec.key_bias or spec.value_bias,
        "the attention's output": spec.output_bias,
        "the feed-forward layers": spec.mlp_bias,
    }
    found = [where for where, there in biases.items() if there]
    if found:
        yield f"Engines' DeepSeek classes have no biases, the model has some on {', '.join(found)}."
    if spec.hidden_act != "silu":
        yield f"Engines' DeepSeek classes compute SiLU, the model {spec.hidden_act}."


def held_by(spec: SourceSpec) -> Mapping[str, tuple[str, ...]]:
    """Each output format and export target, and why it cannot hold a source once converted; empty where it can.

    What depends on the sizes of a conversion is left to ``mla-convert export --dry-run``.
    """
    everywhere = tuple(source_obstacles(spec))
    stock = (*everywhere, *engine_obstacles(spec))
    one_rope = ("Layers have RoPE of their own kinds, and the class has one.",) if spec.layer_ropes is not None else ()
    ungated = ("The class has no biases in its feed-forward layers, the model has.",) if spec.mlp_bias else ()
    return {
        "native": (),
        "deepseek": (*everywhere, *one_rope, *ungated),
        "transformers": everywhere,
        "vllm": everywhere,
        "sglang": stock,
        "gguf": stock,
    }


def _of_attention(softcap: float | None, *, alibi: bool, qk_norm: str | None, update: str | None) -> Iterator[str]:
    if softcap:
        yield f"Attention scores are capped at {softcap:g}, which DeepSeek's attention does not do."
    if alibi:
        yield "Scores have a bias by distance (ALiBi), which DeepSeek's attention has not."
    if qk_norm is not None:
        over = "each head" if qk_norm == "head" else "all heads together"
        yield f"Queries and keys are normalised over {over}, which DeepSeek's attention does not do."
    if update is not None:
        yield f"RoPE frequencies change with the length of the input ({update}), which these forms do not write."


def _of_block(block: BlockSpec) -> Iterator[str]:
    for what in block_features(block):
        yield f"{what[0].upper()}{what[1:]}, which DeepSeek's decoder does not do."

"""What of a model no form but the native one holds: whatever DeepSeek's decoder, in any engine, has not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

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
    plain = BlockSpec()
    checks = (
        (block.norm != plain.norm, "the norms are LayerNorms"),
        (block.norm_offset != plain.norm_offset, f"{block.norm_offset:g} is added to the norms' weights"),
        (block.input_norms != plain.input_norms, "there are no norms before attention and feed-forward block"),
        (block.output_norms, "what attention and feed-forward block add is normalised"),
        (block.parallel_residual, "attention and feed-forward block run side by side"),
        (block.mlp != plain.mlp, "the feed-forward block has no gate"),
        (block.num_experts > 0, f"the feed-forward block is a mixture of {block.num_experts} experts"),
        (block.embedding_scale != plain.embedding_scale, f"embeddings are scaled by {block.embedding_scale:g}"),
        (block.residual_scale != plain.residual_scale, f"residual branches are scaled by {block.residual_scale:g}"),
        (block.logits_scale != plain.logits_scale, f"logits are scaled by {block.logits_scale:g}"),
        (bool(block.final_logit_softcap), f"logits are capped at {block.final_logit_softcap or 0:g}"),
        (block.learned_positions > 0, "positions are learned embeddings"),
        (block.embedding_norm, "the embeddings are normalised"),
    )
    for found, what in checks:
        if found:
            yield f"{what[0].upper()}{what[1:]}, which DeepSeek's decoder does not do."

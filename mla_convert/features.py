"""What a source has that Llama has not, in sentences, and what becomes of it; from its description alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from mla_convert.spec import BlockSpec, RopeSpec, SourceSpec

FULL_RANK = "At full rank, with all RoPE slots, the converted model computes what the source does, up to rounding."
BELOW = (
    "Below full rank keys and values are approximated; `mla-convert evaluate` measures what that loses, nothing else "
    "does."
)

TRAITS = (
    *("windows", "softcaps", "QK-norm", "ALiBi", "learned positions", "partial RoPE", "neighbouring pairs"),
    *("RoPE by layer", "scaled RoPE", "LayerNorm", "output norms", "parallel block", "ungated", "experts", "biases"),
    "scales",
)


def features(spec: SourceSpec) -> tuple[str, ...]:
    """What is special about a source, a clause each; none for a plain Llama."""
    return (*_attention(spec), *_rope(spec), *_windows(spec), *block_features(spec.block), *_biases(spec))


def traits(spec: SourceSpec) -> tuple[str, ...]:
    """The same in a word or two each, without a model's sizes: those of :data:`TRAITS` that it has, in their order."""
    block, ropes = spec.block, _ropes(spec)
    factors = (block.embedding_scale, block.residual_scale, block.logits_scale)
    found = (
        any(window is not None for window in spec.windows),
        bool(spec.attention_softcap or block.final_logit_softcap),
        spec.qk_norm is not None,
        spec.alibi_slopes is not None,
        block.learned_positions > 0,
        any(0 < rope.dim < spec.head_dim for rope in ropes),
        any(rope.interleaved for rope in ropes),
        len(set(map(rope_sentence, ropes))) > 1,
        any(rope.kind not in ("default", "none") for rope in ropes),
        block.norm == "layer",
        block.output_norms,
        block.parallel_residual,
        block.mlp == "plain",
        block.num_experts > 0,
        any(_biases(spec)),
        any(factor != 1.0 for factor in factors) or not _usual_scale(spec),
    )
    return tuple(trait for trait, there in zip(TRAITS, found, strict=True) if there)


def cached_besides(spec: SourceSpec) -> str | None:
    """What the converted cache holds beside C + R, and why it could not be absorbed; None where that is all."""
    if spec.qk_norm is None:
        return None
    over = "each KV head's keys" if spec.qk_norm.scope == "head" else "the keys of all heads together"
    count = spec.key_scales
    numbers = "one number" if count == 1 else f"{count} numbers"
    return (
        f"Keys are normalised, which no matrix absorbs: the cache holds {numbers} a token and layer beside C + R, the "
        f"inverse root mean square of {over}, and so stays exact."
    )


def block_features(block: BlockSpec) -> Iterator[str]:
    """What a decoder has around its attention that Llama's has not, a clause each."""
    plain = BlockSpec()
    experts = f"the feed-forward block is a mixture of {block.num_experts} experts, {block.num_experts_per_tok} a token"
    checks = (
        (block.norm != plain.norm, f"the norms are LayerNorms{' with biases' if block.norm_bias else ''}"),
        (block.norm_offset != plain.norm_offset, f"{block.norm_offset:g} is added to the norms' weights"),
        (block.input_norms != plain.input_norms, "there are no norms before attention and feed-forward block"),
        (block.output_norms, "what attention and feed-forward block add is normalised"),
        (block.parallel_residual, "attention and feed-forward block run side by side"),
        (block.mlp != plain.mlp, "the feed-forward block has no gate"),
        (block.num_experts > 0, experts),
        (block.shared_expert_intermediate_size > 0, "one more expert answers every token"),
        (block.embedding_scale != plain.embedding_scale, f"embeddings are scaled by {block.embedding_scale:.6g}"),
        (block.residual_scale != plain.residual_scale, f"residual branches are scaled by {block.residual_scale:.6g}"),
        (block.logits_scale != plain.logits_scale, f"logits are scaled by {block.logits_scale:.6g}"),
        (bool(block.final_logit_softcap), f"logits are capped at {block.final_logit_softcap or 0:g}"),
        (block.learned_positions > 0, f"{block.learned_positions} learned positions are added to the embeddings"),
        (block.embedding_norm, "the embeddings are normalised"),
    )
    yield from (what for found, what in checks if found)


def _attention(spec: SourceSpec) -> Iterator[str]:
    if not _usual_scale(spec):
        yield f"attention scores are scaled by {spec.attention_scale:.6g} instead of {spec.head_dim**-0.5:.6g}"
    if spec.attention_softcap:
        yield f"attention scores are capped at {spec.attention_softcap:g}"
    if spec.alibi_slopes is not None:
        yield "attention scores have a bias by distance (ALiBi)"
    if spec.qk_norm is not None:
        over = "each head" if spec.qk_norm.scope == "head" else "all heads together"
        yield f"queries and keys are normalised over {over}"


def _usual_scale(spec: SourceSpec) -> bool:
    return math.isclose(spec.attention_scale, spec.head_dim**-0.5, rel_tol=1e-6)


def _rope(spec: SourceSpec) -> Iterator[str]:
    kinds = dict.fromkeys(map(rope_sentence, _ropes(spec)))
    if len(kinds) > 1:
        yield f"layers differ in RoPE ({'; '.join(kinds)})"
    elif spec.rope.dim == 0:
        yield "no dims rotate"
    elif spec.rope.dim < spec.head_dim:
        yield f"{spec.rope.dim} of a head's {spec.head_dim} dims rotate"
    updates = {rope.update.original_positions: rope.update.kind for rope in _ropes(spec) if rope.update is not None}
    for positions, kind in updates.items():
        yield f"RoPE frequencies change beyond {positions} tokens ({kind})"


def _windows(spec: SourceSpec) -> Iterator[str]:
    for window, count in _counted(spec.windows).items():
        layers = "all layers attend" if count == spec.num_layers else f"{count} of {spec.num_layers} layers attend"
        yield f"{layers} to the last {window} tokens only"


def _counted(windows: tuple[int | None, ...]) -> Mapping[int, int]:
    counts: dict[int, int] = {}
    for window in windows:
        if window is not None:
            counts[window] = counts.get(window, 0) + 1
    return counts


def _biases(spec: SourceSpec) -> Iterator[str]:
    named = {
        "queries": spec.query_bias,
        "keys": spec.key_bias,
        "values": spec.value_bias,
        "the attention's output": spec.output_bias,
        "the feed-forward block": spec.mlp_bias,
    }
    found = [name for name, there in named.items() if there]
    if found:
        yield f"there are biases on {', '.join(found)}"


def _ropes(spec: SourceSpec) -> tuple[RopeSpec, ...]:
    return (spec.rope,) if spec.layer_ropes is None else spec.layer_ropes


def rope_sentence(rope: RopeSpec) -> str:
    """A rotary embedding in a few words: its kind, base and how a head's dims pair."""
    if rope.dim == 0:
        return "none"
    theta = rope.parameters.get("rope_theta")
    base = "" if theta is None else f", theta {theta:.10g}"
    pairs = "neighbouring dims" if rope.interleaved else "dims half a head apart"
    factor = "" if rope.attention_scaling == 1.0 else f", cos and sin times {rope.attention_scaling:.6g}"
    return f"{rope.kind}{base}, {rope.dim // 2} pairs of {pairs}{factor}"

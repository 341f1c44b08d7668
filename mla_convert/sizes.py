"""How many numbers the parts of a model hold, from its description: matrices only, no norms and no biases."""

from __future__ import annotations

from mla_convert.spec import MLAShape, SourceSpec


def embedding_weights(spec: SourceSpec) -> int:
    """Numbers in the embeddings, the output head unless it is tied, and learned positions."""
    tables = spec.vocab_size * (1 if spec.tie_word_embeddings else 2) + spec.block.learned_positions
    return tables * spec.hidden_size


def feed_forward_weights(spec: SourceSpec, layer: int) -> int:
    """Numbers in the matrices of a layer's feed-forward block."""
    block, width = spec.block, spec.hidden_size
    matrices = 3 if block.mlp == "gated" else 2
    if not block.has_experts(layer):
        return matrices * width * spec.intermediate_size
    shared = block.shared_expert_intermediate_size
    experts = 3 * width * (block.num_experts * block.moe_intermediate_size + shared)
    return experts + width * (block.num_experts + bool(shared))


def source_attention(spec: SourceSpec) -> int:
    """Numbers in the matrices of a layer's attention as the source has it."""
    return 2 * spec.hidden_size * (spec.num_heads + spec.num_kv_heads) * spec.head_dim


def converted_attention(spec: SourceSpec, shape: MLAShape) -> int:
    """Numbers in the matrices of a layer's attention after conversion."""
    heads, width, dim = spec.num_heads, spec.hidden_size, spec.head_dim
    query = heads * (shape.nope_dim + shape.rope_dim)
    queries = query * width
    if spec.qk_norm is not None:  # normalised queries go through a block for each head, and keys are kept for the norm
        queries = heads * dim * width + query * dim + spec.num_kv_heads * dim * width
    down = (shape.kv_rank + shape.rope_dim) * width
    up = heads * (shape.nope_dim + shape.value_dim) * shape.kv_rank
    return queries + down + up + heads * shape.value_dim * width

"""What a conversion will need, worked out from the description of its source; reads no weights.

Memory is that of the largest of these stages, beside Python with its libraries and the statistics of calibration:

- where weight files are small enough to be verified, the source is read as transformers' class and as this project's
  decoder, each 4 bytes a weight; and at the end the decoder holds attention in float64 beside the float32 it came from
  (16 bytes a weight), and the written model is loaded too (4 bytes a weight);
- calibration holds the source's weights in float32, and what the backward pass of one context of S tokens keeps of each
  layer: 4 bytes each of 10·D + 6·(H + 2·G)·K + 2·H·S + 4·I numbers a token;
- writing holds one shard of the output in its dtype, and one layer's moments and factors in float64.

With recipe `default` at half the cache on a CPU, 1,024 tokens of calibration, SmolLM2-135M from its GGUF file took 2.91
GB where this says 3.04, and a random Llama of 124 million weights (8 layers, from safetensors) 1.84 GB where this says
1.99. Larger ones are untried.
"""

from __future__ import annotations

from dataclasses import dataclass

from mla_convert.plan import ConversionPlan
from mla_convert.spec import DTYPE_BYTES, MLAShape, SourceSpec

LIBRARIES = 600 * 2**20
SHARD = 5 * 10**9  # --max-shard-size
VERIFIED = 6 * 2**30  # bytes of weight files above which nothing is verified


@dataclass(frozen=True)
class Estimate:
    """Bytes that a conversion takes.

    Attributes:
        memory: the peak of the process.
        disk: the written folder.
        statistics: of calibration: in memory until the end, and on disk beside the folder until it is written.
    """

    memory: int
    disk: int
    statistics: int


def estimate(plan: ConversionPlan, dtype: str, file_bytes: int) -> Estimate:
    """Return what the conversion of ``plan`` into weights of ``dtype`` takes.

    Args:
        file_bytes: of the source's weight files, which decide whether the folder is verified.
    """
    spec = plan.source
    attention = sum(converted_attention(spec, shape) for shape in plan.layers)
    others = embedding_weights(spec) + sum(feed_forward_weights(spec, i) for i in range(spec.num_layers))
    source = others + spec.num_layers * source_attention(spec)
    disk = (others + attention) * DTYPE_BYTES[dtype]
    statistics = _statistics(plan)
    write = min(disk, SHARD) + _layer(spec)
    verify = max(8 * source, 8 * others + 20 * attention) if file_bytes <= VERIFIED else 0
    calibrate = 0 if plan.recipe.calibration is None else 4 * source + _context(plan)
    return Estimate(LIBRARIES + statistics + max(verify, calibrate, write), disk, statistics)


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


def _statistics(plan: ConversionPlan) -> int:
    """The sums of calibration over all layers, in float64: see :mod:`mla_convert.calibrate.statistics`."""
    spec, recipe = plan.source, plan.recipe
    if recipe.calibration is None:
        return 0
    heads, groups, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    square = spec.kv_width**2
    pairs = dim // 2 * (groups + heads) ** 2
    layer = 8 * (6 * square + heads * dim * dim + 3 * heads * dim // 2) + 16 * (pairs + heads * dim // 2)
    return spec.num_layers * layer


def _context(plan: ConversionPlan) -> int:
    """What the backward pass of one context keeps."""
    spec, calibration = plan.source, plan.recipe.calibration
    if calibration is None:
        return 0
    tokens = min(calibration.context, spec.max_position_embeddings)
    numbers = 10 * spec.hidden_size + 6 * (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    numbers += 2 * spec.num_heads * tokens + 4 * spec.intermediate_size
    layers = spec.num_layers if plan.recipe.needs_gradients else 1
    return 4 * tokens * numbers * layers


def _layer(spec: SourceSpec) -> int:
    """One layer's weights and some ten moments and factors, in float64."""
    return 8 * (10 * spec.kv_width**2 + 3 * source_attention(spec))

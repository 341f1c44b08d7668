"""What a conversion will need, worked out from the description of its source; reads no weights.

For L layers, D the width, J = 2·G·K, contexts of S tokens, tables (the embeddings, and the output head unless it is
tied), and A numbers in a layer's converted attention, memory is 0.67 GB for Python with its libraries and the
tokenizer, the source's file where it is mapped (GGUF), and the largest of these stages.

Holding the whole model of W weights, beside the statistics of all layers (:mod:`mla_convert.scratch`):

- calibration: 4·W; of each layer 4 bytes each of 10·D + 6·(H + 2·G)·K + 4·I numbers a token, which the backward pass of
  one context keeps; the scores of one layer, 12·H·S²; and 28 bytes for each word of the vocabulary at 128 positions;
- verification, where weight files are small enough for it, and otherwise as below: the converted attention in float32;
  beside it first the source's decoder around attention in float64, then the written model in float32, and in the dtype
  that it is written in where that is another.

A layer at a time, where nothing grows with the number of layers:

- calibration: a table in float32; where there are gradients the other one too, and the vocabulary's numbers as above; a
  layer in float32, its moments in float64, and one context's share of a layer as above;
- verification: a table, and the larger of another one and of two layers in float32, the source's and the written one,
  with the attention in float64.

In both ways a layer's solution takes ten matrices of J², its attention three times and A twice, in float64; a refit on
S" tokens some ten times 4·S"·D bytes beside it; and writing takes a table. Of two tables in turn both count where they
are below 1 GiB, for malloc keeps what is freed; one that is not stored in float32 is there in both dtypes while it is
read.

On a CPU with one thread, in MB of 10^6 bytes, in brackets what this says. SmolLM2-135M from its GGUF file, 2,048 tokens
of calibration, whole: `default` 2,785 (2,821), `forward` 1,733 (1,744), `fast` 2,791 (2,821), `exact` 1,929 (1,958); a
layer at a time 1,289 (1,264), 996 (996), 1,302 (1,264), 990 (996). A random Llama of four layers of width 3,072 (0.55
billion weights), 1,024 tokens, written in bfloat16: `default` whole 5,664 (5,767); a layer at a time `default` 2,389
(2,445), `forward` 2,059 (2,445), `exact` 3,531 (3,322). Larger ones and GPUs are untried.
"""

from __future__ import annotations

from dataclasses import dataclass

from mla_convert.plan import ConversionPlan
from mla_convert.scratch import Scratch, Tokens, layer_statistics, scratch, tokens_of
from mla_convert.sizes import converted_attention, embedding_weights, feed_forward_weights, source_attention
from mla_convert.spec import DTYPE_BYTES, SourceSpec

LIBRARIES = 640 * 2**20
VERIFIED = 6 * 2**30  # bytes of weight files above which nothing is verified as a whole
KEPT = 2**30  # what malloc does not keep when it is freed


@dataclass(frozen=True)
class Way:
    """Bytes that one way of working takes.

    Attributes:
        memory: the peak of the process.
        scratch: the most that lies beside the output at any one time.
        disk: the most that lies on the disk at any one time, the output among it: what calibration keeps may be gone
            when that is written.
    """

    memory: int
    scratch: int
    disk: int


@dataclass(frozen=True)
class Estimate:
    """Bytes that a conversion takes, whole or a layer at a time.

    Attributes:
        output: the written weights.
        statistics: of calibration, all layers': in files beside the output, and as a whole in memory too.
    """

    output: int
    statistics: int
    whole: Way
    by_layer: Way

    def way(self, by_layer: bool) -> Way:
        """What the way takes that works a layer at a time, or the other."""
        return self.by_layer if by_layer else self.whole


def estimate(plan: ConversionPlan, dtype: str, file_bytes: int, *, mapped: bool = False) -> Estimate:
    """Return what the conversion of ``plan`` into weights of ``dtype`` takes, on as many tokens as its recipe says.

    Args:
        file_bytes: of the source's weight files, which decide whether the folder is verified as a whole.
        mapped: whether these are read through a memory map.
    """
    tokens, output = tokens_of(plan), output_bytes(plan, dtype)
    base = LIBRARIES + (file_bytes if mapped else 0)

    def way(by_layer: bool) -> Way:
        kept = scratch(plan, tokens, by_layer=by_layer)
        read_beside = 0 if dtype == "float32" else output
        peak = _by_layer(plan, tokens) if by_layer else _whole(plan, tokens, read_beside, file_bytes <= VERIFIED)
        return Way(base + peak, kept.most, disk_bytes(kept, output))

    return Estimate(output, plan.source.num_layers * layer_statistics(plan), way(False), way(True))


def output_bytes(plan: ConversionPlan, dtype: str) -> int:
    """The written weights, without norms and biases."""
    spec = plan.source
    attention = sum(converted_attention(spec, shape) for shape in plan.layers)
    return (_others(spec) + attention) * DTYPE_BYTES[dtype]


def disk_bytes(kept: Scratch, output: int, done: int = 0) -> int:
    """The most that lies on a disk from now on, the output among it, when so many layers' statistics are there."""
    return max(kept.calibrating(done), kept.converting, kept.writing + output)


def _whole(plan: ConversionPlan, tokens: Tokens, read_beside: int, verified: bool) -> int:
    spec = plan.source
    source, others = _others(spec) + spec.num_layers * source_attention(spec), _others(spec)
    attention = sum(converted_attention(spec, shape) for shape in plan.layers)
    calibrate, statistics = 0, spec.num_layers * layer_statistics(plan)
    if plan.recipe.calibration is not None:
        layers = spec.num_layers if plan.recipe.needs_gradients else 1
        sums = spec.num_layers * _moments(spec) - statistics
        calibrate = 4 * source + sums + layers * _activations(spec, tokens.context) + _once(plan, tokens.context)
    both = max(4 * others + 8 * attention, 4 * (others + attention) + read_beside)
    verify = 4 * attention + both if verified else _verification(plan)
    one = _solution(plan) + _refit(spec, tokens) + (4 * _largest_layer(spec) if tokens.refit else 0)
    return statistics + max(4 * source if verified else 0, calibrate, one, _table(spec) + _layer(plan), verify)


def _by_layer(plan: ConversionPlan, tokens: Tokens) -> int:
    spec = plan.source
    table, layer, calibrate = _table(spec), 4 * _largest_layer(spec), 0
    if plan.recipe.calibration is not None:
        tables = _sum(table, table + 28 * 128 * spec.vocab_size) if plan.recipe.needs_gradients else table
        rows = 4 * spec.hidden_size * min(spec.vocab_size, tokens.text + tokens.noise)
        context = _activations(spec, tokens.context) + 12 * spec.num_heads * tokens.context**2
        calibrate = _sum(tables + rows, layer + _moments(spec) + context)
    one = _solution(plan) + _refit(spec, tokens) + (layer if tokens.refit else 0)
    return max(calibrate, one, table + _layer(plan), _verification(plan))


def _verification(plan: ConversionPlan) -> int:
    """A layer at a time."""
    spec, table = plan.source, _table(plan.source)
    most = max(table, 8 * _largest_layer(spec) + 2 * _layer(plan))
    return table + most if spec.tie_word_embeddings else _sum(table, most)


def _sum(table: int, more: int) -> int:
    """What a table and what comes after it take, whether it is kept or not."""
    return table + more if table <= KEPT else max(table, more)


def _others(spec: SourceSpec) -> int:
    """Numbers that are copied."""
    return embedding_weights(spec) + sum(feed_forward_weights(spec, i) for i in range(spec.num_layers))


def _table(spec: SourceSpec) -> int:
    """Bytes of the embeddings or of the output head while they are read."""
    stored = DTYPE_BYTES[spec.dtype]
    return spec.vocab_size * spec.hidden_size * (4 + (stored if stored != 4 else 0))


def _largest_layer(spec: SourceSpec) -> int:
    """Numbers in the layer that has the most."""
    return source_attention(spec) + max(feed_forward_weights(spec, i) for i in range(spec.num_layers))


def _layer(plan: ConversionPlan) -> int:
    """Bytes of a converted attention in float32, the largest."""
    return 4 * max(converted_attention(plan.source, shape) for shape in set(plan.layers))


def _moments(spec: SourceSpec) -> int:
    """Bytes of one layer's sums while they are collected, whichever the recipe needs."""
    heads, groups, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    return 8 * (6 * spec.kv_width**2 + heads * dim * dim) + 16 * (dim // 2) * ((groups + heads) ** 2 + 3 * heads)


def _activations(spec: SourceSpec, context: int) -> int:
    """What the backward pass of one context keeps of a layer."""
    numbers = 10 * spec.hidden_size + 6 * (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    return 4 * context * (numbers + 4 * spec.intermediate_size)


def _once(plan: ConversionPlan, context: int) -> int:
    """What one context takes beside, whatever the number of layers."""
    spec = plan.source
    return 12 * spec.num_heads * context**2 + (28 * 128 * spec.vocab_size if plan.recipe.needs_gradients else 0)


def _solution(plan: ConversionPlan) -> int:
    """One layer's weights before and after, and some ten moments and factors, in float64."""
    spec = plan.source
    return 4 * _layer(plan) + 8 * (10 * spec.kv_width**2 + 3 * source_attention(spec))


def _refit(spec: SourceSpec, tokens: Tokens) -> int:
    """The hidden states of a refit, what is made of them, and the moments of what the heads read."""
    if tokens.refit == 0:
        return 0
    return 40 * tokens.refit * spec.hidden_size + 24 * (spec.num_heads * spec.head_dim) ** 2

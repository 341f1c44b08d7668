"""Frozen descriptions of a source model, a target and a plan. Imports neither torch nor transformers.

Shape alphabet, used in every docstring of the project: B batch, S query tokens, T cached tokens, D model width,
H query heads, G KV heads, K source head dim, N no-RoPE dim, R RoPE dim, V value dim, C latent rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

DTYPE_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

OutputFormat = Literal["native", "deepseek"]
StockRope = Literal["default", "longrope"]


@dataclass(frozen=True)
class RopeUpdate:
    """How frequencies change with the length of the input; up to ``original_positions`` they are ``inv_freq``.

    Attributes:
        kind: ``longrope`` (another set of frequencies beyond that length) or ``dynamic`` (a base that grows with it).
        original_positions: the length, in tokens, up to which nothing changes.
        inv_freq: for ``longrope``, the frequencies beyond it, one for each pair.
        theta, factor: for ``dynamic``, theta' = theta·(factor·length/original - factor + 1)^(dim/(dim - 2)).
    """

    kind: Literal["longrope", "dynamic"]
    original_positions: int
    inv_freq: tuple[float, ...] = ()
    theta: float = 0.0
    factor: float = 1.0


@dataclass(frozen=True)
class RopeSpec:
    """The rotary embedding of a source, as the frequencies it ends up with.

    A head has K/2 pairs. The first dim/2 of them turn; the rest have frequency 0, which is how dims without RoPE are
    said (partial rotary, learned positions, ALiBi).

    Attributes:
        dim: rotary dims of a head (even; the head dim K for full rotary, 0 for none).
        inv_freq: the K/2 angular frequencies, radians a position, after any scaling.
        kind: transformers' ``rope_type``: ``default``, ``linear``, ``llama3``, ``yarn``, ...; ``none`` without RoPE.
        parameters: transformers' ``rope_parameters`` as the source states them.
        attention_scaling: the factor that the source multiplies cos and sin by (1 except for YaRN-like kinds); pairs
            that do not turn have none.
        interleaved: whether the source pairs neighbouring dims; the conversion always sees rotate-half order.
        update: how frequencies change with length; None where they do not.
    """

    dim: int
    inv_freq: tuple[float, ...]
    kind: str = "default"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    attention_scaling: float = 1.0
    interleaved: bool = False
    update: RopeUpdate | None = None

    @property
    def factors(self) -> tuple[float, ...]:
        """What each of the K/2 pairs of a query or key is multiplied by when it turns."""
        turning = self.dim // 2
        return (self.attention_scaling,) * turning + (1.0,) * (len(self.inv_freq) - turning)


def no_rope(head_dim: int) -> RopeSpec:
    """The RopeSpec of heads that never turn: everything is content, R = 0."""
    return RopeSpec(0, (0.0,) * (head_dim // 2), "none")


@dataclass(frozen=True)
class QKNormSpec:
    """RMSNorm of queries and keys between their projection and RoPE (any mean is taken out in the projection).

    Attributes:
        scope: what one root mean square is taken over: each ``head``, or ``all`` heads of a token together.
    """

    scope: Literal["head", "all"]
    eps: float


@dataclass(frozen=True)
class BlockSpec:
    """What a decoder has around its attention, under the names of the native config's fields.

    The defaults are Llama's: RMSNorm before the attention and before a gated feed-forward block.

    Attributes:
        norm: ``rms`` or ``layer`` (LayerNorm, with a bias if ``norm_bias``).
        norm_offset: what is added to every norm's weight (1 for Gemma, which stores w - 1).
        input_norms: norms before attention and feed-forward block.
        output_norms: norms on what attention and feed-forward block add to the residual stream.
        parallel_residual: both read the layer's input, instead of one after the other.
        shared_input_norm: with it, both read the attention's norm.
        mlp: ``gated`` (gate, up, down) or ``plain`` (up, down).
        num_experts: experts of a mixture; 0 for none. ``expert_layers`` says which layers have them (None: all).
        num_experts_per_tok: how many answer a token, weighted by the softmax over all; ``norm_topk_prob``: the weights
            of the chosen are scaled to sum to 1.
        moe_intermediate_size: of an expert. ``shared_expert_intermediate_size``: of one that always answers, gated by
            a sigmoid; 0 for none.
        embedding_scale, residual_scale, logits_scale: factors on the embeddings, on what attention and feed-forward
            block add, and on the logits.
        final_logit_softcap: cap·tanh(logits / cap); None for none.
        learned_positions: rows of a table of learned positions that is added to the embeddings; 0 for none.
        embedding_norm: a norm on the embeddings.
    """

    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    norm_offset: float = 0.0
    input_norms: bool = True
    output_norms: bool = False
    parallel_residual: bool = False
    shared_input_norm: bool = False
    mlp: Literal["gated", "plain"] = "gated"
    num_experts: int = 0
    num_experts_per_tok: int = 0
    norm_topk_prob: bool = True
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    expert_layers: tuple[bool, ...] | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    final_logit_softcap: float | None = None
    learned_positions: int = 0
    embedding_norm: bool = False

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward block of a layer is a mixture of experts."""
        return self.num_experts > 0 and (self.expert_layers is None or self.expert_layers[layer])


@dataclass(frozen=True)
class SourceSpec:
    """What the conversion needs to know about a source, whatever its family.

    Attributes:
        architecture: the entry of ``config.json``'s ``architectures`` that chose the adapter.
        family: the adapter's name in the registry.
        rope: of every layer, unless ``layer_ropes`` gives each its own (of one head dim and one rotary dim).
        attention_scale: the factor on q·k before the softmax (K^-1/2 in most families).
        rms_norm_eps: the eps of the block's norms, LayerNorms too.
        max_position_embeddings: the context in tokens.
        windows: per layer, the sliding attention window in tokens, or None for full attention.
        dtype: the dtype most of the source's tensors are stored in (GGUF: the dtype they dequantise to).
        block: what is around the attention.
        attention_softcap: cap·tanh(scores / cap) before the softmax; None for none.
        alibi_slopes: per query head, the slope of a bias slope·(t - s) on scores; None for none.
        alibi_rounded: the bias is slope·t instead, with slope, t and their product rounded to bfloat16 (Falcon).
        qk_norm: the norm of queries and keys; None for none.
    """

    architecture: str
    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    attention_scale: float
    rms_norm_eps: float
    hidden_act: str
    max_position_embeddings: int
    query_bias: bool
    key_bias: bool
    value_bias: bool
    output_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    windows: tuple[int | None, ...]
    dtype: str
    block: BlockSpec = BlockSpec()
    layer_ropes: tuple[RopeSpec, ...] | None = None
    attention_softcap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    alibi_rounded: bool = False
    qk_norm: QKNormSpec | None = None

    def rope_of(self, layer: int) -> RopeSpec:
        """The rotary embedding of a layer."""
        return self.rope if self.layer_ropes is None else self.layer_ropes[layer]

    @property
    def kv_width(self) -> int:
        """Cached numbers a token a layer: 2·G·K."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def key_scales(self) -> int:
        """Numbers a token a layer that the converted cache holds beside C + R: one for each norm of keys."""
        if self.qk_norm is None:
            return 0
        return self.num_kv_heads if self.qk_norm.scope == "head" else 1

    @property
    def max_kv_rank(self) -> int:
        """The largest useful latent rank when keys and values are both in it: min(2·G·K, D + 1 with biases)."""
        return min(self.kv_width, self.hidden_size + (1 if self.key_bias or self.value_bias else 0))

    @property
    def max_rope_dim(self) -> int:
        """The RoPE dim at which every pair of every KV head keeps its own slot: G·(rotary dim)."""
        return self.num_kv_heads * self.rope.dim

    @property
    def attention_kind(self) -> str:
        """``MHA``, ``GQA`` or ``MQA``."""
        if self.num_kv_heads == self.num_heads:
            return "MHA"
        return "MQA" if self.num_kv_heads == 1 else "GQA"


@dataclass(frozen=True)
class MLAShape:
    """The sizes of one converted layer: what is cached is ``kv_rank`` C, ``rope_dim`` R and ``key_scales``.

    Attributes:
        key_scales: the factors of normalised keys, one for each norm; 0 where the source does not normalise keys.
    """

    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    key_scales: int = 0

    @property
    def cached(self) -> int:
        """Cached numbers a token: C + R, and the key scales."""
        return self.kv_rank + self.rope_dim + self.key_scales

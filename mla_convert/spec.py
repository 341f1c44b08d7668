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
class RopeSpec:
    """The rotary embedding of a source, as the frequencies it ends up with.

    Attributes:
        dim: rotary dims of a head (even; the head dim K for full rotary).
        inv_freq: the dim/2 angular frequencies, radians a position, after any scaling.
        kind: transformers' ``rope_type``: ``default``, ``linear``, ``llama3``, ``yarn``, ...
        parameters: transformers' ``rope_parameters`` as the source states them.
        attention_scaling: the factor that the source multiplies cos and sin by (1 except for YaRN-like kinds).
    """

    dim: int
    inv_freq: tuple[float, ...]
    kind: str = "default"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    attention_scaling: float = 1.0


@dataclass(frozen=True)
class SourceSpec:
    """What the conversion needs to know about a source, whatever its family.

    Attributes:
        architecture: the entry of ``config.json``'s ``architectures`` that chose the adapter.
        family: the adapter's name in the registry.
        attention_scale: the factor on q·k before the softmax (K^-1/2 in most families).
        windows: per layer, the sliding attention window in tokens, or None for full attention.
        dtype: the dtype most of the source's tensors are stored in (GGUF: the dtype they dequantise to).
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

    @property
    def kv_width(self) -> int:
        """Cached numbers a token a layer: 2·G·K."""
        return 2 * self.num_kv_heads * self.head_dim

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
    """The sizes of one converted layer: ``kv_rank`` C and ``rope_dim`` R are what is cached."""

    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int

    @property
    def cached(self) -> int:
        """Cached numbers a token: C + R."""
        return self.kv_rank + self.rope_dim

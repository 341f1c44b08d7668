"""Families of GPT-2's line: queries, keys and values in one projection, a plain feed-forward block, LayerNorms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from mla_convert.errors import UnsupportedArchitectureError
from mla_convert.sources.adapter import EMBEDDING, LM_HEAD, Adapter, Biases
from mla_convert.sources.attention import AttentionWeights, rotate_half_order
from mla_convert.sources.roles import Converted, Copied, Part, Role, copied
from mla_convert.spec import BlockSpec, RopeSpec, SourceSpec, no_rope

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class FusedAdapter(Adapter):
    """What these families have in common; a family states its names and how it differs.

    Attributes:
        layer: what the names of a layer's tensors begin with.
        qkv, output, up, down: its projections, below ``layer``.
        norms: stored name of a norm in a layer -> its name in the native class.
        final_norm: the norm before the output embedding.
        grouped: whether the rows of ``qkv`` are by KV head (its queries, its key, its value, of K rows each) or all
            queries, all keys and all values in turn.
        transposed: whether projections are stored as [in, out].
    """

    layer: ClassVar[str]
    qkv: ClassVar[str]
    output: ClassVar[str]
    up: ClassVar[str]
    down: ClassVar[str]
    norms: ClassVar[Mapping[str, str]]
    final_norm: ClassVar[str]
    grouped: ClassVar[bool] = True
    transposed: ClassVar[bool] = False

    # --- What a family states ---------------------------------------------------------------------------------------

    def kv_heads(self, config: PretrainedConfig) -> int:
        """KV heads; as many as query heads unless the family says otherwise."""
        return config.num_attention_heads

    def intermediate_size(self, config: PretrainedConfig) -> int:
        """The width of the feed-forward block; four times the model's unless the family says otherwise."""
        return 4 * config.hidden_size

    def activation(self, config: PretrainedConfig) -> str:
        """The activation of the feed-forward block, by its name in transformers."""
        return "gelu"

    def context(self, config: PretrainedConfig) -> int:
        """The longest text, in tokens."""
        return config.max_position_embeddings

    def biases(self, config: PretrainedConfig) -> Biases:
        """Which projections carry a bias; none unless the family says otherwise."""
        return Biases()

    def block(self, config: PretrainedConfig) -> BlockSpec:
        """What is around the attention."""
        raise TypeError(f"{type(self).__name__} does not describe its block")

    def attention_scale(self, config: PretrainedConfig, head_dim: int) -> float:
        """The factor on scores."""
        return head_dim**-0.5

    def rope(self, config: PretrainedConfig, head_dim: int) -> RopeSpec:
        """The rotary embedding of all layers; none unless the family says otherwise."""
        return no_rope(head_dim)

    def alibi(self, config: PretrainedConfig, head_dim: int) -> tuple[float, ...] | None:
        """The slopes of ALiBi, one for each query head, of biases on scaled scores; None for none."""
        return None

    def alibi_rounded(self, config: PretrainedConfig) -> bool:
        """Whether these biases are rounded to bfloat16; not unless the family says otherwise."""
        return False

    def norm_eps(self, config: PretrainedConfig) -> float:
        """The eps of the norms."""
        return config.layer_norm_epsilon

    def norms_of(self, spec: SourceSpec) -> Mapping[str, str]:
        """The norms of a layer: ``norms`` unless the config decides."""
        return self.norms

    # --- What follows from it ---------------------------------------------------------------------------------------

    def check(self, config: PretrainedConfig) -> None:
        super().check(config)
        width, heads, groups = config.hidden_size, config.num_attention_heads, self.kv_heads(config)
        if width % heads or heads % groups or width // heads % 2:
            raise UnsupportedArchitectureError(
                f"{heads} query heads and {groups} KV heads do not divide {width} dims into heads of an even size",
                "check the sizes in config.json",
            )

    def describe(self, config: PretrainedConfig, dtype: str) -> SourceSpec:
        heads, biases = config.num_attention_heads, self.biases(config)
        head_dim = config.hidden_size // heads
        return SourceSpec(
            architecture=self.architecture,
            family=self.family,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            intermediate_size=self.intermediate_size(config),
            vocab_size=config.vocab_size,
            num_heads=heads,
            num_kv_heads=self.kv_heads(config),
            head_dim=head_dim,
            rope=self.rope(config, head_dim),
            attention_scale=self.attention_scale(config, head_dim),
            rms_norm_eps=self.norm_eps(config),
            hidden_act=self.activation(config),
            max_position_embeddings=self.context(config),
            query_bias=biases.query,
            key_bias=biases.key,
            value_bias=biases.value,
            output_bias=biases.output,
            mlp_bias=biases.mlp,
            tie_word_embeddings=bool(config.tie_word_embeddings),
            windows=(None,) * config.num_hidden_layers,
            dtype=dtype,
            block=self.block(config),
            alibi_slopes=self.alibi(config, head_dim),
            alibi_rounded=self.alibi_rounded(config),
        )

    def expected(self, spec: SourceSpec) -> Iterator[tuple[str, Role, tuple[int, ...]]]:
        width, inner = spec.hidden_size, spec.intermediate_size
        queries = spec.num_heads * spec.head_dim
        fused = queries + spec.kv_width
        yield self.embedding, copied(EMBEDDING), (spec.vocab_size, width)
        yield from self.outside_layers(spec)
        for layer in range(spec.num_layers):
            prefix, target = self.layer.format(layer), f"model.layers.{layer}."
            for name, rows, columns, bias in (
                (self.qkv, fused, width, spec.query_bias),
                (self.output, width, queries, spec.output_bias),
            ):
                yield f"{prefix}{name}.weight", Converted(layer), self._stored(rows, columns)
                if bias:
                    yield f"{prefix}{name}.bias", Converted(layer), (rows,)
            for name, own in self.norms_of(spec).items():
                yield from norm_tensors(prefix + name, target + own, spec, layer)
            for name, own, rows, columns in (
                (self.up, "up_proj", inner, width),
                (self.down, "down_proj", width, inner),
            ):
                part = Part(f"{target}mlp.{own}.weight", transposed=self.transposed)
                yield f"{prefix}{name}.weight", Copied((part,), layer), self._stored(rows, columns)
                if spec.mlp_bias:
                    yield f"{prefix}{name}.bias", copied(f"{target}mlp.{own}.bias", layer), (rows,)
        yield from norm_tensors(self.final_norm, "model.norm", spec, None)
        if not spec.tie_word_embeddings:
            yield self.head, copied(LM_HEAD), (spec.vocab_size, width)

    def outside_layers(self, spec: SourceSpec) -> Iterator[tuple[str, Role, tuple[int, ...]]]:
        """What a family has between its embeddings and its layers; nothing unless it says otherwise."""
        yield from ()

    def attention(self, spec: SourceSpec, read: Callable[[str], Tensor], layer: int) -> AttentionWeights:
        prefix = self.layer.format(layer)
        qkv, output = read(f"{prefix}{self.qkv}.weight"), read(f"{prefix}{self.output}.weight")
        if self.transposed:
            qkv, output = qkv.t(), output.t()
        w_q, w_k, w_v = self._by_heads(qkv, spec)
        b_q = b_k = b_v = None
        if spec.query_bias:
            b_q, b_k, b_v = self._by_heads(read(f"{prefix}{self.qkv}.bias"), spec)
        weights = AttentionWeights(
            w_q=w_q,
            w_k=w_k,
            w_v=w_v,
            w_o=output.reshape(spec.hidden_size, spec.num_heads, spec.head_dim),
            b_q=b_q,
            b_k=b_k,
            b_v=b_v,
            b_o=read(f"{prefix}{self.output}.bias") if spec.output_bias else None,
        )
        return rotate_half_order(weights, spec.rope)

    def _by_heads(self, fused: Tensor, spec: SourceSpec) -> tuple[Tensor, Tensor, Tensor]:
        """The rows of queries, keys and values: [H K ...], [G K ...], [G K ...]."""
        heads, groups, dim, rest = spec.num_heads, spec.num_kv_heads, spec.head_dim, fused.shape[1:]
        if not self.grouped:
            by_kind = fused.reshape(heads + 2 * groups, dim, *rest).split((heads, groups, groups))
            return by_kind[0].contiguous(), by_kind[1].contiguous(), by_kind[2].contiguous()
        share = heads // groups
        by_group = fused.view(groups, share + 2, dim, *rest)
        queries = by_group[:, :share].reshape(heads, dim, *rest)
        return queries, by_group[:, share].contiguous(), by_group[:, share + 1].contiguous()

    def _stored(self, rows: int, columns: int) -> tuple[int, int]:
        return (columns, rows) if self.transposed else (rows, columns)


def norm_tensors(
    name: str, target: str, spec: SourceSpec, layer: int | None
) -> Iterator[tuple[str, Role, tuple[int, ...]]]:
    """A norm's weight, and its bias where the family's norms have one."""
    yield f"{name}.weight", copied(f"{target}.weight", layer), (spec.hidden_size,)
    if spec.block.norm_bias:
        yield f"{name}.bias", copied(f"{target}.bias", layer), (spec.hidden_size,)

"""What source adapters have in common: a config becomes a :class:`SourceSpec`, and every tensor gets its role.

:class:`Adapter` is what the rest of the project asks for; :class:`DenseAdapter` has Llama's tensor names and shapes, so
that a family of that shape states only how it differs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from mla_convert.errors import UnaccountedTensorError, UnsupportedArchitectureError
from mla_convert.sources.attention import AttentionWeights, rotate_half_order
from mla_convert.sources.checkpoint import Checkpoint, main_dtype
from mla_convert.sources.prefixed import PrefixedCheckpoint
from mla_convert.sources.roles import Converted, Dropped, Role, copied
from mla_convert.sources.rope import rope_spec
from mla_convert.spec import DTYPE_BYTES, BlockSpec, QKNormSpec, RopeSpec, SourceSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"

_DROPPED = (
    (re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"), "recomputed from the config"),
    (re.compile(r"rope_freqs\.weight"), "its factors are in the config's rope_parameters"),
)

# Config fields of other families that would change the model: field -> (harmless values, what it means). A family that
# does what a field says lists it in `known_fields`.
_FOREIGN_FIELDS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "attn_logit_softcapping": ((None, 0), "attention scores are capped"),
    "use_qk_norm": ((None, False), "queries and keys are normalised"),
    "qk_norm": ((None, False), "queries and keys are normalised"),
    "qk_layernorm": ((None, False), "queries and keys are normalised"),
    "use_qkv_norm": ((None, False), "queries and keys are normalised"),
    "query_pre_attn_scalar": ((None,), "attention scores have a scale of their own"),
    "attention_multiplier": ((None,), "attention scores have a scale of their own"),
    "num_local_experts": ((None, 0), "the feed-forward layers are experts"),
    "num_experts": ((None, 0), "the feed-forward layers are experts"),
    "is_causal": ((None, True), "attention is not causal"),
    "use_bidirectional_attention": ((None, False), "tokens see what follows them"),
    "clip_qkv": ((None,), "queries, keys and values are clipped"),
    "final_logit_softcapping": ((None, 0), "logits are capped"),
    "logit_scale": ((None, 1), "logits are scaled"),
    "logits_scaling": ((None, 1), "logits are scaled"),
    "embedding_multiplier": ((None, 1), "embeddings are scaled"),
    "residual_multiplier": ((None, 1), "residual branches are scaled"),
}


@dataclass(frozen=True)
class Biases:
    """Which projections of every layer carry a bias."""

    query: bool = False
    key: bool = False
    value: bool = False
    output: bool = False
    mlp: bool = False


class Adapter:
    """Base of the adapters.

    A family states its names and the methods of the first section; ``expected`` and ``attention`` say how its tensors
    are stored. Targets of copied tensors are the native class's names (`mla_convert.mla.modeling_mla`).
    """

    architecture: ClassVar[str]
    family: ClassVar[str]
    # Names of the stored input and output embeddings, which may be tied.
    embedding: ClassVar[str] = EMBEDDING
    head: ClassVar[str] = LM_HEAD
    # What old checkpoints, saved from a model without its head, leave out before every name; empty for none.
    base_prefix: ClassVar[str] = ""
    # Fields of `_FOREIGN_FIELDS` that this family has, and that its spec therefore expresses.
    known_fields: ClassVar[frozenset[str]] = frozenset()
    # Stored tensors that the converted model does not need: pattern -> why not.
    dropped: ClassVar[tuple[tuple[re.Pattern[str], str], ...]] = _DROPPED

    # --- What a family states ---------------------------------------------------------------------------------------

    def config_class(self) -> type[PretrainedConfig]:
        """transformers' config class of the family."""
        raise TypeError(f"{type(self).__name__} states no config class")

    def model_class(self) -> type[PreTrainedModel]:
        """transformers' causal language model of the family."""
        raise TypeError(f"{type(self).__name__} states no model class")

    def describe(self, config: PretrainedConfig, dtype: str) -> SourceSpec:
        """Return what the conversion needs to know; ``config`` has passed :meth:`check`.

        Raises:
            UnsupportedArchitectureError: the config asks for something that the conversion cannot express.
        """
        raise TypeError(f"{type(self).__name__} does not describe its models")

    def expected(self, spec: SourceSpec) -> Iterator[tuple[str, Role, tuple[int, ...]]]:
        """Every tensor the converted model needs: its stored name, role and shape."""
        raise TypeError(f"{type(self).__name__} lists no tensors")

    def attention(self, spec: SourceSpec, read: Callable[[str], Tensor], layer: int) -> AttentionWeights:
        """The attention weights of ``layer``, shaped by heads; ``read`` gives a stored tensor by its name.

        Query, key and their norms' rows are in rotate-half order: the pairs that turn first (see :class:`RopeSpec`).
        """
        raise TypeError(f"{type(self).__name__} reads no attention")

    def module_tensors(self, spec: SourceSpec, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The parameters of transformers' model and their values: the stored tensors, unless it stacks some of them."""
        for name, _, _ in self.expected(spec):
            yield name, read(name)

    # --- What follows from it ---------------------------------------------------------------------------------------

    def check(self, config: PretrainedConfig) -> None:
        """Refuse what would convert without complaint and answer wrongly.

        Raises:
            UnsupportedArchitectureError: the config describes something that this family does not have, or its head
                counts do not fit together.
        """
        for name, (harmless, meaning) in _FOREIGN_FIELDS.items():
            value = getattr(config, name, None)
            if name not in self.known_fields and value not in harmless:
                raise UnsupportedArchitectureError(
                    f"config.json sets {name} = {value!r}: {meaning}, which {self.architecture} does not do",
                    "use a checkpoint of a plain model of this family",
                )

    def spec(self, config: PretrainedConfig, checkpoint: Checkpoint) -> SourceSpec:
        """What the conversion needs to know, from the config (and the dtype from the tensors' headers).

        Raises:
            UnsupportedArchitectureError: see :meth:`check` and :func:`~mla_convert.sources.rope.rope_spec`; or the
                tensors are stored in a dtype that is not a plain float.
        """
        self.check(config)
        dtype = main_dtype(checkpoint)
        if dtype not in DTYPE_BYTES:
            raise UnsupportedArchitectureError(
                f"the weights are stored as {dtype}", f"use a checkpoint in one of {', '.join(DTYPE_BYTES)}"
            )
        return self.describe(config, dtype)

    def named(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint under this family's names, whether or not its files leave ``base_prefix`` out."""
        if not self.base_prefix or any(name.startswith(self.base_prefix) for name in checkpoint.names()):
            return checkpoint
        return PrefixedCheckpoint(checkpoint, self.base_prefix, self.head)

    def account(self, spec: SourceSpec, checkpoint: Checkpoint) -> dict[str, Role]:
        """The role of every tensor of ``checkpoint``.

        Raises:
            UnaccountedTensorError: a tensor that this family does not have, one that it needs and is not there, or one
                whose shape is not what the config says; all of a kind are named together.
        """
        expected = {name: (role, shape) for name, role, shape in self.expected(spec)}
        roles: dict[str, Role] = {}
        unknown: list[str] = []
        misshapen: list[str] = []
        for name in checkpoint.names():
            if name in expected:
                role, shape = expected[name]
                roles[name] = role
                if checkpoint.shape(name) != shape:
                    misshapen.append(f"{name} is {list(checkpoint.shape(name))}, not {list(shape)}")
            elif name == self.head and spec.tie_word_embeddings:
                roles[name] = Dropped(f"the same bytes as {self.embedding}, which it is tied to")
            elif (reason := self._reason_to_drop(name)) is not None:
                roles[name] = Dropped(reason)
            else:
                unknown.append(name)
        missing = [name for name in expected if name not in roles]
        if unknown or missing or misshapen:
            faults = (("unknown", unknown), ("missing", missing), ("of another shape", misshapen))
            said = "; ".join(f"{kind}: {_listed(names)}" for kind, names in faults if names)
            raise UnaccountedTensorError(
                f"the tensors are not those of a {self.architecture} with this config: {said}",
                "check that config.json belongs to these weights and that no adapter or extra head was merged in",
            )
        return roles

    def _reason_to_drop(self, name: str) -> str | None:
        return next((reason for pattern, reason in self.dropped if pattern.fullmatch(name)), None)


class DenseAdapter(Adapter):
    """Families of Llama's tensor names: separate projections, gated feed-forward blocks, RMSNorm.

    Hooks say what a family has more: biases, windows, RoPE per layer, norms of queries and keys, and the block around
    the attention.
    """

    # Stored name of a norm in a layer -> its name in the native class.
    norms: ClassVar[Mapping[str, str]] = {
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_attention_layernorm",
    }

    def rotary_class(self) -> Any:
        """transformers' rotary module of the family, built from a config."""
        raise TypeError(f"{type(self).__name__} states no rotary class")

    def biases(self, config: PretrainedConfig) -> Biases:
        """Which projections carry a bias; none unless the family says otherwise."""
        return Biases()

    def windows(self, config: PretrainedConfig) -> tuple[int | None, ...]:
        """Per layer, the sliding window in tokens or None; none unless the family says otherwise."""
        return (None,) * config.num_hidden_layers

    def block(self, config: PretrainedConfig) -> BlockSpec:
        """What is around the attention; Llama's block unless the family says otherwise."""
        return BlockSpec()

    def attention_scale(self, config: PretrainedConfig, head_dim: int) -> float:
        """The factor on scores."""
        return head_dim**-0.5

    def attention_softcap(self, config: PretrainedConfig) -> float | None:
        """The cap of scores; none unless the family says otherwise."""
        return None

    def qk_norm(self, config: PretrainedConfig) -> QKNormSpec | None:
        """The norm of queries and keys; none unless the family says otherwise."""
        return None

    def rope(self, config: PretrainedConfig, head_dim: int) -> RopeSpec:
        """The rotary embedding of all layers."""
        return rope_spec(config, self.rotary_class(), head_dim)

    def layer_ropes(self, config: PretrainedConfig, head_dim: int) -> tuple[RopeSpec, ...] | None:
        """The rotary embedding of each layer where layers differ; None unless the family says otherwise."""
        return None

    def hidden_act(self, config: PretrainedConfig) -> str:
        """The activation of the feed-forward block, as transformers names it."""
        return config.hidden_act

    def norm_eps(self, config: PretrainedConfig) -> float:
        """The eps of the block's norms."""
        return config.rms_norm_eps

    # --- What follows from them -------------------------------------------------------------------------------------

    def check(self, config: PretrainedConfig) -> None:
        super().check(config)
        if config.num_attention_heads % config.num_key_value_heads:
            raise UnsupportedArchitectureError(
                f"{config.num_attention_heads} query heads cannot share {config.num_key_value_heads} KV heads evenly",
                "check num_attention_heads and num_key_value_heads in config.json",
            )

    def describe(self, config: PretrainedConfig, dtype: str) -> SourceSpec:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        biases = self.biases(config)
        return SourceSpec(
            architecture=self.architecture,
            family=self.family,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            rope=self.rope(config, head_dim),
            attention_scale=self.attention_scale(config, head_dim),
            rms_norm_eps=self.norm_eps(config),
            hidden_act=self.hidden_act(config),
            max_position_embeddings=config.max_position_embeddings,
            query_bias=biases.query,
            key_bias=biases.key,
            value_bias=biases.value,
            output_bias=biases.output,
            mlp_bias=biases.mlp,
            tie_word_embeddings=bool(config.tie_word_embeddings),
            windows=self.windows(config),
            dtype=dtype,
            block=self.block(config),
            layer_ropes=self.layer_ropes(config, head_dim),
            attention_softcap=self.attention_softcap(config),
            qk_norm=self.qk_norm(config),
        )

    def expected(self, spec: SourceSpec) -> Iterator[tuple[str, Role, tuple[int, ...]]]:
        width = spec.hidden_size
        yield self.embedding, copied(EMBEDDING), (spec.vocab_size, width)
        for layer in range(spec.num_layers):
            prefix = f"model.layers.{layer}."
            for name, shape in self.attention_tensors(spec):
                yield f"{prefix}self_attn.{name}", Converted(layer), shape
            for name, target in self.norms.items():
                if target != "post_attention_layernorm" or not spec.block.shared_input_norm:
                    yield from _norm(prefix + name, prefix + target, spec, layer)
            yield from self.mlp_tensors(spec, layer)
        yield from _norm("model.norm", "model.norm", spec, None)
        if not spec.tie_word_embeddings:
            yield self.head, copied(LM_HEAD), (spec.vocab_size, width)

    def attention_tensors(self, spec: SourceSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names below ``self_attn.`` and shapes of one layer's attention."""
        yield from _attention_tensors(spec)

    def mlp_tensors(self, spec: SourceSpec, layer: int) -> Iterator[tuple[str, Role, tuple[int, ...]]]:
        """A layer's feed-forward tensors: stored name, role and shape."""
        prefix, width, inner = f"model.layers.{layer}.mlp.", spec.hidden_size, spec.intermediate_size
        for name, rows, columns in (
            ("gate_proj", inner, width),
            ("up_proj", inner, width),
            ("down_proj", width, inner),
        ):
            yield f"{prefix}{name}.weight", copied(f"{prefix}{name}.weight", layer), (rows, columns)
            if spec.mlp_bias:
                yield f"{prefix}{name}.bias", copied(f"{prefix}{name}.bias", layer), (rows,)

    def attention(self, spec: SourceSpec, read: Callable[[str], Tensor], layer: int) -> AttentionWeights:
        heads, groups, dim, width = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.hidden_size
        prefix = f"model.layers.{layer}.self_attn."
        weights = AttentionWeights(
            w_q=read(prefix + "q_proj.weight").view(heads, dim, width),
            w_k=read(prefix + "k_proj.weight").view(groups, dim, width),
            w_v=read(prefix + "v_proj.weight").view(groups, dim, width),
            w_o=read(prefix + "o_proj.weight").view(width, heads, dim),
            b_q=read(prefix + "q_proj.bias").view(heads, dim) if spec.query_bias else None,
            b_k=read(prefix + "k_proj.bias").view(groups, dim) if spec.key_bias else None,
            b_v=read(prefix + "v_proj.bias").view(groups, dim) if spec.value_bias else None,
            b_o=read(prefix + "o_proj.bias") if spec.output_bias else None,
        )
        if spec.qk_norm is not None:
            weights = self.with_qk_norm(weights, spec, lambda name: read(prefix + name))
        return rotate_half_order(weights, spec.rope_of(layer))

    def with_qk_norm(
        self, weights: AttentionWeights, spec: SourceSpec, read: Callable[[str], Tensor]
    ) -> AttentionWeights:
        """Add the norms of queries and keys; ``read`` gives a tensor of the layer's attention."""
        heads, groups, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        offset = spec.block.norm_offset
        assert spec.qk_norm is not None  # or there would be nothing to read
        return replace(
            weights,
            query_norm=(read("q_norm.weight").float() + offset).view(-1, dim).expand(heads, dim),
            key_norm=(read("k_norm.weight").float() + offset).view(-1, dim).expand(groups, dim),
            norm_scope=spec.qk_norm.scope,
        )


def _norm(name: str, target: str, spec: SourceSpec, layer: int | None) -> Iterator[tuple[str, Role, tuple[int, ...]]]:
    yield f"{name}.weight", copied(f"{target}.weight", layer), (spec.hidden_size,)
    if spec.block.norm_bias:
        yield f"{name}.bias", copied(f"{target}.bias", layer), (spec.hidden_size,)


def _attention_tensors(spec: SourceSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names below ``self_attn.`` and shapes of one layer's attention."""
    query, shared, width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.hidden_size
    for name, rows, columns, bias in (
        ("q_proj", query, width, spec.query_bias),
        ("k_proj", shared, width, spec.key_bias),
        ("v_proj", shared, width, spec.value_bias),
        ("o_proj", width, query, spec.output_bias),
    ):
        yield f"{name}.weight", (rows, columns)
        if bias:
            yield f"{name}.bias", (rows,)
    if spec.qk_norm is not None:
        whole = spec.qk_norm.scope == "all"
        yield "q_norm.weight", (query if whole else spec.head_dim,)
        yield "k_norm.weight", (shared if whole else spec.head_dim,)


def _listed(names: list[str], count: int = 6) -> str:
    shown = ", ".join(names[:count])
    return shown if len(names) <= count else f"{shown} and {len(names) - count} more"

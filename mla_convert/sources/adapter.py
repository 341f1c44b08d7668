"""What the Llama-shaped families have in common: tensor names, shapes, and the roles of every tensor.

A family file states only how it differs: its transformers classes, which biases it has, and its attention windows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from mla_convert.errors import UnaccountedTensorError, UnsupportedArchitectureError
from mla_convert.sources.attention import AttentionWeights
from mla_convert.sources.checkpoint import Checkpoint, main_dtype
from mla_convert.sources.roles import Converted, Copied, Dropped, Role
from mla_convert.sources.rope import rope_spec
from mla_convert.spec import DTYPE_BYTES, SourceSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"

_DROPPED = (
    (re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"), "recomputed from the config"),
    (re.compile(r"rope_freqs\.weight"), "its factors are in the config's rope_parameters"),
)

# Config fields of other families that would change the attention: field -> (harmless values, what it means).
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
}


@dataclass(frozen=True)
class Biases:
    """Which projections of every layer carry a bias."""

    query: bool = False
    key: bool = False
    value: bool = False
    output: bool = False
    mlp: bool = False


class DenseAdapter:
    """Base of the adapters: reads a config into a :class:`SourceSpec` and gives every tensor its role."""

    architecture: ClassVar[str]
    family: ClassVar[str]

    # --- What a family states ---------------------------------------------------------------------------------------

    def config_class(self) -> type[PretrainedConfig]:
        """transformers' config class of the family."""
        raise TypeError(f"{type(self).__name__} states no config class")

    def model_class(self) -> type[PreTrainedModel]:
        """transformers' causal language model of the family."""
        raise TypeError(f"{type(self).__name__} states no model class")

    def rotary_class(self) -> Any:
        """transformers' rotary module of the family, built from a config."""
        raise TypeError(f"{type(self).__name__} states no rotary class")

    def biases(self, config: PretrainedConfig) -> Biases:
        """Which projections carry a bias; none unless the family says otherwise."""
        return Biases()

    def windows(self, config: PretrainedConfig) -> tuple[int | None, ...]:
        """Per layer, the sliding window in tokens or None; none unless the family says otherwise."""
        return (None,) * config.num_hidden_layers

    # --- What follows from it ---------------------------------------------------------------------------------------

    def check(self, config: PretrainedConfig) -> None:
        """Refuse what would convert without complaint and answer wrongly.

        Raises:
            UnsupportedArchitectureError: the config describes attention that this family does not have, or it is
                quantised, or its head counts do not fit together.
        """
        if getattr(config, "quantization_config", None) is not None:
            raise UnsupportedArchitectureError(
                "the checkpoint is quantised (its config has a quantization_config)",
                "use the unquantised checkpoint of the same model, or a GGUF file",
            )
        for name, (harmless, meaning) in _FOREIGN_FIELDS.items():
            value = getattr(config, name, None)
            if value not in harmless:
                raise UnsupportedArchitectureError(
                    f"config.json sets {name} = {value!r}: {meaning}, which {self.architecture} does not do",
                    "use a checkpoint of a plain model of this family",
                )
        if config.num_attention_heads % config.num_key_value_heads:
            raise UnsupportedArchitectureError(
                f"{config.num_attention_heads} query heads cannot share {config.num_key_value_heads} KV heads evenly",
                "check num_attention_heads and num_key_value_heads in config.json",
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
            rope=rope_spec(config, self.rotary_class(), head_dim),
            attention_scale=head_dim**-0.5,
            rms_norm_eps=config.rms_norm_eps,
            hidden_act=config.hidden_act,
            max_position_embeddings=config.max_position_embeddings,
            query_bias=biases.query,
            key_bias=biases.key,
            value_bias=biases.value,
            output_bias=biases.output,
            mlp_bias=biases.mlp,
            tie_word_embeddings=bool(config.tie_word_embeddings),
            windows=self.windows(config),
            dtype=dtype,
        )

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
            elif name == LM_HEAD and spec.tie_word_embeddings:
                roles[name] = Dropped(f"the same bytes as {EMBEDDING}, which it is tied to")
            elif (reason := _reason_to_drop(name)) is not None:
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

    def expected(self, spec: SourceSpec) -> Iterator[tuple[str, Role, tuple[int, ...]]]:
        """Every tensor the converted model needs: its name, role and shape."""
        width, inner = spec.hidden_size, spec.intermediate_size
        yield EMBEDDING, Copied(EMBEDDING), (spec.vocab_size, width)
        for layer in range(spec.num_layers):
            prefix = f"model.layers.{layer}."
            for name, shape in _attention_tensors(spec):
                yield f"{prefix}self_attn.{name}", Converted(layer), shape
            copied = [
                ("input_layernorm.weight", (width,)),
                ("post_attention_layernorm.weight", (width,)),
                ("mlp.gate_proj.weight", (inner, width)),
                ("mlp.up_proj.weight", (inner, width)),
                ("mlp.down_proj.weight", (width, inner)),
            ]
            if spec.mlp_bias:
                copied += [("mlp.gate_proj.bias", (inner,)), ("mlp.up_proj.bias", (inner,))]
                copied += [("mlp.down_proj.bias", (width,))]
            for name, shape in copied:
                yield prefix + name, Copied(prefix + name, layer), shape
        yield "model.norm.weight", Copied("model.norm.weight"), (width,)
        if not spec.tie_word_embeddings:
            yield LM_HEAD, Copied(LM_HEAD), (spec.vocab_size, width)

    def attention(self, spec: SourceSpec, read: Callable[[str], Tensor], layer: int) -> AttentionWeights:
        """The attention weights of ``layer``, shaped by heads; ``read`` gives a tensor by its name."""
        heads, groups, dim, width = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.hidden_size
        prefix = f"model.layers.{layer}.self_attn."
        return AttentionWeights(
            w_q=read(prefix + "q_proj.weight").view(heads, dim, width),
            w_k=read(prefix + "k_proj.weight").view(groups, dim, width),
            w_v=read(prefix + "v_proj.weight").view(groups, dim, width),
            w_o=read(prefix + "o_proj.weight").view(width, heads, dim),
            b_q=read(prefix + "q_proj.bias").view(heads, dim) if spec.query_bias else None,
            b_k=read(prefix + "k_proj.bias").view(groups, dim) if spec.key_bias else None,
            b_v=read(prefix + "v_proj.bias").view(groups, dim) if spec.value_bias else None,
            b_o=read(prefix + "o_proj.bias") if spec.output_bias else None,
        )


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


def _reason_to_drop(name: str) -> str | None:
    return next((reason for pattern, reason in _DROPPED if pattern.fullmatch(name)), None)


def _listed(names: list[str], count: int = 6) -> str:
    shown = ", ".join(names[:count])
    return shown if len(names) <= count else f"{shown} and {len(names) - count} more"

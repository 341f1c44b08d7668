"""The source as the native model with attention of its own: what calibration, refits and healing run on.

Every family becomes the same modules here, so that what works on a source's layers needs to know none of them. It says
what this project makes of a source; transformers' own class (`Source.load_model`) says what the source is, and the
conversion compares the two.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mla_convert.errors import UnaccountedTensorError
from mla_convert.mla import MLAConfig, MLAForCausalLM
from mla_convert.mla.attention_mla import eager_attention_forward, inverse_rms, normalise, rotate
from mla_convert.mla.modeling_mla import MLARotaryEmbedding
from mla_convert.mla.spec_fields import attention_fields, block_fields, rope_fields, window_fields
from mla_convert.sources.attention import AttentionWeights, key_sizes

if TYPE_CHECKING:
    from mla_convert.sources.source import Source
    from mla_convert.spec import SourceSpec


class GroupedAttention(nn.Module):
    """One layer of a source's attention: H query heads that share G KV heads, dims in rotate-half order."""

    def __init__(self, weights: AttentionWeights, config: MLAConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads, self.head_dim = weights.w_q.shape[:2]
        self.num_key_value_groups = self.num_heads // weights.w_k.shape[0]
        self.scaling = config.attention_scale
        self.is_causal = True
        self.norm_scope, self.norm_eps = weights.norm_scope, config.qk_norm_eps
        self.q_proj = _linear(weights.w_q.flatten(0, 1), weights.b_q)
        self.k_proj = _linear(weights.w_k.flatten(0, 1), weights.b_k)
        self.v_proj = _linear(weights.w_v.flatten(0, 1), weights.b_v)
        self.o_proj = _linear(weights.w_o.flatten(1), weights.b_o)
        self.query_norm = None if weights.query_norm is None else nn.Parameter(weights.query_norm.flatten())
        self.key_norm = None if weights.key_norm is None else nn.Parameter(weights.key_norm.flatten())
        self.key_sizes = key_sizes(weights).float()

    def forward(
        self,
        hidden_states: Float[Tensor, "B S D"],
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Any = None,
        decode_backend: str = "torch",
        score_bias: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Float[Tensor, "B S D"], Tensor | None]:
        """Return the attention's output, and its weights where the implementation gives any."""
        cos, sin = (x[:, None] for x in position_embeddings)
        query = rotate(self._heads(self.q_proj(hidden_states), self.query_norm), cos, sin)
        projected = self.k_proj(hidden_states)
        key = rotate(self._heads(projected, self.key_norm), cos, sin)
        value = self._heads(self.v_proj(hidden_states), None)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        implementation = self.config._attn_implementation or "eager"
        changes = {"softcap": self.config.attention_softcap, "score_bias": score_bias}
        changes = {name: change for name, change in changes.items() if change is not None}
        if self.key_norm is not None:  # calibration records keys before their norm; others have no use for it
            kwargs["key_scale"] = self._key_scale(projected)
        if changes and implementation == "sdpa":
            implementation = "eager"  # torch's fused attention knows of none
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, _eager)
        heads, weights = attend(self, query, key, value, attention_mask, scaling=self.scaling, **changes, **kwargs)
        return self.o_proj(heads.flatten(2)), weights

    def _key_scale(self, projected: Float[Tensor, "B S J"]) -> Float[Tensor, "B G S"]:
        """What the norm multiplied each head's keys by, in units of `key_sizes`."""
        groups = projected.shape[-1] // self.head_dim
        norms = 1 if self.norm_scope == "all" else groups
        scale = inverse_rms(projected.unflatten(-1, (norms, -1)), self.norm_eps).expand(-1, -1, groups)
        return (scale / self.key_sizes.to(scale.device)).transpose(1, 2).to(projected.dtype)

    def _heads(self, projected: Float[Tensor, "B S J"], weight: Tensor | None) -> Float[Tensor, "B heads S K"]:
        """The heads, normalised where `weight`, [heads·K], is one of a norm."""
        if weight is not None:
            norms = 1 if self.norm_scope == "all" else projected.shape[-1] // self.head_dim
            projected = normalise(projected, norms, self.norm_eps) * weight
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def load_decoder(source: Source, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> MLAForCausalLM:
    """Return the native model around the source's own attention, in evaluation mode, filled tensor by tensor.

    Its config describes what is around the attention, and not the attention, which is no latent one: the model can run,
    but not be saved.

    Raises:
        FormatError: the native class cannot hold the source's windows or its rotary embeddings.
        UnaccountedTensorError: a tensor is not one of the native class, or one of its own is left without a value.
    """
    model = empty_decoder(source.spec, dtype, device)
    for layer in (None, *range(source.spec.num_layers)):
        fill_decoder(model, source, layer, dtype, device)
    if source.spec.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    left = [name for name, value in (*model.named_parameters(), *model.named_buffers()) if value.is_meta]
    if left:
        raise UnaccountedTensorError(f"no tensor of the source is {', '.join(left[:6])}", "report this as a bug")
    return model


def empty_decoder(spec: SourceSpec, dtype: torch.dtype, device: torch.device | str = "cpu") -> MLAForCausalLM:
    """Return the model of :func:`load_decoder` on the meta device, but for its frequencies.

    Raises:
        FormatError: see :func:`load_decoder`.
    """
    with torch.device("meta"):
        model = MLAForCausalLM._from_config(_config(spec), dtype=dtype, attn_implementation="sdpa")
    model.model.rotary_emb = MLARotaryEmbedding(cast("MLAConfig", model.config)).to(device)
    model.set_decode_backend("torch")
    return model.eval()


def fill_decoder(
    model: MLAForCausalLM,
    source: Source,
    layer: int | None,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    names: Container[str] | None = None,
) -> None:
    """Read what a layer of the source is, or for None what is outside its layers, into an empty decoder.

    Args:
        names: the parameters to fill, where not all of them are wanted.

    Raises:
        UnaccountedTensorError: a tensor is not one of the native class.
    """
    if layer is not None:
        weights = source.attention(layer).to(dtype, device)
        model.model.layers[layer].self_attn = GroupedAttention(weights, cast("MLAConfig", model.config), layer)
        del weights
    for name, part in source.copied(layer):
        if names is not None and part.target not in names:
            continue
        value = part.take(source.tensor(name)).to(device=device, dtype=dtype)
        path, _, leaf = part.target.rpartition(".")
        module = _submodule(model, path)
        wanted = getattr(module, leaf, None)
        if wanted is None or wanted.shape != value.shape:
            raise UnaccountedTensorError(
                f"'{name}' is to be '{part.target}' {list(value.shape)}, which the native class has not",
                "report this as a bug",
            )
        setattr(module, leaf, nn.Parameter(value))
        del value  # else it would still be held while the next one is read


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _config(spec: SourceSpec) -> MLAConfig:
    """The native config of the source; of the latent attention that it is built with first, only RoPE is the source's.

    Every pair of a head has its slot, those that do not turn included.
    """
    ropes = [spec.rope_of(layer) for layer in range(spec.num_layers)]
    frequencies = [list(rope.inv_freq) for rope in ropes]
    fields: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "max_position_embeddings": spec.max_position_embeddings,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "kv_lora_rank": 1,
        "qk_rope_head_dim": spec.head_dim,
        "qk_nope_head_dim": 1,
        "v_head_dim": 1,
        "rope_inv_freq": frequencies,
    }
    pairs = [range(len(row)) for row in frequencies]
    described = window_fields(spec) | attention_fields(spec) | block_fields(spec) | rope_fields(ropes, pairs)
    return MLAConfig(**fields | described)


def _linear(weight: Float[Tensor, "J D"], bias: Tensor | None) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight = nn.Parameter(weight.contiguous())
    if bias is not None:
        linear.bias = nn.Parameter(bias.flatten())
    return linear


def _eager(
    module: GroupedAttention, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Plain attention, each KV head beside the query heads that read it."""
    key, value = (x.repeat_interleave(module.num_key_value_groups, dim=1) for x in (key, value))
    return eager_attention_forward(module, query, key, value, attention_mask, **options)

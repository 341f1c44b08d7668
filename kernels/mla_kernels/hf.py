"""Absorbed decoding for stock transformers models of DeepSeek-V2 and V3.

transformers caches the latent for these models, and expands all of it into keys and values for every new token. Here
the layers of one model are made to hand the latent on instead, so that a decode step attends in the latent space
(DeepSeek-V2, arXiv 2405.04434, section 2.1.2). No class is changed and no other model is touched: each attention layer
gets its own `expand_kv`, and a copy of the configuration that names this module's attention function.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3

from mla_kernels.backends import choose_backend
from mla_kernels.decode import mla_decode
from mla_kernels.eager import eager_decode
from mla_kernels.errors import InvalidInputError

log = logging.getLogger(__name__)

_ATTENTION_NAME = "mla_kernels"
_STOCK_EAGER = {
    deepseek_v2.DeepseekV2Attention: deepseek_v2.eager_attention_forward,
    deepseek_v3.DeepseekV3Attention: deepseek_v3.eager_attention_forward,
}
# Their masks are None or [B, 1, S, T]. Others pass masks of their own kinds, or read the layer's configuration.
_STOCK_IMPLEMENTATIONS = ("eager", "sdpa")
# Of 8-bit floating-point weights the scales are kept elsewhere.
_WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def use_mla_kernels(model: nn.Module) -> None:
    """Make a transformers DeepSeek-V2 or V3 model decode absorbed; a second call changes nothing.

    A step over cached tokens attends in the latent space where that takes fewer multiplications than expanding the
    cache: through `mla_decode` on a GPU that it supports, without a mask or gradients, and through torch otherwise. A
    prefill, dropout, autocast, and a layer whose `kv_b_proj` is offloaded or was wrapped since take the stock path.
    The model's attention implementation stays what it was and may still be changed between "sdpa" and "eager"; with
    "eager" the attention weights are returned as before. Caches hold what they held. `restore` undoes it.

    Raises:
        InvalidInputError: the model has no DeepSeek-V2 or V3 attention layer, an attention implementation other than
            sdpa and eager, or an up-projection that is not a plain linear layer.
    """
    layers: list[Any] = [module for module in model.modules() if type(module) in _STOCK_EAGER]
    if not layers:
        raise InvalidInputError(
            f"{type(model).__name__} has no attention layer of DeepSeek-V2 or V3",
            "pass a DeepseekV2ForCausalLM or a DeepseekV3ForCausalLM",
        )
    for layer in layers:
        _check_layer(layer)
    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION_NAME, _attend)
    copies: dict[int, Any] = {}
    for layer in layers:
        _switch(layer, copies)
    weight = layers[0].kv_b_proj.weight
    backend = choose_backend(weight.device, weight.dtype, layers[0].kv_lora_rank)
    log.info("%d layers decode absorbed, through %s: %s", len(layers), backend.name, backend.reason)


def restore(model: nn.Module) -> None:
    """Undo `use_mla_kernels`; a model that was not switched is left as it is."""
    layer: Any
    for layer in model.modules():
        stock = _stock(layer)
        if stock is not None:
            layer.config = stock.config
            del layer.expand_kv
            del layer.mla_kernels_stock


@dataclass(frozen=True)
class _Stock:
    """What a switched layer had before, as its attribute `mla_kernels_stock`.

    Attributes:
        config: the model's own configuration.
    """

    config: PretrainedConfig

    @property
    def implementation(self) -> str:
        """The model's attention implementation as it is now."""
        return self.config._attn_implementation or "eager"


def _stock(layer: nn.Module) -> _Stock | None:
    return layer.__dict__.get("mla_kernels_stock")


def _check_layer(layer: Any) -> None:
    stock = _stock(layer) or _Stock(layer.config)
    _check_implementation(stock.implementation)
    projection = layer.kv_b_proj
    if not _is_plain(projection):
        raise InvalidInputError(
            f"kv_b_proj of layer {layer.layer_idx} is {type(projection).__name__}, not an unquantised linear layer",
            "load the model unquantised and merge its adapters: W_UK and W_UV are read from this weight",
        )


def _check_implementation(name: str) -> None:
    if name not in _STOCK_IMPLEMENTATIONS:
        raise InvalidInputError(
            f"the model's attention implementation is {name!r}",
            'call model.set_attn_implementation("sdpa") first, or restore(model)',
        )


def _is_plain(projection: nn.Module) -> bool:
    return isinstance(projection, nn.Linear) and projection.bias is None and projection.weight.dtype in _WEIGHT_DTYPES


def _switch(layer: Any, copies: dict[int, Any]) -> None:
    """Switch one layer; layers that share a configuration share its copy in `copies`."""
    if _stock(layer) is not None:
        return
    stock = _Stock(layer.config)
    if id(stock.config) not in copies:
        named = copy.copy(stock.config)
        named._attn_implementation = _ATTENTION_NAME
        copies[id(stock.config)] = named
    layer.mla_kernels_stock = stock
    layer.config = copies[id(stock.config)]
    layer.expand_kv = _hand_on


def _hand_on(c_kv: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
    """In `expand_kv`'s place: the latent [B, 1, T, C] and the RoPE keys [B, 1, T, R] themselves."""
    return c_kv, k_rope


def _attend(
    layer: Any,
    query: Tensor,
    c_kv: Tensor,
    k_rope: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention function: query [B, H, S, N+R] to heads [B, S, H, V] and, with eager, weights [B H S T].

    Raises:
        InvalidInputError: the attention implementation was changed to one that is neither sdpa nor eager.
    """
    stock = layer.mla_kernels_stock
    _check_implementation(stock.implementation)
    if dropout == 0.0 and _is_absorbed(layer, query, c_kv.shape[2], attention_mask):
        return _attend_absorbed(layer, query, c_kv, k_rope, attention_mask, scaling, stock.implementation == "eager")
    key, value = type(layer).expand_kv(layer, c_kv, k_rope)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(stock.implementation, _STOCK_EAGER[type(layer)])
    return attend(layer, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)


def _is_absorbed(layer: Any, query: Tensor, tokens: int, attention_mask: Tensor | None) -> bool:
    """Whether this step is done in the latent space.

    A head and cached token take S·(2C + R) multiplications there and C·(N + V) + S·(N + R + V) expanded. Without a mask
    several queries are a prompt's, which no cached token precedes.
    """
    queries = query.shape[2]
    rank, head_dims = layer.kv_lora_rank, layer.qk_nope_head_dim + layer.v_head_dim
    projection = layer.kv_b_proj
    return (
        queries < tokens
        and (queries == 1 or attention_mask is not None)
        and queries * (2 * rank - head_dims) < rank * head_dims
        and _is_plain(projection)
        and projection.weight.device == query.device
        and not torch.is_autocast_enabled(query.device.type)
    )


def _attend_absorbed(
    layer: Any,
    query: Tensor,
    c_kv: Tensor,
    k_rope: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    want_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """W_UV softmax(scaling · (W_UKᵀ q_nope · c_kv + q_rope · k_rope)) c_kv: the up-projections never meet the cache."""
    nope_dim, value_dim, rank = layer.qk_nope_head_dim, layer.v_head_dim, layer.kv_lora_rank
    w_uk, w_uv = layer.kv_b_proj.weight.view(query.shape[1], -1, rank).split([nope_dim, value_dim], dim=1)
    q_latent = torch.einsum("bhsn,hnc->bshc", query[..., :nope_dim], w_uk)
    q = torch.cat((q_latent, query[..., nope_dim:].transpose(1, 2)), dim=-1)
    if attention_mask is None and not want_weights:
        mixed, weights = _decode(q, c_kv[:, 0], k_rope[:, 0], scaling), None
    else:
        mixed, weights = _decode_masked(q, c_kv[:, 0], k_rope[:, 0], attention_mask, scaling)
    return torch.einsum("bshc,hvc->bshv", mixed, w_uv), weights


def _decode(q: Tensor, c_kv: Tensor, k_rope: Tensor, scaling: float) -> Tensor:
    """The latent mix [B, S, H, C] of queries [B, S, H, C+R] that follow one another and see all of [B, T, C]."""
    batch, tokens, rank = c_kv.shape
    seqlens = torch.full((batch,), tokens, dtype=torch.int32, device=q.device)
    needs_gradient = torch.is_grad_enabled() and (q.requires_grad or c_kv.requires_grad)
    if needs_gradient:
        return eager_decode(q, c_kv, None, seqlens, rank, scaling, rope_cache=k_rope)[0]
    backend = choose_backend(q.device, q.dtype, rank, k_rope.shape[-1]).name
    return mla_decode(q, c_kv, None, seqlens, rank, scaling, rope_cache=k_rope, backend=backend)[0]


def _decode_masked(
    q: Tensor, c_kv: Tensor, k_rope: Tensor, attention_mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """The latent mix [B, S, H, C] and its weights [B, H, S, T] under transformers' mask, boolean or additive."""
    batch, queries, heads, _ = q.shape
    tokens, rank = c_kv.shape[1:]
    rows = q.transpose(1, 2).reshape(batch, heads * queries, -1)
    scores = torch.bmm(rows[..., :rank], c_kv.transpose(1, 2)) + torch.bmm(rows[..., rank:], k_rope.transpose(1, 2))
    scores = scores.view(batch, heads, queries, tokens) * scaling
    if attention_mask is not None:
        # Not −inf: a padding query sees nothing, and its result must stay a number.
        hidden = torch.finfo(scores.dtype).min
        is_boolean = attention_mask.dtype == torch.bool
        scores = scores.masked_fill(~attention_mask, hidden) if is_boolean else scores + attention_mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    mixed = torch.bmm(weights.view(batch, heads * queries, tokens), c_kv)
    return mixed.view(batch, heads, queries, rank).transpose(1, 2), weights

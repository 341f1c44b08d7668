"""The native MLA model: a decoder whose attention caches one latent and one shared RoPE key a token.

Self-contained (torch and transformers only): it is also shipped beside converted weights, where ``trust_remote_code``
loads it. Differences from transformers' DeepSeek classes: no norm on the latent, RoPE slots of any frequency chosen
per layer, optional biases, the source's own softmax scale, and decoding in the absorbed form, which never rebuilds keys
and values (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1).
"""

from collections.abc import Callable
from dataclasses import fields

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_mla import MLAConfig

ATTENTION_MODES = ("auto", "absorbed", "expanded")

# transformers renamed the cache argument and output field from `past_key_values` to `cache` in 5.2x.
_CACHE_FIELD = "cache" if "cache" in {f.name for f in fields(CausalLMOutputWithPast)} else "past_key_values"


class MLARMSNorm(nn.Module):
    """RMSNorm (Zhang and Sennrich, 2019), computed in float32."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon)).to(dtype)


class MLARotaryEmbedding(nn.Module):
    """Angles of every layer's RoPE slots: inv_freq [layers, R/2], radians a position."""

    def __init__(self, config: MLAConfig) -> None:
        super().__init__()
        self.frequencies = config.rope_inv_freq
        self.attention_scaling = config.rope_attention_scaling
        self.register_buffer("inv_freq", torch.tensor(self.frequencies, dtype=torch.float32), persistent=False)

    def reset_buffers(self) -> None:
        """Fill the buffer again after the module was built without storage."""
        self.inv_freq.copy_(torch.tensor(self.frequencies, dtype=torch.float32))

    @torch.no_grad()
    def forward(self, position_ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, [layers, B, S, R/2], for position_ids [B, S]."""
        frequencies = self.inv_freq.float().to(position_ids.device)
        angles = position_ids[None, ..., None].float() * frequencies[:, None, None, :]
        return (angles.cos() * self.attention_scaling).to(dtype), (angles.sin() * self.attention_scaling).to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [..., S, R] (R/2 real parts, then R/2 imaginary parts) by the angles of cos and sin [..., S, R/2]."""
    real, imaginary = x.chunk(2, dim=-1)
    return torch.cat((real * cos - imaginary * sin, imaginary * cos + real * sin), dim=-1)


class MLAMLP(nn.Module):
    """Gated feed-forward block, as the source has it."""

    def __init__(self, config: MLAConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain attention over expanded heads: query and key [B H . N+R], value [B H T V]; returns [B S H V], weights."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def mask_scores(scores: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Apply transformers' mask (None, boolean or additive; [B 1 S T]) to scores [B H S T].

    None means causal with the queries at the end of the cached tokens, as for torch's scaled_dot_product_attention.
    """
    queries, tokens = scores.shape[-2:]
    if attention_mask is None:
        if queries == 1:
            return scores
        future = torch.ones(queries, tokens, dtype=torch.bool, device=scores.device).triu(tokens - queries + 1)
        return scores.masked_fill(future, torch.finfo(scores.dtype).min)
    mask = attention_mask[..., :tokens]
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores + mask


class MLAAttention(nn.Module):
    """Multi-head latent attention. The cache holds c_kv [B 1 T C] and the rotated k_rope [B 1 T R]."""

    def __init__(self, config: MLAConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.kv_lora_rank = config.kv_lora_rank
        self.qk_nope_head_dim = config.qk_nope_head_dim
        self.qk_rope_head_dim = config.qk_rope_head_dim
        self.v_head_dim = config.v_head_dim
        self.scaling = config.attention_scale
        self.is_causal = True
        self.attention_mode = "auto"
        # Decode-ready matrices (mla_convert.maths.absorb.AbsorbedMatrices), attached after loading where they exist.
        self.absorbed = None

        hidden, heads = config.hidden_size, config.num_attention_heads
        self.q_proj = nn.Linear(hidden, heads * config.head_dim, bias=config.query_bias)
        self.kv_a_proj_with_mqa = nn.Linear(
            hidden, config.kv_lora_rank + config.qk_rope_head_dim, bias=config.latent_bias
        )
        self.kv_b_proj = nn.Linear(
            config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False
        )
        self.o_proj = nn.Linear(heads * config.v_head_dim, hidden, bias=config.output_bias)

    def uses_absorption(self, queries: int, tokens: int) -> bool:
        """Whether scoring `queries` new tokens against `tokens` cached ones is done in the latent space.

        ``auto`` expands for a prefill and absorbs where that costs fewer multiplications a head and cached token:
        S·(2C + R) against C·(N + V) + S·(N + R + V).
        """
        if self.attention_mode != "auto":
            return self.attention_mode == "absorbed"
        expansion = self.kv_lora_rank * (self.qk_nope_head_dim + self.v_head_dim)
        extra = 2 * self.kv_lora_rank - self.qk_nope_head_dim - self.v_head_dim
        return tokens > queries and queries * extra < expansion

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        batch, queries = hidden_states.shape[:2]
        cos, sin = (x[:, None] for x in position_embeddings)
        query = self.q_proj(hidden_states).view(batch, queries, self.num_heads, -1).transpose(1, 2)
        q_nope, q_rope = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        q_rope = rotate(q_rope, cos, sin)

        compressed = self.kv_a_proj_with_mqa(hidden_states)[:, None]
        c_kv, k_rope = compressed.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        # The slices are made whole, so that a cache that keeps them keeps C + R numbers and no shared storage.
        c_kv, k_rope = c_kv.contiguous(), rotate(k_rope, cos, sin)
        if cache is not None:
            c_kv, k_rope = cache.update(c_kv, k_rope, self.layer_idx)

        if self.uses_absorption(queries, c_kv.shape[2]):
            output, weights = self._attend_absorbed(q_nope, q_rope, c_kv, k_rope, attention_mask)
            return output, weights
        heads, weights = self._attend_expanded(q_nope, q_rope, c_kv, k_rope, attention_mask, **kwargs)
        return self.o_proj(heads.reshape(batch, queries, -1)), weights

    def _up_projections(self) -> tuple[torch.Tensor, torch.Tensor]:
        """w_uk [H N C] and w_uv [H V C], views of kv_b_proj."""
        w_HJC = self.kv_b_proj.weight.view(self.num_heads, -1, self.kv_lora_rank)
        w_uk, w_uv = w_HJC.split([self.qk_nope_head_dim, self.v_head_dim], dim=1)
        return w_uk, w_uv

    def _attend_expanded(self, q_nope, q_rope, c_kv, k_rope, attention_mask, **kwargs):
        batch, _, tokens, _ = c_kv.shape
        expanded = self.kv_b_proj(c_kv[:, 0]).view(batch, tokens, self.num_heads, -1).transpose(1, 2)
        k_nope, value = expanded.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        key = torch.cat((k_nope, k_rope.expand(-1, self.num_heads, -1, -1)), dim=-1)
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        return attend(
            self,
            torch.cat((q_nope, q_rope), dim=-1),
            key,
            value,
            attention_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )

    def _attend_absorbed(self, q_nope, q_rope, c_kv, k_rope, attention_mask):
        """Scores q_latent·c + q_rope·k_rope with q_latent = W_UK^T q_nope; the up-projections never touch the cache."""
        batch, heads, queries, _ = q_nope.shape
        ready = self.absorbed
        w_uk, w_uv = self._up_projections() if ready is None else (ready.w_uk, None)
        q_latent = torch.matmul(q_nope, w_uk.to(q_nope.dtype))
        scores = torch.matmul(q_latent, c_kv.transpose(2, 3)) + torch.matmul(q_rope, k_rope.transpose(2, 3))
        scores = mask_scores(scores * self.scaling, attention_mask)
        weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(q_nope.dtype)
        u_BHSC = torch.matmul(weights, c_kv)
        if ready is not None and ready.w_comb is not None:
            merged = torch.matmul(u_BHSC, ready.w_comb.to(u_BHSC.dtype)).sum(dim=1)
            return (merged if self.o_proj.bias is None else merged + self.o_proj.bias), weights
        w_uv_t = w_uv.transpose(1, 2) if ready is None else ready.w_uv_t.to(u_BHSC.dtype)
        output = torch.matmul(u_BHSC, w_uv_t).transpose(1, 2).reshape(batch, queries, heads * self.v_head_dim)
        return self.o_proj(output), weights


class MLADecoderLayer(GradientCheckpointingLayer):
    """Pre-norm attention and feed-forward with residuals."""

    def __init__(self, config: MLAConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = MLAAttention(config, layer_idx)
        self.mlp = MLAMLP(config)
        self.input_layernorm = MLARMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = MLARMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class MLAPreTrainedModel(PreTrainedModel):
    config_class = MLAConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MLADecoderLayer"]  # noqa: RUF012 - transformers' own convention
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": MLADecoderLayer, "attentions": MLAAttention}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, MLARotaryEmbedding):
            module.reset_buffers()


class MLAModel(MLAPreTrainedModel):
    """Embedding, decoder layers and final norm."""

    def __init__(self, config: MLAConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([MLADecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = MLARMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = MLARotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """Return the last hidden state [B S D] and, with `use_cache`, the latent cache."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        cache = cache if cache is not None else past_key_values
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)[None] + seen

        mask_arguments = {
            "config": self.config,
            "inputs_embeds": inputs_embeds,
            "attention_mask": attention_mask,
            _CACHE_FIELD: cache,
            "position_ids": position_ids,
        }
        layer_types = self.config.layer_types or ["full_attention"] * len(self.layers)
        masks = {
            kind: (create_sliding_window_causal_mask if kind == "sliding_attention" else create_causal_mask)(
                **mask_arguments
            )
            for kind in set(layer_types)
        }
        cos, sin = self.rotary_emb(position_ids, inputs_embeds.dtype)
        hidden_states = inputs_embeds
        for i, layer in enumerate(self.layers):
            hidden_states = layer(
                hidden_states,
                attention_mask=masks[layer_types[i]],
                position_embeddings=(cos[i], sin[i]),
                cache=cache,
                **kwargs,
            )
        hidden_states = self.norm(hidden_states)
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, **{_CACHE_FIELD: cache})


class MLAForCausalLM(MLAPreTrainedModel, GenerationMixin):
    """The language model: :class:`MLAModel` and the output head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: MLAConfig) -> None:
        super().__init__(config)
        self.model = MLAModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def set_attention_mode(self, mode: str) -> None:
        """Choose how every layer attends: ``auto``, ``absorbed`` or ``expanded``."""
        if mode not in ATTENTION_MODES:
            raise ValueError(f"attention mode must be one of {ATTENTION_MODES}, got {mode!r}")
        for layer in self.model.layers:
            layer.self_attn.attention_mode = mode

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """Return logits [B S vocabulary] (the last `logits_to_keep` positions), and the loss when labels are given."""
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache if cache is not None else past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept, :])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{_CACHE_FIELD: outputs.get(_CACHE_FIELD)},
        )


__all__ = ["MLAForCausalLM", "MLAModel", "MLAPreTrainedModel"]

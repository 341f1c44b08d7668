"""The exported model: transformers' DeepSeek-V3 attention, with what a converted layer has and DeepSeek's has not.

Self-contained (torch and transformers only): it is shipped beside the weights, where ``trust_remote_code`` loads it.
Added to DeepSeek's class, as config: RoPE slots of any frequency, chosen per layer; biases; the source's own softmax
scale; a latent norm with an eps of its own; sliding windows. The attention's forward, its ``expand_kv`` and the names
of its parts are DeepSeek's, by which vLLM's transformers backend knows the pattern and runs its own MLA attention.
"""

from dataclasses import fields

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3DecoderLayer,
    DeepseekV3ForCausalLM,
    DeepseekV3MLP,
    DeepseekV3PreTrainedModel,
    DeepseekV3RMSNorm,
)
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_deepseek_mla import DeepseekMLAConfig

# transformers renamed the cache argument and output field from `past_key_values` to `cache` in 5.2x.
_CACHE_FIELD = "cache" if "cache" in {f.name for f in fields(CausalLMOutputWithPast)} else "past_key_values"

_MASKS = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}


class DeepseekMLARotary(nn.Module):
    """Angles of every layer's RoPE slots: inv_freq [layers, R/2], radians a position."""

    def __init__(self, config: DeepseekMLAConfig) -> None:
        super().__init__()
        self.frequencies = config.rope_inv_freq
        self.attention_scaling = config.rope_attention_scaling
        self.register_buffer("inv_freq", self._rows(), persistent=False)

    def _rows(self) -> torch.Tensor:
        return torch.tensor(self.frequencies, dtype=torch.float32)

    def reset_buffers(self) -> None:
        """Fill the buffer again after the module was built without storage."""
        self.inv_freq.copy_(self._rows())

    @torch.no_grad()
    def forward(self, position_ids: torch.Tensor, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each layer's cos and sin, [B, S, R], for position_ids [B, S]."""
        frequencies = self.inv_freq.float().to(position_ids.device)
        angles = position_ids[None, ..., None].float() * frequencies[:, None, None, :]
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = ((turn * self.attention_scaling).to(dtype) for turn in (angles.cos(), angles.sin()))
        return list(zip(cos.unbind(), sin.unbind(), strict=True))


class DeepseekMLAAttention(DeepseekV3Attention):
    """DeepSeek's attention with biases, a softmax scale and a latent norm's eps from the config."""

    def __init__(self, config: DeepseekMLAConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        heads, latent = self.num_heads, self.kv_lora_rank
        self.q_proj = nn.Linear(self.hidden_size, heads * self.qk_head_dim, bias=config.query_bias)
        self.kv_a_proj_with_mqa = nn.Linear(self.hidden_size, latent + self.qk_rope_head_dim, bias=config.latent_bias)
        self.kv_a_layernorm = DeepseekV3RMSNorm(latent, eps=config.latent_norm_eps)
        self.o_proj = nn.Linear(heads * self.v_head_dim, self.hidden_size, bias=config.output_bias)
        self.scaling = config.attention_scale


class DeepseekMLAMLP(DeepseekV3MLP):
    """DeepSeek's dense feed-forward block, with biases where the config says so."""

    def __init__(self, config: DeepseekMLAConfig) -> None:
        super().__init__(config)
        if config.mlp_bias:
            self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size)
            self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size)
            self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size)


class DeepseekMLADecoderLayer(DeepseekV3DecoderLayer):
    """DeepSeek's dense layer around the attention above."""

    def __init__(self, config: DeepseekMLAConfig, layer_idx: int) -> None:
        super(DeepseekV3DecoderLayer, self).__init__()  # DeepSeek's would build its own attention
        self.hidden_size = config.hidden_size
        self.self_attn = DeepseekMLAAttention(config, layer_idx)
        self.mlp = DeepseekMLAMLP(config)
        self.input_layernorm = DeepseekV3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = DeepseekV3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class DeepseekMLAPreTrainedModel(DeepseekV3PreTrainedModel):
    config_class = DeepseekMLAConfig
    _no_split_modules = ["DeepseekMLADecoderLayer"]  # noqa: RUF012 - transformers' own convention
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": DeepseekMLADecoderLayer, "attentions": DeepseekMLAAttention}  # noqa: RUF012
    # DeepSeek's drops layer 61, which holds its multi-token prediction; here it is a layer like the others.
    _keys_to_ignore_on_load_unexpected = None
    _keep_in_fp32_modules_strict = None

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return False  # transformers remembers its answer on DeepSeek's classes, from which it would be inherited

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DeepseekMLARotary):
            module.reset_buffers()


class DeepseekMLAModel(DeepseekMLAPreTrainedModel):
    """Embedding, decoder layers and final norm."""

    def __init__(self, config: DeepseekMLAConfig) -> None:
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList([DeepseekMLADecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = DeepseekV3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = DeepseekMLARotary(config)
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
    ) -> MoeModelOutputWithPast:
        """Return the last hidden state [B S D] and, with `use_cache`, the cache of latents and RoPE keys."""
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

        kinds, masks = self.config.layer_types, attention_mask
        if not isinstance(masks, dict):  # which generate makes for a static cache
            mask_arguments = {
                "config": self.config,
                "inputs_embeds": inputs_embeds,
                "attention_mask": attention_mask,
                _CACHE_FIELD: cache,
                "position_ids": position_ids,
            }
            masks = {kind: _MASKS[kind](**mask_arguments) for kind in dict.fromkeys(kinds)}
        windows = {"full_attention": {}, "sliding_attention": {"sliding_window": self.config.sliding_window}}
        angles = self.rotary_emb(position_ids, inputs_embeds.dtype)
        hidden_states = inputs_embeds
        for i, layer in enumerate(self.layers):
            hidden_states = layer(
                hidden_states,
                attention_mask=masks[kinds[i]],
                position_ids=position_ids,
                position_embeddings=angles[i],
                use_cache=use_cache,
                **{_CACHE_FIELD: cache},
                **windows[kinds[i]],
                **kwargs,
            )
        hidden_states = self.norm(hidden_states)
        return MoeModelOutputWithPast(last_hidden_state=hidden_states, **{_CACHE_FIELD: cache})


class DeepseekMLAForCausalLM(DeepseekMLAPreTrainedModel, DeepseekV3ForCausalLM):
    """The language model: :class:`DeepseekMLAModel` and the output head."""

    def __init__(self, config: DeepseekMLAConfig) -> None:
        super(DeepseekV3ForCausalLM, self).__init__(config)  # DeepSeek's would build its own layers
        self.model = DeepseekMLAModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


__all__ = ["DeepseekMLAForCausalLM", "DeepseekMLAModel", "DeepseekMLAPreTrainedModel"]

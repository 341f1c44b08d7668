"""The native MLA model: a decoder whose attention caches one latent and one shared RoPE key a token.

Self-contained with its attention (torch and transformers only): both are also shipped beside converted weights, where
``trust_remote_code`` loads them. Differences from transformers' DeepSeek classes: no norm on the latent, RoPE slots of
any frequency chosen per layer, sizes that may differ by layer, optional biases, the source's own softmax scale, and
decoding in the absorbed form, which never rebuilds keys and values (DeepSeek-V2, https://arxiv.org/abs/2405.04434,
section 2.1).
"""

import logging
from dataclasses import fields

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention_mla import ATTENTION_MODES, DecodeBackend, MLAAttention, check_decode_backend, choose_decode_backend
from .configuration_mla import MLAConfig

log = logging.getLogger(__name__)

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
    """Angles of every layer's RoPE slots: inv_freq [layers, R/2], radians a position, R that of the widest layer.

    Rows of layers with fewer slots end in zeros, which are never read.
    """

    def __init__(self, config: MLAConfig) -> None:
        super().__init__()
        self.frequencies = config.rope_inv_freq
        self.attention_scaling = config.rope_attention_scaling
        self.register_buffer("inv_freq", self._rows(), persistent=False)

    def _rows(self) -> torch.Tensor:
        widest = max(map(len, self.frequencies))
        rows = [[*row, *[0.0] * (widest - len(row))] for row in self.frequencies]
        return torch.tensor(rows, dtype=torch.float32)

    def reset_buffers(self) -> None:
        """Fill the buffer again after the module was built without storage."""
        self.inv_freq.copy_(self._rows())

    @torch.no_grad()
    def forward(self, position_ids: torch.Tensor, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each layer's cos and sin, [B, S, R/2], for position_ids [B, S]."""
        frequencies = self.inv_freq.float().to(position_ids.device)
        angles = position_ids[None, ..., None].float() * frequencies[:, None, None, :]
        cos, sin = ((turn * self.attention_scaling).to(dtype) for turn in (angles.cos(), angles.sin()))
        return [(cos[i, ..., : len(row)], sin[i, ..., : len(row)]) for i, row in enumerate(self.frequencies)]


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
        self.wanted_backend = "auto"
        self._logged_backend: DecodeBackend | None = None
        self.post_init()

    @property
    def decode_backend(self) -> DecodeBackend:
        """What absorbed decoding uses where the weights are, and why."""
        return choose_decode_backend(self.wanted_backend, self.config, self.device, self.dtype)

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
        if getattr(cache, "is_compileable", False):
            # Its rows that hold nothing yet come before the queries, which a causal mask left to attention would miss.
            raise ValueError(
                "static caches are not supported: leave cache_implementation out, or use "
                "mla_convert.decode.PagedLatentCache"
            )
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)[None] + seen

        backend = choose_decode_backend(self.wanted_backend, self.config, inputs_embeds.device, inputs_embeds.dtype)
        if backend != self._logged_backend and not torch.compiler.is_compiling():
            log.info("absorbed decoding uses %s: %s", backend.name, backend.reason)
            self._logged_backend = backend
        mask_arguments = {
            "config": self.config,
            "inputs_embeds": inputs_embeds,
            "attention_mask": attention_mask,
            _CACHE_FIELD: cache,
            "position_ids": position_ids,
        }
        layer_types = self.config.layer_types or ["full_attention"] * len(self.layers)
        # A cache that attends by itself knows what its sequences see; it needs no mask and takes none.
        kinds = set() if hasattr(cache, "attend_latent") else set(layer_types)
        masks = {
            kind: (create_sliding_window_causal_mask if kind == "sliding_attention" else create_causal_mask)(
                **mask_arguments
            )
            for kind in kinds
        }
        angles = self.rotary_emb(position_ids, inputs_embeds.dtype)
        hidden_states = inputs_embeds
        for i, layer in enumerate(self.layers):
            hidden_states = layer(
                hidden_states,
                attention_mask=masks.get(layer_types[i]),
                position_embeddings=angles[i],
                cache=cache,
                decode_backend=backend.name,
                **kwargs,
            )
        hidden_states = self.norm(hidden_states)
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, **{_CACHE_FIELD: cache})


class MLAForCausalLM(MLAPreTrainedModel, GenerationMixin):
    """The language model: :class:`MLAModel` and the output head."""

    supports_paged_cache = True  # forward takes a cache with `attend_latent`: see MLAAttention
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

    @property
    def attention_mode(self) -> str:
        """How the layers attend."""
        return self.model.layers[0].self_attn.attention_mode

    def set_decode_backend(self, backend: str) -> None:
        """Choose what computes absorbed attention.

        ``auto`` takes the kernel of mla_kernels for tensors on a CUDA device where it is installed and no mask is
        needed, and matrix products otherwise; ``triton`` the kernel wherever no mask is needed; ``torch`` never.
        A paged cache attends through mla_kernels in any case, and by its torch path where the kernel is not used.
        """
        check_decode_backend(backend)
        self.model.wanted_backend = backend

    @property
    def decode_backend(self) -> DecodeBackend:
        """What absorbed decoding uses where the weights are (``name``), and why (``reason``)."""
        return self.model.decode_backend

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

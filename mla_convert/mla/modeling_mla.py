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
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention_mla import ATTENTION_MODES, DecodeBackend, MLAAttention, check_decode_backend, choose_decode_backend
from .blocks_mla import MLADecoderLayer, make_norm
from .configuration_mla import MLAConfig

log = logging.getLogger(__name__)

# transformers renamed the cache argument and output field from `past_key_values` to `cache` in 5.2x.
_CACHE_FIELD = "cache" if "cache" in {f.name for f in fields(CausalLMOutputWithPast)} else "past_key_values"


class MLAEmbedding(nn.Embedding):
    """Token embeddings times a factor, which is rounded to the weights' dtype, as Gemma's is."""

    def __init__(self, config: MLAConfig) -> None:
        super().__init__(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.scale = config.embedding_scale

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        embedded = super().forward(input_ids)
        return embedded if self.scale == 1 else embedded * embedded.new_tensor(self.scale)


class MLARotaryEmbedding(nn.Module):
    """Angles of every layer's RoPE slots: inv_freq [layers, R/2], radians a position, R that of the widest layer.

    Rows of layers with fewer slots end in zeros, which are never read. Where frequencies change with the length of the
    input, `changed` [layers, R/2] is what they change by: the frequencies beyond the original length (longrope), or the
    exponents of a base that grows with it (dynamic).
    """

    def __init__(self, config: MLAConfig) -> None:
        super().__init__()
        self.frequencies = config.rope_inv_freq
        self.attention_scaling = config.rope_attention_scaling
        self.update = config.rope_update
        self.pairs = config.rope_pairs
        self.register_buffer("inv_freq", _rows(self.frequencies), persistent=False)
        self.register_buffer("changed", self._changed(), persistent=False)

    def _changed(self) -> torch.Tensor | None:
        if self.update is None:
            return None
        if self.update["kind"] == "longrope":
            return _rows([[self.update["inv_freq"][pair] for pair in row] for row in self.pairs])
        return _rows([[2 * pair / self.update["dim"] for pair in row] for row in self.pairs])

    def reset_buffers(self) -> None:
        """Fill the buffers again after the module was built without storage."""
        self.inv_freq.copy_(_rows(self.frequencies))
        if self.changed is not None:
            self.changed.copy_(self._changed())

    def _at_length(self, length: torch.Tensor) -> torch.Tensor:
        """The frequencies for an input of so many tokens, [layers, R/2]."""
        update = self.update
        if update is None:
            return self.inv_freq.float()
        original, changed = update["original_positions"], self.changed.float()
        if update["kind"] == "dynamic":
            share, power = length.float() / original, update["dim"] / (update["dim"] - 2)
            theta = update["theta"] * (update["factor"] * share - update["factor"] + 1) ** power
            changed = theta**-changed
        changed = torch.where(self.inv_freq == 0, 0.0, changed)
        return torch.where(length > original, changed, self.inv_freq.float())

    @torch.no_grad()
    def forward(self, position_ids: torch.Tensor, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each layer's cos and sin, [B, S, R/2], for position_ids [B, S]."""
        frequencies = self._at_length(position_ids.max().to(self.inv_freq.device) + 1).to(position_ids.device)
        angles = position_ids[None, ..., None].float() * frequencies[:, None, None, :]
        scaling = torch.where(frequencies == 0, 1.0, self.attention_scaling)[:, None, None, :]
        cos, sin = ((turn * scaling).to(dtype) for turn in (angles.cos(), angles.sin()))
        return [(cos[i, ..., : len(row)], sin[i, ..., : len(row)]) for i, row in enumerate(self.frequencies)]


def _rows(values: list[list[float]]) -> torch.Tensor:
    widest = max(map(len, values))
    return torch.tensor([[*row, *[0.0] * (widest - len(row))] for row in values], dtype=torch.float32)


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
    """Embeddings, decoder layers and final norm."""

    def __init__(self, config: MLAConfig) -> None:
        super().__init__(config)
        self.embed_tokens = MLAEmbedding(config)
        self.embed_positions = self.embed_norm = None
        if config.learned_positions:
            self.embed_positions = nn.Embedding(config.learned_positions, config.hidden_size)
        if config.embedding_norm:
            self.embed_norm = make_norm(config)
        self.layers = nn.ModuleList([MLADecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = make_norm(config)
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
        if hasattr(cache, "attend_latent") and self.config.reason_against_paging is not None:
            raise ValueError(
                f"a cache that attends by itself cannot serve this model: {self.config.reason_against_paging}"
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
        arguments = self.layer_arguments(inputs_embeds, attention_mask, position_ids, cache)
        hidden_states = self.embed(inputs_embeds, position_ids)
        for layer, own in zip(self.layers, arguments, strict=True):
            hidden_states = layer(hidden_states, cache=cache, decode_backend=backend.name, **own, **kwargs)
        hidden_states = self.norm(hidden_states)
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, **{_CACHE_FIELD: cache})

    def embed(self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Return what the first layer reads, [B S D]: embeddings with learned positions and a norm, where there are."""
        if self.embed_positions is not None:
            inputs_embeds = inputs_embeds + self.embed_positions(position_ids)
        return inputs_embeds if self.embed_norm is None else self.embed_norm(inputs_embeds)

    def layer_arguments(
        self,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor,
        cache: Cache | None = None,
    ) -> list[dict]:
        """Return what each layer is called with beside the hidden states: its mask, its angles and any score bias.

        Of inputs_embeds [B S .] only the shape, dtype and device count.
        """
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
        shared = {}
        if self.config.alibi_slopes is not None:
            tokens = inputs_embeds.shape[1] + (cache.get_seq_length() if cache is not None else 0)
            shared["score_bias"] = self._score_bias(tokens, inputs_embeds, attention_mask)
        angles = self.rotary_emb(position_ids, inputs_embeds.dtype)
        return [
            {"attention_mask": masks.get(kind), "position_embeddings": turns, **shared}
            for kind, turns in zip(layer_types, angles, strict=True)
        ]

    def _score_bias(self, tokens: int, like: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """ALiBi (Press et al., 2022) of so many keys, [1 H 1 T]: slope·(distance from the last key).

        A softmax sees differences of scores alone, so that one row serves all queries; and counted from the end, the
        keys near most queries have the smallest numbers, which narrow dtypes hold best. With `alibi_rounded` it is
        slope·(place in the text), [1 or B, H 1 T], for that is what was rounded.
        """
        slopes = torch.tensor(self.config.alibi_slopes, dtype=torch.float32, device=like.device)
        if self.config.alibi_rounded:
            seen = torch.ones(1, tokens, device=like.device) if attention_mask is None else attention_mask
            places = (seen.long().cumsum(-1) - 1).clamp(min=0).to(torch.bfloat16)
            return (slopes.to(torch.bfloat16)[:, None] * places[:, None]).unsqueeze(2).to(like.dtype)
        from_last = torch.arange(1 - tokens, 1, dtype=torch.float32, device=like.device)
        return (slopes[:, None] * from_last)[None, :, None].to(like.dtype)


class MLAForCausalLM(MLAPreTrainedModel, GenerationMixin):
    """The language model: :class:`MLAModel` and the output head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: MLAConfig) -> None:
        super().__init__(config)
        self.model = MLAModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @property
    def supports_paged_cache(self) -> bool:
        """Whether forward takes a cache with `attend_latent`: see MLAAttention."""
        return self.config.reason_against_paging is None

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

    def logits_of(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The logits [... vocabulary] of hidden states [... D] that the last norm has seen."""
        logits = self.lm_head(hidden_states)
        if self.config.logits_scale != 1:
            logits = logits * self.config.logits_scale
        cap = self.config.final_logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def prepare_inputs_for_generation(self, input_ids: torch.LongTensor, **kwargs):
        """What transformers' method returns, without the cache where its keys are turned by frequencies of before.

        With longrope that is so at the token that first goes beyond the original length: the whole text is read again.
        """
        update, cache = self.config.rope_update, kwargs.get(_CACHE_FIELD)
        if update is not None and update["kind"] == "longrope" and cache is not None:
            mask, cached = kwargs.get("attention_mask"), cache.get_seq_length()
            whole = input_ids.shape[1] if mask is None or mask.ndim != 2 else int(mask.sum(-1).max())
            if whole - (input_ids.shape[1] - cached) <= update["original_positions"] < whole:
                kwargs[_CACHE_FIELD] = kwargs["next_sequence_length"] = None
        return super().prepare_inputs_for_generation(input_ids, **kwargs)

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
        logits = self.logits_of(outputs.last_hidden_state[:, kept, :])
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

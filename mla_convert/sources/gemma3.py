"""Gemma 3's language models: Gemma 2 with a norm of every query and key head, and RoPE by the type of the layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla_convert.errors import UnsupportedArchitectureError
from mla_convert.sources.gemma2 import Gemma2Adapter
from mla_convert.sources.layer_types import windows_by_layer_type
from mla_convert.sources.rope import FIXED_KINDS, padded_rope
from mla_convert.spec import QKNormSpec, RopeSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class Gemma3Adapter(Gemma2Adapter):
    """``Gemma3ForCausalLM``: layers with a window turn faster than those without, whose frequencies may be scaled."""

    architecture = "Gemma3ForCausalLM"
    family = "gemma3"
    # The class reads attn_logit_softcapping and leaves it at that, so a checkpoint that sets it is refused.
    known_fields = frozenset({"final_logit_softcapping", "query_pre_attn_scalar"})

    def config_class(self) -> type[PretrainedConfig]:
        from transformers import Gemma3TextConfig

        return Gemma3TextConfig

    def model_class(self) -> type[PreTrainedModel]:
        from transformers import Gemma3ForCausalLM

        return Gemma3ForCausalLM

    def rotary_class(self) -> Any:
        from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

        return Gemma3RotaryEmbedding

    def check(self, config: PretrainedConfig) -> None:
        super().check(config)
        windows_by_layer_type(config)  # refuses other types, for which there would be no RoPE below
        for layer_type, parameters in config.rope_parameters.items():
            kind, share = parameters["rope_type"], parameters.get("partial_rotary_factor") or 1.0
            if kind not in FIXED_KINDS or share != 1.0:
                raise UnsupportedArchitectureError(
                    f"config.json gives {layer_type} layers RoPE of type '{kind}' on a share of {share} of each head",
                    f"use a checkpoint whose heads turn as a whole, by one of {', '.join(FIXED_KINDS)}",
                )

    def qk_norm(self, config: PretrainedConfig) -> QKNormSpec:
        return QKNormSpec("head", config.rms_norm_eps)

    def rope(self, config: PretrainedConfig, head_dim: int) -> RopeSpec:
        """That of the layers without a window, which see the whole context, if there are any."""
        ropes = self._ropes(config, head_dim)
        return ropes.get("full_attention") or ropes["sliding_attention"]

    def layer_ropes(self, config: PretrainedConfig, head_dim: int) -> tuple[RopeSpec, ...]:
        ropes = self._ropes(config, head_dim)
        if len({rope.attention_scaling for rope in ropes.values()}) > 1:
            raise UnsupportedArchitectureError(
                "config.json gives layers of different types RoPE whose cos and sin are scaled differently",
                "use a checkpoint with the same scaling, or none, in every layer",
            )
        return tuple(ropes[kind] for kind in config.layer_types)

    def _ropes(self, config: PretrainedConfig, head_dim: int) -> dict[str, RopeSpec]:
        """By layer type."""
        rotary = self.rotary_class()(config)
        return {
            kind: padded_rope(
                getattr(rotary, f"{kind}_inv_freq").tolist(),
                head_dim,
                dict(config.rope_parameters[kind]),
                attention_scaling=float(getattr(rotary, f"{kind}_attention_scaling")),
            )
            for kind in sorted(set(config.layer_types))
        }

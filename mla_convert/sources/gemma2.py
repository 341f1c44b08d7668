"""Gemma 2: capped scores and logits, norms on both sides of attention and feed-forward block, alternating windows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from mla_convert.sources.adapter import Biases, DenseAdapter
from mla_convert.sources.layer_types import windows_by_layer_type
from mla_convert.spec import BlockSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class Gemma2Adapter(DenseAdapter):
    """``Gemma2ForCausalLM``: norms store w - 1, embeddings are scaled by √D, scores by ``query_pre_attn_scalar``^-½."""

    architecture = "Gemma2ForCausalLM"
    family = "gemma2"
    known_fields = frozenset({"attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"})
    norms: ClassVar = {
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "attention_output_layernorm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "mlp_output_layernorm",
    }

    def config_class(self) -> type[PretrainedConfig]:
        from transformers import Gemma2Config

        return Gemma2Config

    def model_class(self) -> type[PreTrainedModel]:
        from transformers import Gemma2ForCausalLM

        return Gemma2ForCausalLM

    def rotary_class(self) -> Any:
        from transformers.models.gemma2.modeling_gemma2 import Gemma2RotaryEmbedding

        return Gemma2RotaryEmbedding

    def biases(self, config: PretrainedConfig) -> Biases:
        bias = bool(config.attention_bias)
        return Biases(query=bias, key=bias, value=bias, output=bias)

    def windows(self, config: PretrainedConfig) -> tuple[int | None, ...]:
        return windows_by_layer_type(config)

    def block(self, config: PretrainedConfig) -> BlockSpec:
        return BlockSpec(
            norm_offset=1.0,
            output_norms=True,
            embedding_scale=config.hidden_size**0.5,
            final_logit_softcap=config.final_logit_softcapping,
        )

    def attention_scale(self, config: PretrainedConfig, head_dim: int) -> float:
        return config.query_pre_attn_scalar**-0.5

    def attention_softcap(self, config: PretrainedConfig) -> float | None:
        return config.attn_logit_softcapping or None

    def hidden_act(self, config: PretrainedConfig) -> str:
        # Published configs also hold a hidden_act, which the class ignores.
        return config.hidden_activation

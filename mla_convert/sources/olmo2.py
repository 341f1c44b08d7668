"""OLMo 2: norms on what attention and feed-forward block add instead of before them, and on all queries and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from mla_convert.sources.adapter import Biases, DenseAdapter
from mla_convert.spec import BlockSpec, QKNormSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class Olmo2Adapter(DenseAdapter):
    """``Olmo2ForCausalLM``: output norms only; one root mean square over all query heads and one over all KV heads."""

    architecture = "Olmo2ForCausalLM"
    family = "olmo2"
    norms: ClassVar = {
        "post_attention_layernorm": "attention_output_layernorm",
        "post_feedforward_layernorm": "mlp_output_layernorm",
    }

    def config_class(self) -> type[PretrainedConfig]:
        from transformers import Olmo2Config

        return Olmo2Config

    def model_class(self) -> type[PreTrainedModel]:
        from transformers import Olmo2ForCausalLM

        return Olmo2ForCausalLM

    def rotary_class(self) -> Any:
        from transformers.models.olmo2.modeling_olmo2 import Olmo2RotaryEmbedding

        return Olmo2RotaryEmbedding

    def biases(self, config: PretrainedConfig) -> Biases:
        bias = bool(config.attention_bias)
        return Biases(query=bias, key=bias, value=bias, output=bias)

    def block(self, config: PretrainedConfig) -> BlockSpec:
        return BlockSpec(input_norms=False, output_norms=True)

    def qk_norm(self, config: PretrainedConfig) -> QKNormSpec:
        return QKNormSpec("all", config.rms_norm_eps)

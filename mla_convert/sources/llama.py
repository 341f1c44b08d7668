"""Llama 2, 3 and 3.x, and the models that use its class unchanged (SmolLM, SmolLM2, TinyLlama, ...)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla_convert.sources.adapter import Biases, DenseAdapter

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class LlamaAdapter(DenseAdapter):
    """``LlamaForCausalLM``: full attention; ``attention_bias`` puts a bias on all four projections."""

    architecture = "LlamaForCausalLM"
    family = "llama"

    def config_class(self) -> type[PretrainedConfig]:
        from transformers import LlamaConfig

        return LlamaConfig

    def model_class(self) -> type[PreTrainedModel]:
        from transformers import LlamaForCausalLM

        return LlamaForCausalLM

    def rotary_class(self) -> Any:
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        return LlamaRotaryEmbedding

    def biases(self, config: PretrainedConfig) -> Biases:
        attention, mlp = bool(config.attention_bias), bool(config.mlp_bias)
        return Biases(query=attention, key=attention, value=attention, output=attention, mlp=mlp)

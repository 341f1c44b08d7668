"""Granite 3: Llama with factors of its own on embeddings, scores, residual branches and logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla_convert.sources.adapter import Biases, DenseAdapter
from mla_convert.spec import BlockSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class GraniteAdapter(DenseAdapter):
    """``GraniteForCausalLM``: ``logits_scaling`` divides, the other factors multiply."""

    architecture = "GraniteForCausalLM"
    family = "granite"
    known_fields = frozenset({"attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"})

    def config_class(self) -> type[PretrainedConfig]:
        from transformers import GraniteConfig

        return GraniteConfig

    def model_class(self) -> type[PreTrainedModel]:
        from transformers import GraniteForCausalLM

        return GraniteForCausalLM

    def rotary_class(self) -> Any:
        from transformers.models.granite.modeling_granite import GraniteRotaryEmbedding

        return GraniteRotaryEmbedding

    def biases(self, config: PretrainedConfig) -> Biases:
        attention, mlp = bool(config.attention_bias), bool(config.mlp_bias)
        return Biases(query=attention, key=attention, value=attention, output=attention, mlp=mlp)

    def attention_scale(self, config: PretrainedConfig, head_dim: int) -> float:
        return float(config.attention_multiplier)

    def block(self, config: PretrainedConfig) -> BlockSpec:
        return BlockSpec(
            embedding_scale=float(config.embedding_multiplier),
            residual_scale=float(config.residual_multiplier),
            logits_scale=1.0 / config.logits_scaling,
        )

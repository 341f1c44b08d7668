"""Qwen3-30B-A3B, Qwen3-235B-A22B: Qwen3's attention, which normalises queries and keys, and experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla_convert.sources.adapter import Biases
from mla_convert.sources.experts import ExpertAdapter, sparse_layers
from mla_convert.spec import BlockSpec, QKNormSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class Qwen3MoeAdapter(ExpertAdapter):
    """``Qwen3MoeForCausalLM``: an RMSNorm of every head's queries and keys; ``sliding_window`` is every layer's."""

    architecture = "Qwen3MoeForCausalLM"
    family = "qwen3_moe"

    def config_class(self) -> type[PretrainedConfig]:
        from transformers import Qwen3MoeConfig

        return Qwen3MoeConfig

    def model_class(self) -> type[PreTrainedModel]:
        from transformers import Qwen3MoeForCausalLM

        return Qwen3MoeForCausalLM

    def rotary_class(self) -> Any:
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

        return Qwen3MoeRotaryEmbedding

    def biases(self, config: PretrainedConfig) -> Biases:
        bias = bool(config.attention_bias)
        return Biases(query=bias, key=bias, value=bias, output=bias)

    def windows(self, config: PretrainedConfig) -> tuple[int | None, ...]:
        # The config class clears sliding_window unless use_sliding_window is set.
        return (config.sliding_window,) * config.num_hidden_layers

    def qk_norm(self, config: PretrainedConfig) -> QKNormSpec | None:
        return QKNormSpec("head", config.rms_norm_eps)

    def block(self, config: PretrainedConfig) -> BlockSpec:
        return BlockSpec(
            num_experts=config.num_experts,
            num_experts_per_tok=config.num_experts_per_tok,
            norm_topk_prob=bool(config.norm_topk_prob),
            moe_intermediate_size=config.moe_intermediate_size,
            expert_layers=sparse_layers(config),
        )

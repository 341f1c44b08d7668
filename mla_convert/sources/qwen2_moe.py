"""Qwen1.5-MoE and Qwen2-57B-A14B: Qwen2's attention, experts, and one expert that always answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla_convert.errors import UnsupportedArchitectureError
from mla_convert.sources.adapter import Biases
from mla_convert.sources.experts import ExpertAdapter, sparse_layers
from mla_convert.spec import BlockSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class Qwen2MoeAdapter(ExpertAdapter):
    """``Qwen2MoeForCausalLM``: ``qkv_bias`` on queries, keys and values; windows by ``layer_types``."""

    architecture = "Qwen2MoeForCausalLM"
    family = "qwen2_moe"

    def config_class(self) -> type[PretrainedConfig]:
        from transformers import Qwen2MoeConfig

        return Qwen2MoeConfig

    def model_class(self) -> type[PreTrainedModel]:
        from transformers import Qwen2MoeForCausalLM

        return Qwen2MoeForCausalLM

    def rotary_class(self) -> Any:
        from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeRotaryEmbedding

        return Qwen2MoeRotaryEmbedding

    def check(self, config: PretrainedConfig) -> None:
        super().check(config)
        unknown = set(config.layer_types) - {"full_attention", "sliding_attention"}
        if unknown:
            raise UnsupportedArchitectureError(
                f"config.json has layer_types {sorted(unknown)}",
                "use a checkpoint whose layers are full_attention or sliding_attention",
            )

    def biases(self, config: PretrainedConfig) -> Biases:
        bias = bool(config.qkv_bias)
        return Biases(query=bias, key=bias, value=bias)

    def windows(self, config: PretrainedConfig) -> tuple[int | None, ...]:
        return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types)

    def block(self, config: PretrainedConfig) -> BlockSpec:
        return BlockSpec(
            num_experts=config.num_experts,
            num_experts_per_tok=config.num_experts_per_tok,
            norm_topk_prob=bool(config.norm_topk_prob),
            moe_intermediate_size=config.moe_intermediate_size,
            shared_expert_intermediate_size=config.shared_expert_intermediate_size,
            expert_layers=sparse_layers(config),
        )

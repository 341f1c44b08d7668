"""Mixtral: Mistral's attention, and experts in every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla_convert.sources.experts import ExpertAdapter
from mla_convert.spec import BlockSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class MixtralAdapter(ExpertAdapter):
    """``MixtralForCausalLM``: the weights of the experts that answer sum to 1; ``sliding_window`` is every layer's."""

    architecture = "MixtralForCausalLM"
    family = "mixtral"
    mixture = "block_sparse_moe"
    projections = ("w1", "w3", "w2")

    def config_class(self) -> type[PretrainedConfig]:
        from transformers import MixtralConfig

        return MixtralConfig

    def model_class(self) -> type[PreTrainedModel]:
        from transformers import MixtralForCausalLM

        return MixtralForCausalLM

    def rotary_class(self) -> Any:
        from transformers.models.mixtral.modeling_mixtral import MixtralRotaryEmbedding

        return MixtralRotaryEmbedding

    def windows(self, config: PretrainedConfig) -> tuple[int | None, ...]:
        return (config.sliding_window,) * config.num_hidden_layers

    def block(self, config: PretrainedConfig) -> BlockSpec:
        return BlockSpec(
            num_experts=config.num_local_experts,
            num_experts_per_tok=config.num_experts_per_tok,
            moe_intermediate_size=config.intermediate_size,
        )

"""Mistral 7B and its kin: Llama without biases, and one sliding window for all layers or none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla_convert.errors import UnsupportedArchitectureError
from mla_convert.sources.adapter import DenseAdapter

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class MistralAdapter(DenseAdapter):
    """``MistralForCausalLM``: no biases; ``sliding_window`` holds for every layer."""

    architecture = "MistralForCausalLM"
    family = "mistral"

    def config_class(self) -> type[PretrainedConfig]:
        from transformers import MistralConfig

        return MistralConfig

    def model_class(self) -> type[PreTrainedModel]:
        from transformers import MistralForCausalLM

        return MistralForCausalLM

    def rotary_class(self) -> Any:
        from transformers.models.mistral.modeling_mistral import MistralRotaryEmbedding

        return MistralRotaryEmbedding

    def check(self, config: PretrainedConfig) -> None:
        super().check(config)
        kinds = set(getattr(config, "layer_types", None) or ())
        if len(kinds) > 1:
            raise UnsupportedArchitectureError(
                f"config.json mixes layer_types {sorted(kinds)}, which MistralForCausalLM itself ignores",
                "use a checkpoint whose layers all attend alike",
            )

    def windows(self, config: PretrainedConfig) -> tuple[int | None, ...]:
        return (config.sliding_window,) * config.num_hidden_layers

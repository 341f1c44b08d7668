"""Qwen2 and Qwen2.5: biases on queries, keys and values; optionally a sliding window on the upper layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla_convert.sources.adapter import Biases, DenseAdapter
from mla_convert.sources.layer_types import windows_by_layer_type

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class Qwen2Adapter(DenseAdapter):
    """``Qwen2ForCausalLM``: Q, K and V biases always; windows by ``layer_types``."""

    architecture = "Qwen2ForCausalLM"
    family = "qwen2"

    def config_class(self) -> type[PretrainedConfig]:
        from transformers import Qwen2Config

        return Qwen2Config

    def model_class(self) -> type[PreTrainedModel]:
        from transformers import Qwen2ForCausalLM

        return Qwen2ForCausalLM

    def rotary_class(self) -> Any:
        from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

        return Qwen2RotaryEmbedding

    def biases(self, config: PretrainedConfig) -> Biases:
        return Biases(query=True, key=True, value=True)

    def windows(self, config: PretrainedConfig) -> tuple[int | None, ...]:
        # The config class clears sliding_window unless use_sliding_window is set, and turns max_window_layers into
        # layer_types.
        return windows_by_layer_type(config)

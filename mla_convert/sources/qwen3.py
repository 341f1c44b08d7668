"""Qwen3: Qwen2's windows, a norm of every query and key head, and biases only where the config asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla_convert.sources.adapter import Biases, DenseAdapter
from mla_convert.sources.layer_types import windows_by_layer_type
from mla_convert.spec import QKNormSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class Qwen3Adapter(DenseAdapter):
    """``Qwen3ForCausalLM``: RMSNorm of each query and key head; ``attention_bias`` is on all four projections."""

    architecture = "Qwen3ForCausalLM"
    family = "qwen3"

    def config_class(self) -> type[PretrainedConfig]:
        from transformers import Qwen3Config

        return Qwen3Config

    def model_class(self) -> type[PreTrainedModel]:
        from transformers import Qwen3ForCausalLM

        return Qwen3ForCausalLM

    def rotary_class(self) -> Any:
        from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

        return Qwen3RotaryEmbedding

    def biases(self, config: PretrainedConfig) -> Biases:
        bias = bool(config.attention_bias)
        return Biases(query=bias, key=bias, value=bias, output=bias)

    def windows(self, config: PretrainedConfig) -> tuple[int | None, ...]:
        return windows_by_layer_type(config)

    def qk_norm(self, config: PretrainedConfig) -> QKNormSpec:
        return QKNormSpec("head", config.rms_norm_eps)

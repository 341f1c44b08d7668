"""StarCoder2: LayerNorms, a plain feed-forward block, biases everywhere, and one sliding window for all layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mla_convert.sources.adapter import Biases, DenseAdapter
from mla_convert.sources.roles import Role, copied
from mla_convert.spec import BlockSpec, SourceSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class Starcoder2Adapter(DenseAdapter):
    """``Starcoder2ForCausalLM``: ``use_bias`` puts a bias on every projection."""

    architecture = "Starcoder2ForCausalLM"
    family = "starcoder2"

    def config_class(self) -> type[PretrainedConfig]:
        from transformers import Starcoder2Config

        return Starcoder2Config

    def model_class(self) -> type[PreTrainedModel]:
        from transformers import Starcoder2ForCausalLM

        return Starcoder2ForCausalLM

    def rotary_class(self) -> Any:
        from transformers.models.starcoder2.modeling_starcoder2 import Starcoder2RotaryEmbedding

        return Starcoder2RotaryEmbedding

    def biases(self, config: PretrainedConfig) -> Biases:
        bias = bool(config.use_bias)
        return Biases(query=bias, key=bias, value=bias, output=bias, mlp=bias)

    def windows(self, config: PretrainedConfig) -> tuple[int | None, ...]:
        return (config.sliding_window,) * config.num_hidden_layers

    def block(self, config: PretrainedConfig) -> BlockSpec:
        return BlockSpec(norm="layer", norm_bias=True, mlp="plain")

    def norm_eps(self, config: PretrainedConfig) -> float:
        return config.norm_epsilon

    def mlp_tensors(self, spec: SourceSpec, layer: int) -> Iterator[tuple[str, Role, tuple[int, ...]]]:
        prefix, width, inner = f"model.layers.{layer}.mlp.", spec.hidden_size, spec.intermediate_size
        for name, target, rows, columns in (("c_fc", "up_proj", inner, width), ("c_proj", "down_proj", width, inner)):
            yield f"{prefix}{name}.weight", copied(f"{prefix}{target}.weight", layer), (rows, columns)
            if spec.mlp_bias:
                yield f"{prefix}{name}.bias", copied(f"{prefix}{target}.bias", layer), (rows,)

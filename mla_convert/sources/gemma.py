"""Gemma 1: Llama with norms that store w - 1, scaled embeddings, and heads wider than their share of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla_convert.errors import UnsupportedArchitectureError
from mla_convert.sources.adapter import Biases, DenseAdapter
from mla_convert.spec import BlockSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class GemmaAdapter(DenseAdapter):
    """``GemmaForCausalLM``: embeddings are scaled by √D; the 2B has one KV head, the 7B one for each query head."""

    architecture = "GemmaForCausalLM"
    family = "gemma"

    def config_class(self) -> type[PretrainedConfig]:
        from transformers import GemmaConfig

        return GemmaConfig

    def model_class(self) -> type[PreTrainedModel]:
        from transformers import GemmaForCausalLM

        return GemmaForCausalLM

    def rotary_class(self) -> Any:
        from transformers.models.gemma.modeling_gemma import GemmaRotaryEmbedding

        return GemmaRotaryEmbedding

    def biases(self, config: PretrainedConfig) -> Biases:
        bias = bool(config.attention_bias)
        return Biases(query=bias, key=bias, value=bias, output=bias)

    def block(self, config: PretrainedConfig) -> BlockSpec:
        return BlockSpec(norm_offset=1.0, embedding_scale=config.hidden_size**0.5)

    def check(self, config: PretrainedConfig) -> None:
        """Refuse an activation that releases of transformers read differently.

        Gemma's first files say ``gelu`` and mean its tanh form. Newer releases correct that when they read the config,
        older ones do not; ``hidden_activation``, which releases in between followed, is now ignored.
        """
        super().check(config)
        named = getattr(config, "hidden_activation", None)
        if config.hidden_act == "gelu" or named not in (None, config.hidden_act):
            raise UnsupportedArchitectureError(
                f"hidden_act is {config.hidden_act!r} and hidden_activation {named!r}: which of the two this Gemma was "
                "trained with, or gelu's tanh form, depends on the release of transformers",
                "set both to the one it was trained with in config.json (gelu_pytorch_tanh for Google's models)",
            )

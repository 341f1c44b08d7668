"""BLOOM: ALiBi instead of positions, and a norm on the embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from mla_convert.errors import UnsupportedArchitectureError
from mla_convert.sources.adapter import Biases
from mla_convert.sources.alibi import alibi_slopes
from mla_convert.sources.fused import FusedAdapter, norm_tensors
from mla_convert.sources.roles import Role
from mla_convert.spec import BlockSpec, SourceSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class BloomAdapter(FusedAdapter):
    """``BloomForCausalLM``: no RoPE; biases on every projection."""

    architecture = "BloomForCausalLM"
    family = "bloom"
    base_prefix = "transformer."
    embedding = "transformer.word_embeddings.weight"
    layer = "transformer.h.{}."
    qkv = "self_attention.query_key_value"
    output = "self_attention.dense"
    up = "mlp.dense_h_to_4h"
    down = "mlp.dense_4h_to_h"
    norms: ClassVar = {
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_attention_layernorm",
    }
    final_norm = "transformer.ln_f"
    dropped = ()

    def config_class(self) -> type[PretrainedConfig]:
        from transformers import BloomConfig

        return BloomConfig

    def model_class(self) -> type[PreTrainedModel]:
        from transformers import BloomForCausalLM

        return BloomForCausalLM

    def check(self, config: PretrainedConfig) -> None:
        super().check(config)
        if config.apply_residual_connection_post_layernorm:
            raise UnsupportedArchitectureError(
                "config.json sets apply_residual_connection_post_layernorm: norms are on the residual stream itself",
                "use a BLOOM without it; the published ones have none",
            )

    def activation(self, config: PretrainedConfig) -> str:
        return "gelu_pytorch_tanh"

    def context(self, config: PretrainedConfig) -> int:
        # The class needs no limit; published configs tell the length that the model was trained on.
        return getattr(config, "seq_length", None) or 2048

    def biases(self, config: PretrainedConfig) -> Biases:
        return Biases(query=True, key=True, value=True, output=True, mlp=True)

    def alibi(self, config: PretrainedConfig, head_dim: int) -> tuple[float, ...]:
        return alibi_slopes(config.num_attention_heads)

    def block(self, config: PretrainedConfig) -> BlockSpec:
        return BlockSpec(norm="layer", norm_bias=True, mlp="plain", embedding_norm=True)

    def outside_layers(self, spec: SourceSpec) -> Iterator[tuple[str, Role, tuple[int, ...]]]:
        yield from norm_tensors("transformer.word_embeddings_layernorm", "model.embed_norm", spec, None)

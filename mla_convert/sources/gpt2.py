"""GPT-2 and models of its class: learned positions, and projections stored as [in, out]."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from mla_convert.errors import UnsupportedArchitectureError
from mla_convert.sources.adapter import Biases
from mla_convert.sources.fused import FusedAdapter
from mla_convert.sources.roles import Role, copied
from mla_convert.spec import BlockSpec, SourceSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_REFUSED = {
    "scale_attn_by_inverse_layer_idx": "scores have a scale of their own in each layer",
    "reorder_and_upcast_attn": "keys are scaled before the product with queries, in float32",
    "add_cross_attention": "layers attend to an encoder as well",
}


class GPT2Adapter(FusedAdapter):
    """``GPT2LMHeadModel``: no RoPE; biases on every projection."""

    architecture = "GPT2LMHeadModel"
    family = "gpt2"
    base_prefix = "transformer."
    embedding = "transformer.wte.weight"
    layer = "transformer.h.{}."
    qkv = "attn.c_attn"
    output = "attn.c_proj"
    up = "mlp.c_fc"
    down = "mlp.c_proj"
    norms: ClassVar = {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm"}
    final_norm = "transformer.ln_f"
    grouped = False
    transposed = True
    dropped = ((re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)"), "a causal mask, which is made anew"),)

    def config_class(self) -> type[PretrainedConfig]:
        from transformers import GPT2Config

        return GPT2Config

    def model_class(self) -> type[PreTrainedModel]:
        from transformers import GPT2LMHeadModel

        return GPT2LMHeadModel

    def check(self, config: PretrainedConfig) -> None:
        super().check(config)
        for field, meaning in _REFUSED.items():
            if getattr(config, field):
                raise UnsupportedArchitectureError(
                    f"config.json sets {field}: {meaning}", "use a GPT-2 without it; most have none of these"
                )

    def intermediate_size(self, config: PretrainedConfig) -> int:
        return config.n_inner or 4 * config.hidden_size

    def activation(self, config: PretrainedConfig) -> str:
        return config.activation_function

    def attention_scale(self, config: PretrainedConfig, head_dim: int) -> float:
        return head_dim**-0.5 if config.scale_attn_weights else 1.0

    def biases(self, config: PretrainedConfig) -> Biases:
        return Biases(query=True, key=True, value=True, output=True, mlp=True)

    def block(self, config: PretrainedConfig) -> BlockSpec:
        return BlockSpec(norm="layer", norm_bias=True, mlp="plain", learned_positions=config.max_position_embeddings)

    def outside_layers(self, spec: SourceSpec) -> Iterator[tuple[str, Role, tuple[int, ...]]]:
        shape = (spec.block.learned_positions, spec.hidden_size)
        yield "transformer.wpe.weight", copied("model.embed_positions.weight"), shape

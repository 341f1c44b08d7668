"""GPT-NeoX 20B, Pythia and their kin: heads that turn in part, and mostly a parallel feed-forward block."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from mla_convert.sources.adapter import Biases
from mla_convert.sources.fused import FusedAdapter
from mla_convert.sources.rope import rope_spec
from mla_convert.spec import BlockSpec, RopeSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class GPTNeoXAdapter(FusedAdapter):
    """``GPTNeoXForCausalLM``: two norms a layer even with ``use_parallel_residual``; biases but for the embeddings."""

    architecture = "GPTNeoXForCausalLM"
    family = "gpt_neox"
    embedding = "gpt_neox.embed_in.weight"
    head = "embed_out.weight"
    layer = "gpt_neox.layers.{}."
    qkv = "attention.query_key_value"
    output = "attention.dense"
    up = "mlp.dense_h_to_4h"
    down = "mlp.dense_4h_to_h"
    norms: ClassVar = {
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_attention_layernorm",
    }
    final_norm = "gpt_neox.final_layer_norm"
    dropped = (
        (re.compile(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias)"), "a causal mask, which is made anew"),
        (re.compile(r"gpt_neox\.layers\.\d+\.attention\.rotary_emb\.inv_freq"), "recomputed from the config"),
    )

    def config_class(self) -> type[PretrainedConfig]:
        from transformers import GPTNeoXConfig

        return GPTNeoXConfig

    def model_class(self) -> type[PreTrainedModel]:
        from transformers import GPTNeoXForCausalLM

        return GPTNeoXForCausalLM

    def rope(self, config: PretrainedConfig, head_dim: int) -> RopeSpec:
        from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding

        return rope_spec(config, GPTNeoXRotaryEmbedding, head_dim)

    def intermediate_size(self, config: PretrainedConfig) -> int:
        return config.intermediate_size

    def activation(self, config: PretrainedConfig) -> str:
        return config.hidden_act

    def norm_eps(self, config: PretrainedConfig) -> float:
        return config.layer_norm_eps

    def biases(self, config: PretrainedConfig) -> Biases:
        bias = bool(config.attention_bias)
        return Biases(query=bias, key=bias, value=bias, output=bias, mlp=True)

    def block(self, config: PretrainedConfig) -> BlockSpec:
        parallel = bool(config.use_parallel_residual)
        return BlockSpec(norm="layer", norm_bias=True, mlp="plain", parallel_residual=parallel)

"""Falcon 7B, 40B, 180B and RW: one to many KV heads, norms shared or not, RoPE or ALiBi."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mla_convert.errors import UnsupportedArchitectureError
from mla_convert.sources.adapter import Biases
from mla_convert.sources.alibi import alibi_slopes
from mla_convert.sources.fused import FusedAdapter
from mla_convert.sources.rope import rope_spec
from mla_convert.spec import BlockSpec, RopeSpec, SourceSpec, no_rope

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class FalconAdapter(FusedAdapter):
    """``FalconForCausalLM``: ``new_decoder_architecture`` (40B) has grouped queries, and two norms for a parallel
    block or one; otherwise ``multi_query`` and ``parallel_attn`` (7B) decide, and ``alibi`` (RW) takes RoPE's place.
    """

    architecture = "FalconForCausalLM"
    family = "falcon"
    embedding = "transformer.word_embeddings.weight"
    layer = "transformer.h.{}."
    qkv = "self_attention.query_key_value"
    output = "self_attention.dense"
    up = "mlp.dense_h_to_4h"
    down = "mlp.dense_4h_to_h"
    final_norm = "transformer.ln_f"
    dropped = (
        (
            re.compile(r"transformer\.h\.\d+\.self_attention\.(maybe_rotary|rotary_emb)\.inv_freq"),
            "recomputed from the config",
        ),
    )

    def config_class(self) -> type[PretrainedConfig]:
        from transformers import FalconConfig

        return FalconConfig

    def model_class(self) -> type[PreTrainedModel]:
        from transformers import FalconForCausalLM

        return FalconForCausalLM

    def check(self, config: PretrainedConfig) -> None:
        super().check(config)
        if config.new_decoder_architecture and not config.parallel_attn:
            raise UnsupportedArchitectureError(
                "config.json has new_decoder_architecture without parallel_attn, which its class cannot run",
                "check both in config.json",
            )
        grouped = not config.multi_query and config.num_kv_heads != config.num_attention_heads
        if grouped and not config.new_decoder_architecture:
            raise UnsupportedArchitectureError(
                f"config.json has {config.num_kv_heads} KV heads for {config.num_attention_heads} query heads without "
                "new_decoder_architecture, which its class cannot run",
                "check num_kv_heads, multi_query and new_decoder_architecture in config.json",
            )
        dim = config.hidden_size // config.num_attention_heads
        root = math.isqrt(dim)
        if config.alibi and (root * root != dim or root.bit_count() > 1):
            raise UnsupportedArchitectureError(
                f"config.json sets alibi, whose biases the class rounds before it divides them by the root of {dim}",
                "use a Falcon with RoPE, or with heads of 64 dims as the published ones have",
            )
        if config.num_ln_in_parallel_attn not in ((None, 1, 2) if config.new_decoder_architecture else (None, 1)):
            raise UnsupportedArchitectureError(
                f"config.json sets num_ln_in_parallel_attn = {config.num_ln_in_parallel_attn}, which its class cannot "
                "run",
                "check new_decoder_architecture and num_ln_in_parallel_attn in config.json",
            )

    def kv_heads(self, config: PretrainedConfig) -> int:
        if config.new_decoder_architecture:
            return config.num_kv_heads
        return 1 if config.multi_query else config.num_attention_heads

    def intermediate_size(self, config: PretrainedConfig) -> int:
        return config.ffn_hidden_size

    def activation(self, config: PretrainedConfig) -> str:
        return config.activation

    def biases(self, config: PretrainedConfig) -> Biases:
        bias = bool(config.bias)
        return Biases(query=bias, key=bias, value=bias, output=bias, mlp=bias)

    def rope(self, config: PretrainedConfig, head_dim: int) -> RopeSpec:
        from transformers.models.falcon.modeling_falcon import FalconRotaryEmbedding

        return no_rope(head_dim) if config.alibi else rope_spec(config, FalconRotaryEmbedding, head_dim)

    def alibi(self, config: PretrainedConfig, head_dim: int) -> tuple[float, ...] | None:
        if not config.alibi:
            return None
        # The class scales scores and biases together, after it has rounded the biases.
        return tuple(slope * head_dim**-0.5 for slope in alibi_slopes(config.num_attention_heads))

    def alibi_rounded(self, config: PretrainedConfig) -> bool:
        return bool(config.alibi)

    def block(self, config: PretrainedConfig) -> BlockSpec:
        parallel = bool(config.parallel_attn)
        two = config.new_decoder_architecture and config.num_ln_in_parallel_attn != 1
        return BlockSpec(
            norm="layer",
            norm_bias=True,
            mlp="plain",
            parallel_residual=parallel,
            shared_input_norm=parallel and not two,
        )

    def norms_of(self, spec: SourceSpec) -> Mapping[str, str]:
        if spec.block.parallel_residual and not spec.block.shared_input_norm:
            return {"ln_attn": "input_layernorm", "ln_mlp": "post_attention_layernorm"}
        if spec.block.shared_input_norm:
            return {"input_layernorm": "input_layernorm"}
        return {
            "input_layernorm": "input_layernorm",
            "post_attention_layernorm": "post_attention_layernorm",
        }

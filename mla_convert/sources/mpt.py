"""MPT: ALiBi instead of positions, and no biases at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mla_convert.errors import UnsupportedArchitectureError
from mla_convert.sources.alibi import alibi_slopes
from mla_convert.sources.fused import FusedAdapter
from mla_convert.spec import BlockSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Fields and the values with which transformers' class does what they say; it takes no notice of others.
_MODEL = (
    ("no_bias", (True,), "projections and norms have biases"),
    ("logit_scale", (None, 1, 1.0), "logits are scaled"),
)
_ATTENTION = (
    ("alibi", (True,), "positions are learned"),
    ("alibi_bias_max", (8,), "ALiBi has other slopes than its class in transformers gives it"),
    ("attn_type", ("multihead_attention",), "query heads share keys and values"),
    ("clip_qkv", (None, 0, 0.0), "queries, keys and values are clipped"),
    ("prefix_lm", (False,), "attention is not causal within a prefix"),
    ("qk_ln", (False,), "queries and keys are normalised"),
)


class MptAdapter(FusedAdapter):
    """``MptForCausalLM``: no RoPE; ``softmax_scale`` sets the scale of scores."""

    architecture = "MptForCausalLM"
    family = "mpt"
    known_fields = frozenset({"logit_scale"})  # refused below, with what it means here
    embedding = "transformer.wte.weight"
    layer = "transformer.blocks.{}."
    qkv = "attn.Wqkv"
    output = "attn.out_proj"
    up = "ffn.up_proj"
    down = "ffn.down_proj"
    norms: ClassVar = {"norm_1": "input_layernorm", "norm_2": "post_attention_layernorm"}
    final_norm = "transformer.norm_f"
    grouped = False
    dropped = ()

    def config_class(self) -> type[PretrainedConfig]:
        from transformers import MptConfig

        return MptConfig

    def model_class(self) -> type[PreTrainedModel]:
        from transformers import MptForCausalLM

        return MptForCausalLM

    def check(self, config: PretrainedConfig) -> None:
        super().check(config)
        for owner, fields, prefix in ((config, _MODEL, ""), (config.attn_config, _ATTENTION, "attn_config.")):
            for field, harmless, meaning in fields:
                value = getattr(owner, field)
                if value not in harmless:
                    raise UnsupportedArchitectureError(
                        f"config.json sets {prefix}{field} = {value!r}: {meaning}, which is not supported",
                        "use an MPT without it, such as MPT-7B",
                    )

    def context(self, config: PretrainedConfig) -> int:
        return config.max_seq_len

    def attention_scale(self, config: PretrainedConfig, head_dim: int) -> float:
        scale = config.attn_config.softmax_scale
        return head_dim**-0.5 if scale is None else float(scale)

    def alibi(self, config: PretrainedConfig, head_dim: int) -> tuple[float, ...]:
        return alibi_slopes(config.num_attention_heads)

    def block(self, config: PretrainedConfig) -> BlockSpec:
        return BlockSpec(norm="layer", mlp="plain")


class MosaicMptAdapter(MptAdapter):
    """``MPTForCausalLM``: what MosaicML's own checkpoints call the same model."""

    architecture = "MPTForCausalLM"

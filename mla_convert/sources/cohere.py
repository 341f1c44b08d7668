"""Command R and Aya 23: neighbouring dims pair in RoPE, one LayerNorm a layer, and scaled logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mla_convert.sources.adapter import Biases, DenseAdapter
from mla_convert.sources.attention import AttentionWeights
from mla_convert.sources.centring import centred
from mla_convert.sources.rope import rope_spec
from mla_convert.spec import BlockSpec, QKNormSpec, RopeSpec, SourceSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class CohereAdapter(DenseAdapter):
    """``CohereForCausalLM``: attention and feed-forward block read the same norm; ``use_qk_norm`` is by heads."""

    architecture = "CohereForCausalLM"
    family = "cohere"
    known_fields = frozenset({"use_qk_norm", "logit_scale"})

    def config_class(self) -> type[PretrainedConfig]:
        from transformers import CohereConfig

        return CohereConfig

    def model_class(self) -> type[PreTrainedModel]:
        from transformers import CohereForCausalLM

        return CohereForCausalLM

    def rotary_class(self) -> Any:
        from transformers.models.cohere.modeling_cohere import CohereRotaryEmbedding

        return CohereRotaryEmbedding

    def rope(self, config: PretrainedConfig, head_dim: int) -> RopeSpec:
        return rope_spec(config, self.rotary_class(), head_dim, interleaved=True)

    def biases(self, config: PretrainedConfig) -> Biases:
        bias = bool(config.attention_bias)
        return Biases(query=bias, key=bias, value=bias, output=bias)

    def block(self, config: PretrainedConfig) -> BlockSpec:
        return BlockSpec(
            norm="layer", parallel_residual=True, shared_input_norm=True, logits_scale=float(config.logit_scale)
        )

    def norm_eps(self, config: PretrainedConfig) -> float:
        return config.layer_norm_eps

    def qk_norm(self, config: PretrainedConfig) -> QKNormSpec | None:
        return QKNormSpec("head", config.layer_norm_eps) if config.use_qk_norm else None

    def attention_tensors(self, spec: SourceSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
        by_heads = {
            "q_norm.weight": (spec.num_heads, spec.head_dim),
            "k_norm.weight": (spec.num_kv_heads, spec.head_dim),
        }
        for name, shape in super().attention_tensors(spec):
            yield name, by_heads.get(name, shape)

    def with_qk_norm(
        self, weights: AttentionWeights, spec: SourceSpec, read: Callable[[str], Tensor]
    ) -> AttentionWeights:
        return centred(weights, read("q_norm.weight"), read("k_norm.weight"))

"""StableLM 2, StableLM 3B and Zephyr 3B: LayerNorms with biases, and heads that turn in part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mla_convert.sources.adapter import Biases, DenseAdapter
from mla_convert.sources.attention import AttentionWeights
from mla_convert.sources.centring import centred
from mla_convert.spec import BlockSpec, QKNormSpec, SourceSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class StableLmAdapter(DenseAdapter):
    """``StableLmForCausalLM``: ``qk_layernorm`` gives every head a LayerNorm, ``use_parallel_residual`` one a layer."""

    architecture = "StableLmForCausalLM"
    family = "stablelm"
    known_fields = frozenset({"qk_layernorm"})

    def config_class(self) -> type[PretrainedConfig]:
        from transformers import StableLmConfig

        return StableLmConfig

    def model_class(self) -> type[PreTrainedModel]:
        from transformers import StableLmForCausalLM

        return StableLmForCausalLM

    def rotary_class(self) -> Any:
        from transformers.models.stablelm.modeling_stablelm import StableLmRotaryEmbedding

        return StableLmRotaryEmbedding

    def biases(self, config: PretrainedConfig) -> Biases:
        bias = bool(config.use_qkv_bias)
        return Biases(query=bias, key=bias, value=bias)

    def block(self, config: PretrainedConfig) -> BlockSpec:
        parallel = bool(config.use_parallel_residual)
        return BlockSpec(norm="layer", norm_bias=True, parallel_residual=parallel, shared_input_norm=parallel)

    def norm_eps(self, config: PretrainedConfig) -> float:
        return config.layer_norm_eps

    def qk_norm(self, config: PretrainedConfig) -> QKNormSpec | None:
        return QKNormSpec("head", config.layer_norm_eps) if config.qk_layernorm else None

    def attention_tensors(self, spec: SourceSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, shape in super().attention_tensors(spec):
            if not name.endswith("_norm.weight"):
                yield name, shape
        if spec.qk_norm is not None:
            for kind, heads in (("q", spec.num_heads), ("k", spec.num_kv_heads)):
                for head in range(heads):
                    yield f"{kind}_layernorm.norms.{head}.weight", (spec.head_dim,)

    def with_qk_norm(
        self, weights: AttentionWeights, spec: SourceSpec, read: Callable[[str], Tensor]
    ) -> AttentionWeights:
        def stacked(kind: str, heads: int) -> Tensor:
            return torch.stack([read(f"{kind}_layernorm.norms.{head}.weight") for head in range(heads)])

        return centred(weights, stacked("q", spec.num_heads), stacked("k", spec.num_kv_heads))

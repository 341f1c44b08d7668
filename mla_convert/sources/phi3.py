"""Phi-3, Phi-3.5 and Phi-4-mini: fused projections, and RoPE that may turn part of a head or change with length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mla_convert.sources.adapter import DenseAdapter
from mla_convert.sources.attention import AttentionWeights
from mla_convert.sources.roles import Copied, Part, Role, copied
from mla_convert.spec import SourceSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class Phi3Adapter(DenseAdapter):
    """``Phi3ForCausalLM``: one matrix for queries, keys and values, one for gate and up; ``sliding_window`` for all."""

    architecture = "Phi3ForCausalLM"
    family = "phi3"

    def config_class(self) -> type[PretrainedConfig]:
        from transformers import Phi3Config

        return Phi3Config

    def model_class(self) -> type[PreTrainedModel]:
        from transformers import Phi3ForCausalLM

        return Phi3ForCausalLM

    def rotary_class(self) -> Any:
        from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

        return Phi3RotaryEmbedding

    def windows(self, config: PretrainedConfig) -> tuple[int | None, ...]:
        return (config.sliding_window,) * config.num_hidden_layers

    def attention_tensors(self, spec: SourceSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "qkv_proj.weight", (sum(_fused_rows(spec)), spec.hidden_size)
        yield "o_proj.weight", (spec.hidden_size, spec.num_heads * spec.head_dim)

    def mlp_tensors(self, spec: SourceSpec, layer: int) -> Iterator[tuple[str, Role, tuple[int, ...]]]:
        prefix, width, inner = f"model.layers.{layer}.mlp.", spec.hidden_size, spec.intermediate_size
        gate = Part(f"{prefix}gate_proj.weight", rows=(0, inner))
        up = Part(f"{prefix}up_proj.weight", rows=(inner, 2 * inner))
        yield f"{prefix}gate_up_proj.weight", Copied((gate, up), layer), (2 * inner, width)
        yield f"{prefix}down_proj.weight", copied(f"{prefix}down_proj.weight", layer), (width, inner)

    def attention(self, spec: SourceSpec, read: Callable[[str], Tensor], layer: int) -> AttentionWeights:
        prefix = f"model.layers.{layer}.self_attn."
        names = (f"{prefix}{part}_proj.weight" for part in "qkv")
        pieces = dict(zip(names, read(f"{prefix}qkv_proj.weight").split(_fused_rows(spec)), strict=True))
        return super().attention(spec, lambda name: pieces[name] if name in pieces else read(name), layer)


def _fused_rows(spec: SourceSpec) -> list[int]:
    """Rows of queries, keys and values in their common matrix."""
    shared = spec.num_kv_heads * spec.head_dim
    return [spec.num_heads * spec.head_dim, shared, shared]

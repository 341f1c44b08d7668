"""The attention layers that are measured: each converted shape with the GQA layer that it stands for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one attention layer, converted and as it was.

    Attributes:
        name: the model that has such layers.
        hidden: model width D.
        heads: query heads H.
        kv_heads: KV heads G of the source layer, 0 where there is no such layer.
        head_dim: head dim K of the source layer.
        rank: latent rank C.
        rope_dim: RoPE dim R that the heads share.
        nope_dim: dims N of each head's query without RoPE.
        value_dim: dims V of each head's value.
    """

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int

    @property
    def latent_numbers(self) -> int:
        """Numbers cached for a token by the converted layer."""
        return self.rank + self.rope_dim

    @property
    def source_numbers(self) -> int:
        """Numbers cached for a token by the source layer, 0 where there is none."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def label(self) -> str:
        """Model and sizes, as tables name the shape."""
        return f"{self.name} H={self.heads} C={self.rank} R={self.rope_dim}"


DEEPSEEK_V3 = LayerShape("DeepSeek-V3", 7168, 128, 0, 128, 512, 64, 128, 128)
LLAMA_8B = LayerShape("Llama-3-8B", 4096, 32, 8, 128, 512, 64, 128, 128)
LLAMA_8B_256 = LayerShape("Llama-3-8B", 4096, 32, 8, 128, 256, 64, 128, 128)
SMOLLM2 = LayerShape("SmolLM2-135M", 576, 9, 3, 64, 160, 32, 64, 64)
SMOLLM2_96 = LayerShape("SmolLM2-135M", 576, 9, 3, 64, 96, 32, 64, 64)
TINY = LayerShape("tiny", 64, 4, 2, 16, 32, 16, 16, 16)

GPU_SHAPES = (DEEPSEEK_V3, LLAMA_8B, LLAMA_8B_256, SMOLLM2)
CPU_SHAPES = (LLAMA_8B, SMOLLM2, SMOLLM2_96)

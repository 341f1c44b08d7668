"""Families whose feed-forward blocks are mixtures of experts, stored one by one and stacked by transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from mla_convert.errors import UnsupportedArchitectureError
from mla_convert.sources.adapter import DenseAdapter
from mla_convert.sources.roles import Role, copied
from mla_convert.spec import SourceSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class ExpertAdapter(DenseAdapter):
    """Llama's names outside the mixtures; a family's ``block`` says which layers have them.

    Attributes:
        mixture: what a layer calls its mixture.
        projections: what an expert calls its gate, up and down projections.
    """

    mixture: ClassVar[str] = "mlp"
    projections: ClassVar[tuple[str, str, str]] = ("gate_proj", "up_proj", "down_proj")
    known_fields = frozenset({"num_experts", "num_local_experts"})

    def check(self, config: PretrainedConfig) -> None:
        super().check(config)
        if not 0 < config.num_experts_per_tok <= config.num_experts:
            raise UnsupportedArchitectureError(
                f"{config.num_experts_per_tok} of {config.num_experts} experts cannot answer a token",
                "check num_experts_per_tok and the number of experts in config.json",
            )

    def mlp_tensors(self, spec: SourceSpec, layer: int) -> Iterator[tuple[str, Role, tuple[int, ...]]]:
        block, width = spec.block, spec.hidden_size
        if not block.has_experts(layer):
            yield from super().mlp_tensors(spec, layer)
            return
        stored, target = f"model.layers.{layer}.{self.mixture}.", f"model.layers.{layer}.mlp."
        yield f"{stored}gate.weight", copied(f"{target}gate.weight", layer), (block.num_experts, width)
        for expert in range(block.num_experts):
            for name, own, shape in self._projections(width, block.moe_intermediate_size):
                path = f"experts.{expert}."
                yield f"{stored}{path}{name}.weight", copied(f"{target}{path}{own}.weight", layer), shape
        if block.shared_expert_intermediate_size:
            for _, own, shape in self._projections(width, block.shared_expert_intermediate_size):
                path = f"shared_expert.{own}.weight"  # the families that have one name it as the native class does
                yield stored + path, copied(target + path, layer), shape
            path = "shared_expert_gate.weight"
            yield stored + path, copied(target + path, layer), (1, width)

    def module_tensors(self, spec: SourceSpec, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, _, _ in self.expected(spec):
            if ".experts." not in name:
                yield name.replace(f".{self.mixture}.", ".mlp."), read(name)
        gate, up, down = self.projections
        experts = range(spec.block.num_experts)
        for layer in filter(spec.block.has_experts, range(spec.num_layers)):
            stored, module = f"model.layers.{layer}.{self.mixture}.experts.", f"model.layers.{layer}.mlp.experts."
            for own, names in (("gate_up_proj", (gate, up)), ("down_proj", (down,))):
                paths = [[f"{stored}{expert}.{name}.weight" for name in names] for expert in experts]
                yield module + own, _stacked(paths, read)

    def _projections(self, width: int, inner: int) -> tuple[tuple[str, str, tuple[int, int]], ...]:
        """Of an expert: the stored name of a projection, the native class's, and its shape."""
        gate, up, down = self.projections
        return (
            (gate, "gate_proj", (inner, width)),
            (up, "up_proj", (inner, width)),
            (down, "down_proj", (width, inner)),
        )


def sparse_layers(config: PretrainedConfig) -> tuple[bool, ...] | None:
    """Which layers of a Qwen mixture have experts: every ``decoder_sparse_step``-th but ``mlp_only_layers``."""
    layers = range(config.num_hidden_layers)
    sparse = tuple(
        layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0 for layer in layers
    )
    return None if all(sparse) else sparse


def _stacked(experts: Sequence[Sequence[str]], read: Callable[[str], Tensor]) -> Tensor:
    """The tensors of each expert below each other, [E ...]; those of one expert are held beside the result."""
    first = torch.cat([read(name) for name in experts[0]])
    stacked = first.new_empty(len(experts), *first.shape)
    stacked[0] = first
    for index, names in enumerate(experts[1:], 1):
        stacked[index] = torch.cat([read(name) for name in names])
    return stacked

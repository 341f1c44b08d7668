"""What all output formats share: what they take over from the source as it is, and what they ask of the layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mla_convert.errors import FormatError
from mla_convert.sources import Part
from mla_convert.spec import SourceSpec


class Carrier(Protocol):
    """What writers ask of what they write from: a source, or a model that was converted already."""

    @property
    def spec(self) -> SourceSpec:
        """What is known about it, whatever its family."""
        ...

    @property
    def config(self) -> Any:
        """transformers' config of it."""
        ...

    def copied(self, layer: int | None) -> Iterator[tuple[str, Part]]:
        """Pairs (stored name, part and name as written) of what is not converted: of a layer, for None outside."""
        ...

    def tensor(self, name: str) -> Tensor:
        """One stored tensor, read now."""
        ...

    def save_companions(self, folder: Path) -> None:
        """Write tokenizer, chat template, generation config and licence files into ``folder``."""
        ...


def common_config(source: Carrier) -> dict[str, Any]:
    """Return the config fields that any target takes over from the source as they are."""
    spec = source.spec
    fields: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "hidden_act": spec.hidden_act,
    }
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range"):
        value = getattr(source.config, name, None)
        if value is not None or name != "initializer_range":
            fields[name] = value
    return fields


def copied_tensors(
    source: Carrier, layer: int | None, dtype: torch.dtype, factors: Mapping[str, float] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that are not converted, each read when its turn comes, in `dtype`.

    Args:
        factors: the name of a module (``down_proj``) -> what its weight is multiplied by, before it is rounded.

    Raises:
        FormatError: float16 cannot hold one of them.
    """
    for source_name, part in source.copied(layer):
        target_name, tensor = part.target, part.take(source.tensor(source_name))
        factor = (factors or {}).get(target_name.split(".")[-2], 1.0)
        if factor != 1.0:
            tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32)) * factor
        yield target_name, stored(target_name, tensor, dtype)


def stored(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in the dtype that it is written in.

    Raises:
        FormatError: float16 cannot hold one of its numbers, which would become infinite.
    """
    rounded = tensor.to(dtype)
    if dtype == torch.float16 and bool(rounded.isinf().any()) and bool(tensor.isfinite().all()):
        raise FormatError(f"float16 cannot hold a weight of {name}", "--dtype bfloat16 or float32")
    return rounded


def common_names(written: Mapping[int, frozenset[str]], num_layers: int) -> frozenset[str]:
    """Return the tensor names that every layer was written with.

    Raises:
        ValueError: a layer is missing, or only some layers have a bias, for which configs have one switch.
    """
    if sorted(written) != list(range(num_layers)):
        raise ValueError(f"layers {sorted(written)} were written, expected 0 to {num_layers - 1}")
    names = set(written.values())
    if len(names) > 1:
        raise ValueError("only some layers have a bias; the class has one switch for all layers")
    return names.pop()

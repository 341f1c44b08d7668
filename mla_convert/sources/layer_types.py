"""Windows of families whose config gives every layer a type."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mla_convert.errors import UnsupportedArchitectureError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def windows_by_layer_type(config: PretrainedConfig) -> tuple[int | None, ...]:
    """Per layer, ``sliding_window`` in tokens where its type is ``sliding_attention``, and None otherwise.

    Raises:
        UnsupportedArchitectureError: a layer has another type than ``full_attention`` or ``sliding_attention``.
    """
    unknown = set(config.layer_types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedArchitectureError(
            f"config.json has layer_types {sorted(unknown)}",
            "use a checkpoint whose layers are full_attention or sliding_attention",
        )
    return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types)

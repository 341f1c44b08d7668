"""What a source's description says, as fields of :class:`~mla_convert.mla.MLAConfig`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mla_convert.errors import FormatError
from mla_convert.spec import RopeSpec, SourceSpec


def block_fields(spec: SourceSpec) -> dict[str, Any]:
    """Return the fields of what is around the attention: they are BlockSpec's, under its names."""
    fields = asdict(spec.block)
    fields["expert_layers"] = None if spec.block.expert_layers is None else list(spec.block.expert_layers)
    return fields | {"rms_norm_eps": spec.rms_norm_eps, "hidden_act": spec.hidden_act, "mlp_bias": spec.mlp_bias}


def attention_fields(spec: SourceSpec) -> dict[str, Any]:
    """Return the fields of how scores become weights: scale, softcap, ALiBi, and norms of queries and keys."""
    fields: dict[str, Any] = {
        "attention_scale": spec.attention_scale,
        "attention_softcap": spec.attention_softcap,
        "alibi_slopes": None if spec.alibi_slopes is None else list(spec.alibi_slopes),
        "alibi_rounded": spec.alibi_rounded,
    }
    if spec.qk_norm is not None:
        fields |= {
            "qk_norm": spec.qk_norm.scope,
            "qk_norm_eps": spec.qk_norm.eps,
            "qk_norm_dim": spec.head_dim,
            "qk_norm_key_heads": spec.num_kv_heads,
        }
    return fields


def rope_fields(ropes: Sequence[RopeSpec], pairs: Sequence[Sequence[int] | None]) -> dict[str, Any]:
    """Return the fields of how RoPE scales and changes, by layer: ``pairs`` of a source head that the slots turn as.

    Raises:
        FormatError: layers' rotary embeddings differ in what the native class holds once for all.
        ValueError: frequencies change, and the pairs are not known.
    """
    if len({(rope.attention_scaling, rope.update) for rope in ropes}) > 1:
        raise FormatError(
            "layers' rotary embeddings differ in their scaling of attention or in how they change with length, and the "
            "native class holds one for all layers",
            "use a source whose layers differ in frequencies only",
        )
    fields: dict[str, Any] = {"rope_attention_scaling": ropes[0].attention_scaling}
    update = ropes[0].update
    if update is None:
        return fields
    known = [list(row) for row in pairs if row is not None]
    if len(known) != len(pairs):
        raise ValueError("RoPE changes with length, and which pairs the slots turn as is not known")
    rest = [0.0] * (len(ropes[0].inv_freq) - len(update.inv_freq)) if update.inv_freq else []
    return fields | {
        "rope_update": asdict(update) | {"inv_freq": [*update.inv_freq, *rest], "dim": ropes[0].dim},
        "rope_pairs": known,
    }


def window_fields(spec: SourceSpec) -> dict[str, Any]:
    """Return ``layer_types`` and ``sliding_window``; None twice when every layer attends fully.

    Raises:
        FormatError: windows of different lengths, which the config cannot hold.
    """
    windows = sorted({window for window in spec.windows if window is not None})
    if len(windows) > 1:
        raise FormatError(
            f"the native class holds one sliding window for all layers, the source has {windows}",
            "a source whose sliding layers share one window",
        )
    if not windows:
        return {"layer_types": None, "sliding_window": None}
    kinds = ["full_attention" if window is None else "sliding_attention" for window in spec.windows]
    return {"layer_types": kinds, "sliding_window": windows[0]}

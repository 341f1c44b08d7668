"""Paper symbols <-> the tensor names of transformers' DeepSeek classes: the one table, both ways."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mla_convert.mla.weights import MLAWeights
from mla_convert.spec import MLAShape

# name below `self_attn.` -> the symbols it stacks, in order
TABLE: Mapping[str, tuple[str, ...]] = {
    "q_proj.weight": ("w_uq", "w_qr"),
    "q_proj.bias": ("b_uq", "b_qr"),
    "kv_a_proj_with_mqa.weight": ("w_dkv", "w_kr"),
    "kv_a_proj_with_mqa.bias": ("b_dkv", "b_kr"),
    "kv_b_proj.weight": ("w_uk", "w_uv"),
    "o_proj.weight": ("w_o",),
    "o_proj.bias": ("b_o",),
}

# The same where queries and keys are normalised: q_b_proj is block-diagonal, one block [N+R, K] a head.
NORMED_TABLE: Mapping[str, tuple[str, ...]] = {
    "q_a_proj.weight": ("w_qa",),
    "q_a_proj.bias": ("b_qa",),
    "q_b_proj.weight": ("w_uq", "w_qr"),
    "k_norm_proj.weight": ("w_kn",),
    "k_norm_proj.bias": ("b_kn",),
    **{name: symbols for name, symbols in TABLE.items() if not name.startswith("q_proj")},
}


def to_hf(weights: MLAWeights) -> dict[str, Tensor]:
    """Return the layer's tensors under DeepSeek's names (below ``self_attn.``); absent biases are left out.

    Per-head stacks are flattened head by head: q_proj [H·(N+R), D], kv_b_proj [H·(N+V), C], o_proj [D, H·V];
    kv_a_proj_with_mqa [C+R, D]. With norms of queries and keys: q_a_proj [H·K, D], q_b_proj [H·(N+R), K] and
    k_norm_proj [G·K, D].
    """
    tensors: dict[str, Tensor] = {}
    for name, symbols in (TABLE if weights.w_qa is None else NORMED_TABLE).items():
        parts = [getattr(weights, symbol) for symbol in symbols]
        if any(part is None for part in parts):
            continue
        match name.split(".")[0]:
            case "q_proj" | "q_b_proj" | "kv_b_proj":
                stacked = torch.cat(parts, dim=1).flatten(0, 1)  # per head: [no-RoPE | RoPE] or [key | value] rows
            case "kv_a_proj_with_mqa":
                stacked = torch.cat(parts, dim=0)
            case "q_a_proj" | "k_norm_proj":
                stacked = parts[0].flatten(0, 1)
            case _:
                stacked = parts[0].flatten(1) if parts[0].ndim == 3 else parts[0]
        tensors[name] = stacked
    return tensors


def from_hf(
    tensors: Mapping[str, Tensor],
    shape: MLAShape,
    num_heads: int,
    inv_freq: tuple[float, ...],
    *,
    query_norms: int = 0,
    pairs: tuple[int, ...] | None = None,
) -> MLAWeights:
    """The inverse of :func:`to_hf`. `shape` says where the stacks are cut.

    Args:
        query_norms: how many norms the queries of a token have; 0 where queries and keys are not normalised.

    Raises:
        KeyError: a weight is missing.
    """
    rows = {
        "q_proj": [shape.nope_dim, shape.rope_dim],
        "q_b_proj": [shape.nope_dim, shape.rope_dim],
        "kv_a_proj_with_mqa": [shape.kv_rank, shape.rope_dim],
        "kv_b_proj": [shape.nope_dim, shape.value_dim],
    }
    norms = {"q_a_proj": query_norms, "k_norm_proj": shape.key_scales}
    found: dict[str, Tensor] = {}
    for name, symbols in (NORMED_TABLE if query_norms else TABLE).items():
        module, kind = name.split(".")
        if kind == "bias" and name not in tensors:
            continue
        tensor = tensors[name]
        if module == "o_proj":
            parts = [tensor if kind == "bias" else tensor.unflatten(1, (num_heads, -1))]
        elif module in norms:
            parts = [tensor.unflatten(0, (norms[module], -1))]
        elif module == "kv_a_proj_with_mqa":
            parts = list(tensor.split(rows[module], dim=0))
        else:
            parts = list(tensor.unflatten(0, (num_heads, -1)).split(rows[module], dim=1))
        found.update(zip(symbols, parts, strict=True))
    return MLAWeights(inv_freq=inv_freq, pairs=pairs, **found)

"""Decode-ready matrices beside a converted model's weights: written once, attached when it is loaded for decoding.

absorbed.safetensors holds per layer i ``layers.i.w_uk`` [H N C] and either ``layers.i.w_uv_t`` [H C V] or, where W_UV
and W_O are merged, ``layers.i.w_comb`` [H C D]; its metadata the decision, the shapes (one for each layer where layers
differ) and a digest of the weights that it was made from.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mla_convert.errors import FormatError, OutputError, SourceError, VerificationError
from mla_convert.maths.absorb import AbsorbedMatrices, Merge, absorb_layer, merging_is_smaller, project_latents
from mla_convert.progress import Progress, silent
from mla_convert.sources.checkpoint import check_finite

ABSORBED_FILE = "absorbed.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_SINGLE_FILE = "model.safetensors"
_AGAIN = "run mla-convert absorb again"


@dataclass(frozen=True)
class AbsorbedSummary:
    """What was written.

    Attributes:
        file: the file.
        merged: whether W_UV and W_O are merged.
        layers: how many layers it holds.
        nbytes: bytes of all its matrices.
        digest: SHA-256 of the kv_b_proj and o_proj weights that it was made from.
        error: the largest difference between what a layer's matrices, read back, and its weights make of random queries
            and latents, as a share of the largest number that the weights make.
    """

    file: Path
    merged: bool
    layers: int
    nbytes: int
    digest: str
    error: float


def save_absorbed(folder: Path, merge: Merge = "auto", progress: Progress | None = None) -> AbsorbedSummary:
    """Write ``absorbed.safetensors`` into a converted native folder, whole or not at all, and say what it holds.

    The weights are read layer by layer: beside the matrices to be written, one layer is in memory at a time. What was
    written is read back and compared with the weights before it takes its name.

    Raises:
        VerificationError: a layer's matrices, read back, do not make of latents what its weights make.
        FormatError: the folder does not hold a model of the native format.
        SourceError: a weight file is missing or damaged.
        OutputError: the file cannot be written.
    """
    report = progress or silent
    config = _native_config(folder)
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    nope_dim, value_dim = config["qk_nope_head_dim"], config["v_head_dim"]
    ranks = config.get("kv_lora_ranks") or [config["kv_lora_rank"]] * layers
    # Decided once, so that all layers are kept alike: what both forms take is linear in the rank.
    smaller = merging_is_smaller(heads, round(sum(ranks) / layers), value_dim, config["hidden_size"])
    wanted: Merge = ("always" if smaller else "never") if merge == "auto" else merge
    digest = hashlib.sha256()
    tensors: dict[str, Tensor] = {}
    shapes: list[dict[str, list[int]]] = []
    for layer in range(layers):
        kv_b, o_proj = _up_and_output(folder, layer)
        _update(digest, kv_b, o_proj)
        w_uk, w_uv = kv_b.view(heads, nope_dim + value_dim, ranks[layer]).split([nope_dim, value_dim], dim=1)
        matrices = absorb_layer(w_uk, w_uv, o_proj.view(-1, heads, value_dim), merge=wanted)
        shapes.append({name: list(tensor.shape) for name, tensor in _named(matrices)})
        tensors |= {f"layers.{layer}.{name}": tensor for name, tensor in _named(matrices)}
        report("absorption", layer + 1, layers)
    merged = wanted == "always"
    metadata = {
        "format": "pt",
        "merge": merge,
        "merged": json.dumps(merged),
        "layers": str(layers),
        "shapes": json.dumps(shapes[0] if all(shape == shapes[0] for shape in shapes) else shapes),
        "source_digest": digest.hexdigest(),
    }
    file = folder / ABSORBED_FILE
    sizes = (heads, nope_dim, value_dim)
    error = _write_whole(tensors, metadata, file, lambda written: _largest_error(written, folder, layers, sizes))
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    return AbsorbedSummary(file, merged, layers, nbytes, digest.hexdigest(), error)


def attach_absorbed(model: Any, folder: Path) -> bool:
    """Attach the folder's absorbed matrices to the native ``model`` loaded from it; return whether there were any.

    They take the dtype and device of each layer's kv_b_proj, and decoding uses them from then on.

    Raises:
        FormatError: the model is not of the native format.
        VerificationError: the file is damaged or was made from other weights than the folder's.
    """
    file = folder / ABSORBED_FILE
    if not file.is_file():
        return False
    attentions = _attentions(model)
    try:
        with safe_open(file, framework="pt") as absorbed:
            metadata = absorbed.metadata() or {}
            if metadata.get("source_digest") != _folder_digest(folder, len(attentions)):
                raise VerificationError(f"{file} was made from other weights than {folder} holds", _AGAIN)
            ready = [_read_layer(absorbed.get_tensor, set(absorbed.keys()), i) for i in range(len(attentions))]
    except (SafetensorError, OSError) as error:
        raise VerificationError(f"{file} is damaged: {error}", _AGAIN) from error
    for attention, matrices in zip(attentions, ready, strict=True):
        weight = attention.kv_b_proj.weight
        attention.absorbed = AbsorbedMatrices(
            **{name: tensor.to(weight.device, weight.dtype) for name, tensor in _named(matrices)}
        )
    return True


def _named(matrices: AbsorbedMatrices) -> list[tuple[str, Tensor]]:
    named = [("w_uk", matrices.w_uk), ("w_uv_t", matrices.w_uv_t), ("w_comb", matrices.w_comb)]
    return [(name, tensor) for name, tensor in named if tensor is not None]


def _read_layer(get_tensor: Callable[[str], Tensor], names: set[str], layer: int) -> AbsorbedMatrices:
    wanted = [name for name in ("w_uk", "w_uv_t", "w_comb") if f"layers.{layer}.{name}" in names]
    try:
        return AbsorbedMatrices(**{name: get_tensor(f"layers.{layer}.{name}") for name in wanted})
    except (TypeError, ValueError) as error:
        raise VerificationError(f"{ABSORBED_FILE} lacks matrices of layer {layer}", _AGAIN) from error


def _attentions(model: Any) -> list[Any]:
    attentions = [layer.self_attn for layer in model.model.layers]
    if not all(hasattr(attention, "absorbed") for attention in attentions):
        raise FormatError(
            f"{type(model).__name__} does not decode with absorbed matrices", "convert with --format native"
        )
    return attentions


def _native_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise SourceError(
            f"{folder} has no readable config.json: {error}", "name a folder that convert wrote"
        ) from error
    if config.get("model_type") != "mla_convert":
        raise FormatError(
            f"{folder} holds a {config.get('model_type')!r} model, which does not decode with absorbed matrices",
            "convert with --format native",
        )
    return config


def _up_and_output(folder: Path, layer: int) -> tuple[Tensor, Tensor]:
    """Return the layer's kv_b_proj [H·(N+V), C] and o_proj [D, H·V], read now."""
    prefix = f"model.layers.{layer}.self_attn"
    return _weight(folder, f"{prefix}.kv_b_proj.weight"), _weight(folder, f"{prefix}.o_proj.weight")


def _weight(folder: Path, name: str) -> Tensor:
    try:
        index = folder / _INDEX_FILE
        file = _SINGLE_FILE
        if index.is_file():
            file = json.loads(index.read_text(encoding="utf-8"))["weight_map"][name]
        with safe_open(folder / file, framework="pt") as shard:
            weight = shard.get_tensor(name)
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise SourceError(f"cannot read {name} of {folder}: {error}", "convert the model again") from error
    check_finite(name, weight, folder)
    return weight


def _folder_digest(folder: Path, layers: int) -> str:
    digest = hashlib.sha256()
    for layer in range(layers):
        _update(digest, *_up_and_output(folder, layer))
    return digest.hexdigest()


def _update(digest: Any, *weights: Tensor) -> None:
    for weight in weights:
        digest.update(f"{weight.dtype}{tuple(weight.shape)}".encode())
        digest.update(weight.contiguous().view(torch.uint8).numpy())


def _largest_error(written: Path, folder: Path, layers: int, sizes: tuple[int, int, int]) -> float:
    """Return the largest relative error of all layers.

    Raises:
        VerificationError: one is beyond what rounding to the matrices' dtype explains.
    """
    worst = 0.0
    with safe_open(written, framework="pt") as stored:
        names = set(stored.keys())
        for layer in range(layers):
            matrices = _read_layer(stored.get_tensor, names, layer)
            error = absorption_error(matrices, *_up_and_output(folder, layer), *sizes)
            allowed = 8 * torch.finfo(matrices.w_uk.dtype).eps
            if not error <= allowed:
                raise VerificationError(
                    f"the absorbed matrices of layer {layer} are off by {error:.2g}, allowed {allowed:.2g}", _AGAIN
                )
            worst = max(worst, error)
    return worst


def absorption_error(
    matrices: AbsorbedMatrices,
    kv_b: Float[Tensor, "J C"],
    o_proj: Float[Tensor, "D I"],
    heads: int,
    nope_dim: int,
    value_dim: int,
) -> float:
    """Return how far the absorbed form is from the expanded one on random queries and latents, in float64.

    Scores and outputs are compared, each as a share of the largest that the expanded form gives.
    """
    generator = torch.Generator().manual_seed(0)
    kv_b, o_proj = kv_b.double(), o_proj.double()
    absorbed = AbsorbedMatrices(**{name: tensor.double() for name, tensor in _named(matrices)})
    query = torch.randn(8, heads, nope_dim, generator=generator, dtype=torch.float64)
    latent = torch.randn(8, kv_b.shape[1], generator=generator, dtype=torch.float64)
    keys, values = (latent @ kv_b.mT).unflatten(-1, (heads, -1)).split([nope_dim, value_dim], dim=-1)
    shared = latent[:, None].expand(-1, heads, -1)
    w_o = o_proj.unflatten(1, (heads, value_dim))
    pairs = (
        ((query[:, :, None] @ absorbed.w_uk).squeeze(2).mul(shared).sum(-1), (query * keys).sum(-1)),
        (project_latents(shared[None], absorbed, w_o)[0], values.flatten(1) @ o_proj.mT),
    )
    return max(float((mine - theirs).abs().max() / theirs.abs().max().clamp_min(1e-300)) for mine, theirs in pairs)


def _write_whole(
    tensors: dict[str, Tensor], metadata: dict[str, str], file: Path, check: Callable[[Path], float]
) -> float:
    """Write the file, have it checked, and only then give it its name; return what the check found."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        save_file(tensors, temporary, metadata=metadata)
        found = check(temporary)
        temporary.replace(file)
        return found
    except (OSError, SafetensorError) as error:
        raise OutputError(
            f"cannot write {file}: {error}", "free disk space or check the folder's permissions"
        ) from error
    finally:
        with suppress(OSError):  # a disk that cannot be written says so once
            temporary.unlink(missing_ok=True)

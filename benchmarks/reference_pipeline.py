"""A plain implementation of TransMLA's pipeline (arXiv:2502.07864), to measure `mla-convert convert` against.

python -m benchmarks.reference_pipeline SOURCE OUT [--cache 0.5] [--rope-dim R] [--fold 2] [--tokens N] [--text FILE]

Written from the method's description, as it is published to run: the model in memory, one pass over the calibration
text for the rotations and one, of the rotated model, for the low rank, and of each pass every layer's queries, keys and
values in float32. What is kept of the first pass is freed before the second. It reads sources and text and writes
folders by the same functions as the conversion does, skips the vocabulary in both passes, and verifies nothing.

The steps are real ones: adjacent pairs are folded to one frequency (their geometric mean); a PCA over the heads and
pairs of a fold, one rotation for real and imaginary parts, puts what turns into few components; those keep RoPE, the
rest and the values share a latent by a PCA in which keys and values weigh alike.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mla_convert.calibrate.text import BUILTIN_TEXT, mixed_windows, read_text
from mla_convert.errors import UsageError
from mla_convert.export.native import write_native
from mla_convert.mla import MLAForCausalLM, MLAWeights
from mla_convert.refit import ConvertedAttention
from mla_convert.sources import open_source
from mla_convert.sources.attention import AttentionWeights
from mla_convert.spec import MLAShape, RopeSpec, SourceSpec

BATCH = 4  # contexts at a time


@dataclass(frozen=True)
class Sizes:
    """C, R and how many adjacent pairs share a frequency."""

    kv_rank: int
    rope_dim: int
    fold: int


def sizes_for(spec: SourceSpec, cache: float, rope_dim: int | None, fold: int) -> Sizes:
    """Return the sizes at a share of the source's cache; R is a head's dims unless given.

    Raises:
        UsageError: the sizes do not go together, or the attention has what this pipeline knows nothing of.
    """
    plain = spec.rope.dim == spec.head_dim and spec.rope.attention_scaling == 1 and spec.rope.update is None
    biased = spec.query_bias or spec.key_bias or spec.value_bias or spec.output_bias
    scored = spec.qk_norm is not None or spec.attention_softcap is not None or spec.alibi_slopes is not None
    if not plain or biased or scored or spec.layer_ropes is not None:
        raise UsageError(
            f"the reference pipeline is for plain attention, which that of {spec.architecture} is not",
            "take a Llama without biases",
        )
    rope_dim = spec.head_dim if rope_dim is None else rope_dim
    kv_rank = round(cache * spec.kv_width) - rope_dim
    folds, left = divmod(spec.head_dim // 2, fold)
    if left or (rope_dim // 2) % folds or not 0 < rope_dim <= spec.max_rope_dim:
        raise UsageError(
            f"{rope_dim} RoPE dims do not divide among folds of {fold} of {spec.head_dim // 2} pairs",
            f"give a multiple of {2 * folds} up to {spec.max_rope_dim}, or another --fold",
        )
    if not 0 < kv_rank <= spec.kv_width - rope_dim:
        raise UsageError(f"a cache of {cache} leaves a rank of {kv_rank}", "give another --cache or --rope-dim")
    return Sizes(kv_rank, rope_dim, fold)


@torch.no_grad()
def activations(
    model: MLAForCausalLM, contexts: Int[Tensor, "n S"], watched: Sequence[Sequence[nn.Module]]
) -> list[list[Float[Tensor, "n J"]]]:
    """Return what the watched modules of each layer put out for all tokens, in float32."""
    kept: list[list[Tensor]] = []
    handles = []
    place = slice(0, 0)
    for modules in watched:
        rows = [torch.empty(contexts.numel(), int(module.out_features)) for module in modules]  # pyright: ignore[reportArgumentType]
        kept.append(rows)
        for module, into in zip(modules, rows, strict=True):

            def keep(_module: nn.Module, _given: Any, put_out: Tensor, into: Tensor = into) -> None:
                into[place] = put_out.flatten(0, 1)

            handles.append(module.register_forward_hook(keep))
    try:
        for batch in contexts.split(BATCH):
            place = slice(place.stop, place.stop + batch.numel())
            model.model(input_ids=batch, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return kept


def rotations(keys: Float[Tensor, "n J"], groups: int, fold: int) -> Float[Tensor, "folds Gf Gf"]:
    """Return the principal axes of each fold's keys over heads and folded pairs, in columns, the largest first.

    Real and imaginary parts are samples of one real PCA: a rotation of both commutes with RoPE.
    """
    parts = keys.unflatten(1, (groups, 2, -1, fold)).permute(3, 0, 2, 1, 4).flatten(3).flatten(1, 2)
    return torch.linalg.eigh((parts.mT @ parts).double()).eigenvectors.flip(-1)


def rotated(weights: AttentionWeights, axes: Float[Tensor, "folds Gf Gf"], rope: RopeSpec, sizes: Sizes) -> MLAWeights:
    """Return the layer with rotated key heads: R dims keep RoPE, all the rest is content, none of it truncated yet.

    Queries are rotated by the same orthogonal matrix, so that without folding only the rotation of the rest is lost.
    """
    (heads, dim, _), groups = weights.w_q.shape, weights.w_k.shape[0]
    folds, slots = axes.shape[0], sizes.rope_dim // 2 // axes.shape[0]
    queries, keys = (w.double().unflatten(1, (2, folds, sizes.fold)) for w in (weights.w_q, weights.w_k))
    by_head = axes.unflatten(1, (groups, sizes.fold))
    mixed = torch.einsum("fgac,gpfad->pfcd", by_head, keys)  # part fold component width
    own = by_head.repeat_interleave(heads // groups, dim=1)  # each query head's rows of the rotation
    w_qr = torch.einsum("fhac,hpfad->hpfcd", own[..., :slots], queries).flatten(1, 3)
    rest = torch.einsum("fhac,pq,fe->hpfaqec", own[..., slots:], torch.eye(2).double(), torch.eye(folds).double())
    w_uk = rest.flatten(4).flatten(1, 3)  # H K content
    value_rows = weights.w_v.double().flatten(0, 1)
    values = torch.eye(len(value_rows), dtype=torch.float64).unflatten(0, (groups, -1))
    values = values.repeat_interleave(heads // groups, dim=0)
    frequencies = torch.tensor(rope.inv_freq, dtype=torch.float64).log().view(folds, sizes.fold).mean(1).exp()
    content = mixed[:, :, slots:].flatten(0, 2)
    return MLAWeights(
        w_dkv=torch.cat((content, value_rows)),
        w_kr=mixed[:, :, :slots].flatten(0, 2),
        w_uk=torch.cat((w_uk, w_uk.new_zeros(heads, dim, len(value_rows))), dim=-1),
        w_uv=torch.cat((values.new_zeros(heads, values.shape[1], len(content)), values), dim=-1),
        w_uq=weights.w_q.double(),
        w_qr=w_qr,
        w_o=weights.w_o.double(),
        inv_freq=tuple(frequencies.repeat_interleave(slots).tolist()),
    )


def balanced_factors(
    content: Float[Tensor, "n J"], num_keys: int, rank: int
) -> tuple[Float[Tensor, "C J"], Float[Tensor, "J C"]]:
    """Return (down, up) of the PCA of content keys and values, keys scaled so that both have the same energy."""
    moment = (content.mT @ content).double()
    energy = moment.diagonal()
    scale = torch.ones_like(energy)
    if num_keys and energy[:num_keys].sum() > 0:
        scale[:num_keys] = (energy[num_keys:].sum() / energy[:num_keys].sum()).sqrt()
    axes = torch.linalg.eigh(scale[:, None] * moment * scale).eigenvectors.flip(-1)[:, :rank]
    return axes.mT * scale, axes / scale[:, None]


def truncated(weights: MLAWeights, content: Float[Tensor, "n J"], num_keys: int, rank: int) -> MLAWeights:
    """Return a rotated layer with its content in rank C."""
    down, up = balanced_factors(content, num_keys, rank)
    fields = {name: getattr(weights, name) for name in ("w_kr", "w_uq", "w_qr", "w_o", "inv_freq")}
    return MLAWeights(w_dkv=down @ weights.w_dkv, w_uk=weights.w_uk @ up, w_uv=weights.w_uv @ up, **fields)


def convert(
    ref: str, out: Path, *, text: str, tokens: int, context: int, cache: float, rope_dim: int | None, fold: int
) -> dict[str, Any]:
    """Convert the source into ``out`` and return sizes, seconds by stage and what the activations took.

    Raises:
        MLAConvertError: the source, the text or the sizes do not go together.
    """
    stages: dict[str, float] = {}
    started = time.perf_counter()

    def stage(name: str) -> None:
        nonlocal started
        stages[name] = time.perf_counter() - started
        started = time.perf_counter()

    source = open_source(ref)
    spec = source.spec
    sizes = sizes_for(spec, cache, rope_dim, fold)
    contexts = mixed_windows(source.load_tokenizer(), [read_text(text)], context=context, max_tokens=tokens, seed=0)
    model = source.load_decoder(dtype=torch.float32)
    decoder_layers: Any = model.model.layers
    stage("load")
    attentions = [layer.self_attn for layer in decoder_layers]
    seen = activations(model, contexts, [(a.q_proj, a.k_proj, a.v_proj) for a in attentions])
    held = sum(rows.nbytes for layer in seen for rows in layer)
    stage("first pass")
    axes = [rotations(keys, spec.num_kv_heads, fold) for _, keys, _ in seen]
    del seen, attentions
    layers = [rotated(source.attention(i), axes[i], spec.rope, sizes) for i in range(spec.num_layers)]
    for i, weights in enumerate(layers):
        decoder_layers[i].self_attn = ConvertedAttention(weights, spec)
    stage("rotate")
    attentions = [layer.self_attn.attention for layer in decoder_layers]
    seen = activations(model, contexts, [(a.q_proj, a.kv_a_proj_with_mqa) for a in attentions])
    held = max(held, sum(rows.nbytes for layer in seen for rows in layer))
    del model, decoder_layers, attentions
    stage("second pass")
    num_keys = spec.num_kv_heads * spec.head_dim - sizes.rope_dim
    for i, (_, rows) in enumerate(seen):
        layers[i] = truncated(layers[i], rows[:, : rows.shape[1] - sizes.rope_dim], num_keys, sizes.kv_rank)
    del seen
    stage("low rank")
    out.mkdir(parents=True)
    shape = MLAShape(sizes.kv_rank, sizes.rope_dim, spec.head_dim, spec.head_dim)
    write_native(source, enumerate(layers), shape, out, dtype=getattr(torch, spec.dtype))
    stage("write")
    return {
        "kv_rank": sizes.kv_rank,
        "rope_dim": sizes.rope_dim,
        "fold": fold,
        "tokens": contexts.numel(),
        "timings": stages,
        "activation_bytes": held,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", default=BUILTIN_TEXT)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--cache", type=float, default=0.5)
    parser.add_argument("--rope-dim", type=int)
    parser.add_argument("--fold", type=int, default=2)
    arguments = vars(parser.parse_args())
    print(json.dumps(convert(arguments.pop("source"), arguments.pop("out"), **arguments)))


if __name__ == "__main__":
    main()

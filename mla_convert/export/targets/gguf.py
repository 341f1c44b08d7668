"""A GGUF file of llama.cpp's ``deepseek2`` architecture, which caches the latent: llama.cpp and all that runs it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mla_convert.errors import FormatError, SourceError
from mla_convert.export.converted import ConvertedModel
from mla_convert.export.gguf_file import TYPES, write_gguf
from mla_convert.export.gguf_layer import attention_tensors, layer_shapes
from mla_convert.export.gguf_tokenizer import GGUFTokenizer, gguf_tokenizer
from mla_convert.export.obstacles import engine_obstacles, model_obstacles
from mla_convert.export.padding import pad_latent, place_slots
from mla_convert.export.progression import Progression, fit_progression
from mla_convert.export.targets.target import ExportOptions, ExportPlan
from mla_convert.progress import Progress
from mla_convert.sources.companions import FolderCompanions
from mla_convert.spec import MLAShape

FILE_NAME = "model.gguf"

ARCHITECTURE = "deepseek2"

_CACHE_NUMBER = 2  # bytes: llama.cpp caches float16 unless it is told otherwise

_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_INSIDE = {
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


class GGUFTarget:
    """Dense ``deepseek2``: no biases, SiLU, RoPE at powers of one base, the same C and R in every layer."""

    name = "gguf"
    summary = "one GGUF file for llama.cpp and what is built on it"

    def plan(self, model: ConvertedModel, options: ExportOptions) -> ExportPlan:
        """Return what :meth:`write` would do; the reasons of a refusal are all there are."""
        reasons = [*_reasons(model)]
        stored = options.dtype or model.spec.dtype
        if stored not in TYPES:
            reasons.append(f"A GGUF file does not hold {stored} weights here: --dtype is one of {', '.join(TYPES)}.")
        if options.form not in (None, "gguf"):
            reasons.append(f"The gguf target has no form {options.form!r}.")
        rank = max(shape.kv_rank for shape in model.shapes)
        if options.kv_rank is not None and options.kv_rank < rank:
            reasons.append(f"The largest latent has {rank} numbers, more than --kv-rank {options.kv_rank}.")
        rope_dim, notes = 0, _notes(model)
        try:
            rope_dim = fit_progression(model.frequencies, options.rope_dim).dim
            notes += _tokenizer(model).notes
        except (FormatError, SourceError) as error:
            reasons.append(f"{error.message[0].upper()}{error.message[1:]}.")
        rank = max(rank, options.kv_rank or 0)
        if reasons:
            return ExportPlan(self.name, None, exact=False, dtype=stored, reasons=tuple(reasons), engine="llamacpp")
        return ExportPlan(
            self.name,
            "gguf",
            exact=_context(model) == model.config.max_position_embeddings,
            dtype=stored,
            kv_rank=rank,
            rope_dim=rope_dim,
            cache_bytes=model.spec.num_layers * (rank + rope_dim) * _CACHE_NUMBER,
            notes=notes + _padding_note(model, rank + rope_dim),
            engine="llamacpp",
        )

    def write(
        self, model: ConvertedModel, plan: ExportPlan, options: ExportOptions, folder: Path, progress: Progress
    ) -> None:
        """Write ``model.gguf``, and the tokenizer, generation config and licence files beside it.

        Raises:
            FormatError: the model cannot be held exactly, or the ``gguf`` package is missing.
            OutputError: the file cannot be written.
        """
        rope = fit_progression(model.frequencies, plan.rope_dim)
        tokenizer = _tokenizer(model)
        widest = model.shapes[0]
        shape = MLAShape(plan.kv_rank, plan.rope_dim, widest.nope_dim, widest.value_dim)
        write_gguf(
            folder / FILE_NAME,
            ARCHITECTURE,
            _fields(model, shape, rope),
            tokenizer,
            _shapes(model, shape),
            _tensors(model, shape, rope, progress),
            TYPES[plan.dtype],
        )
        model.save_companions(folder)


GGUF = GGUFTarget()


def _reasons(model: ConvertedModel) -> Iterator[str]:
    """Why llama.cpp's class cannot express the model, a sentence each."""
    yield from model_obstacles(model.config)
    yield from engine_obstacles(model.spec)


def _notes(model: ConvertedModel) -> tuple[str, ...]:
    context = _context(model)
    if context == model.config.max_position_embeddings:
        return ()
    note = (
        f"llama.cpp's {ARCHITECTURE} has no sliding window: the file states the window, {context}, as its context "
        f"instead of {model.config.max_position_embeddings}; beyond it the two differ."
    )
    return (note,)


def _padding_note(model: ConvertedModel, cached: int) -> tuple[str, ...]:
    mean = sum(shape.cached for shape in model.shapes) / len(model.shapes)
    if mean == cached:
        return ()
    note = (
        f"llama.cpp's {ARCHITECTURE} has one C, one R and one set of frequencies for all layers: each caches {cached} "
        f"numbers a token, where this model's layers need {mean:.4g} on average."
    )
    return (note,)


def _context(model: ConvertedModel) -> int:
    windows = [window for window in model.spec.windows if window is not None]
    return min([model.config.max_position_embeddings, *windows])


def _tokenizer(model: ConvertedModel) -> GGUFTokenizer:
    return gguf_tokenizer(FolderCompanions(model.folder).load_tokenizer(), model.config.vocab_size)


def _fields(model: ConvertedModel, shape: MLAShape, rope: Progression) -> Mapping[str, Any]:
    """The metadata below ``deepseek2.``.

    One KV head whose keys have C + R numbers and whose values are the first C of them is how llama.cpp caches a latent;
    the lengths of expanded heads come as ``_mla``. No layer has experts, but llama.cpp wants their sizes.
    """
    c = model.config
    return {
        "vocab_size": c.vocab_size,
        "context_length": _context(model),
        "embedding_length": c.hidden_size,
        "block_count": c.num_hidden_layers,
        "feed_forward_length": c.intermediate_size,
        "leading_dense_block_count": c.num_hidden_layers,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": 1,
        "attention.layer_norm_rms_epsilon": float(c.rms_norm_eps),
        "attention.q_lora_rank": 0,
        "attention.kv_lora_rank": shape.kv_rank,
        "attention.key_length": shape.cached,
        "attention.value_length": shape.kv_rank,
        "attention.key_length_mla": shape.nope_dim + shape.rope_dim,
        "attention.value_length_mla": shape.value_dim,
        "rope.dimension_count": shape.rope_dim,
        "rope.freq_base": rope.base,
        "expert_count": 0,
        "expert_used_count": 0,
        "expert_shared_count": 0,
        "expert_feed_forward_length": c.intermediate_size,
        "expert_weights_scale": 1.0,
    }


def _shapes(model: ConvertedModel, shape: MLAShape) -> dict[str, tuple[int, ...]]:
    """Every tensor's name and shape, in the order of the file."""
    c = model.config
    table = (c.vocab_size, c.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": table, "output_norm.weight": (c.hidden_size,)}
    if not c.tie_word_embeddings:
        shapes["output.weight"] = table
    layer = layer_shapes(shape, c.num_attention_heads, c.hidden_size, c.intermediate_size)
    for i in range(c.num_hidden_layers):
        shapes |= {f"blk.{i}.{name}": size for name, size in layer.items()}
    return shapes


def _tensors(
    model: ConvertedModel, shape: MLAShape, rope: Progression, progress: Progress
) -> Iterator[tuple[str, Tensor]]:
    """The tensors in the order of :func:`_shapes`, each read when its turn comes."""
    spec = model.spec
    # llama.cpp's softmax scale is (N + R)^-1/2
    factor = spec.attention_scale * math.sqrt(shape.nope_dim + shape.rope_dim)
    for source, name in _OUTSIDE.items():
        if name != "output.weight" or not spec.tie_word_embeddings:
            yield name, model.tensor(source)
    for i in range(spec.num_layers):
        prefix = f"model.layers.{i}."
        weights = place_slots(pad_latent(model.layer(i), shape.kv_rank), rope.frequencies)
        attention = attention_tensors(
            weights,
            model.tensor(f"{prefix}input_layernorm.weight"),
            eps=spec.rms_norm_eps,
            nope_factor=factor,
            rope_factor=factor * model.config.rope_attention_scaling**2,
        )
        yield from ((f"blk.{i}.{name}", tensor) for name, tensor in attention.items())
        del weights, attention  # or they would live on while the next tensors are read
        yield from ((f"blk.{i}.{name}", model.tensor(prefix + source)) for source, name in _INSIDE.items())
        progress("write", i + 1, spec.num_layers)

"""The stock ``DeepseekV3ForCausalLM`` as engines compute it, written from a converted model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch

from mla_convert.export.converted import ConvertedModel
from mla_convert.export.custom import unwindowed_positions
from mla_convert.export.deepseek import eps_note, write_deepseek
from mla_convert.export.deepseek_layer import LATENT_EPS
from mla_convert.export.obstacles import engine_obstacles, model_obstacles
from mla_convert.export.padding import pad_latent, place_slots
from mla_convert.export.progression import Progression, fit_progression
from mla_convert.export.targets.target import ExportOptions, ExportPlan
from mla_convert.mla import MLAWeights
from mla_convert.progress import Progress
from mla_convert.spec import MLAShape

# transformers' class calls the layer of this number DeepSeek's multi-token prediction, and does not load it elsewhere.
_PREDICTION_LAYER = 61


def stock_reasons(model: ConvertedModel, dtype: str) -> Iterator[str]:
    """Why engines' own DeepSeek classes cannot hold the model, apart from its RoPE, a sentence each."""
    yield from model_obstacles(model.config)
    yield from engine_obstacles(model.spec)
    if dtype == "float16":
        yield "float16 cannot hold the latent's rows, which the stock form scales by 2^-20: --dtype bfloat16."


def stock_notes(model: ConvertedModel, dtype: str) -> Iterator[str]:
    """What the stock form changes of the model, a sentence each."""
    if model.spec.rms_norm_eps != LATENT_EPS:
        yield eps_note(model.spec, getattr(torch, dtype))
    if model.spec.num_layers > _PREDICTION_LAYER:
        yield (
            f"transformers' DeepSeek class skips unknown weights of layer {_PREDICTION_LAYER}; an engine that runs it "
            "through a transformers backend may leave that layer out."
        )


def window_note(model: ConvertedModel) -> Iterator[str]:
    """What becomes of sliding windows in engines whose latent attention has none, a sentence where there are any."""
    positions = unwindowed_positions(model)
    if positions < model.spec.max_position_embeddings:
        yield (
            "The engine's latent attention has no sliding window: the context is the model's window, "
            f"{positions} tokens instead of {model.spec.max_position_embeddings}."
        )


def write_stock(
    model: ConvertedModel,
    plan: ExportPlan,
    options: ExportOptions,
    folder: Path,
    progress: Progress,
    *,
    rope_type: Literal["default", "yarn"],
) -> None:
    """Write the folder by :func:`~mla_convert.export.deepseek.write_deepseek`, layers padded and slots in place.

    Args:
        rope_type: how the config says the frequencies: plainly, or as YaRN with a factor of one, the same in effect.

    Raises:
        FormatError: the class cannot hold the model.
        OutputError: the folder cannot be written.
    """
    rope = fit_progression(model.frequencies, plan.rope_dim)
    widest = model.shapes[0]
    write_deepseek(
        model,
        _layers(model, plan.kv_rank, rope),
        MLAShape(plan.kv_rank, plan.rope_dim, widest.nope_dim, widest.value_dim),
        folder,
        dtype=getattr(torch, plan.dtype),
        max_shard_size=options.max_shard_size,
        rope_parameters=_rope_parameters(rope, rope_type, unwindowed_positions(model)),
        progress=progress,
    )


def _layers(model: ConvertedModel, kv_rank: int, rope: Progression) -> Iterator[tuple[int, MLAWeights]]:
    for i in range(model.spec.num_layers):
        yield i, place_slots(pad_latent(model.layer(i), kv_rank), rope.frequencies)


def _rope_parameters(rope: Progression, rope_type: str, positions: int) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_type": rope_type, "rope_theta": rope.base}
    if rope_type == "yarn":
        parameters |= {"factor": 1.0, "original_max_position_embeddings": positions}
    return parameters

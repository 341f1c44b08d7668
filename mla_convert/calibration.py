"""The calibration that a request asks for: its text, and its statistics, from memory or a layer at a time."""

from __future__ import annotations

import logging
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import LongTensor, nn

from mla_convert.calibrate.collect import collect
from mla_convert.calibrate.layerwise import collect_layerwise
from mla_convert.calibrate.statistics import Provenance, Statistics, load_statistics, save_statistics
from mla_convert.calibrate.text import BUILTIN_TEXT, joint_digest, mixed_windows, read_text, uniform_windows
from mla_convert.devices import computing_devices
from mla_convert.errors import StatisticsError
from mla_convert.memory import fills_memory
from mla_convert.mla import MLAForCausalLM
from mla_convert.progress import Progress
from mla_convert.recipe import Recipe
from mla_convert.record import CalibrationRecord
from mla_convert.request import ConvertRequest, given_statistics
from mla_convert.scratch import NOISE_SHARE
from mla_convert.sources import Source
from mla_convert.sources.streamed import StreamedDecoder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Places:
    """Where a conversion keeps what is done, beside its output, until that is written.

    Attributes:
        statistics: a file of all layers' statistics.
        layers: a folder of what is done a layer at a time.
    """

    statistics: Path
    layers: Path

    @classmethod
    def beside(cls, out: Path) -> Places:
        """The places of an output folder."""
        return cls(out.parent / f".{out.name}.calibration.safetensors", out.parent / f".{out.name}.layers")

    def clear(self) -> None:
        """Remove all of it."""
        self.statistics.unlink(missing_ok=True)
        shutil.rmtree(self.layers, ignore_errors=True)


def low_memory(request: ConvertRequest, source: Source) -> bool:
    """Whether to work on one layer at a time: as asked for, or where the model in float32 would fill the memory."""
    if request.low_memory is not None:
        return request.low_memory
    return fills_memory(source.num_weights())


def statistics_for(
    request: ConvertRequest,
    source: Source,
    recipe: Recipe,
    places: Places,
    progress: Progress,
    decoder: MLAForCausalLM | None = None,
) -> Statistics | None:
    """Return the calibration statistics: given, left by an interrupted run, or collected now; None if none are needed.

    Args:
        decoder: the source's, in float32, where it is in memory already; it may be moved to another device.

    Raises:
        MLAConvertError: a text, the source or given statistics will not do, or the disk is full.
    """
    if recipe.calibration is None:
        return None
    digests = source.digests()
    if request.statistics is not None:
        return given_statistics(request.statistics, source, recipe)
    tokens = request.calibration_tokens or recipe.calibration.tokens
    contexts, text = calibration_contexts(request, source, recipe, tokens)
    noise = None
    if recipe.factorise.noise > 0:
        vocabulary = min(source.spec.vocab_size, len(source.load_tokenizer()))  # embeddings may be padded
        count, context = math.ceil(NOISE_SHARE * len(contexts)), contexts.shape[1]
        noise = uniform_windows(vocabulary, count=count, context=context, seed=request.seed)
    provenance = Provenance(
        source_digests=digests,
        text_ref=text.ref,
        text_digest=text.digest,
        tokens=text.tokens,
        context=contexts.shape[1],
        seed=request.seed,
        gradients=recipe.needs_gradients,
        noise_tokens=0 if noise is None else noise.numel(),
        held_out=recipe.needs_held_out,
    )
    devices = computing_devices(request.devices)
    if low_memory(request, source):
        decoders = [StreamedDecoder(source, device) for device in devices]
        layers = collect_layerwise(
            decoders, source.spec, contexts, provenance, places.layers, noise=noise, progress=progress
        )
        statistics: Statistics | None = Statistics(layers, provenance)
    else:
        statistics = _left_over(places.statistics, provenance)
    if statistics is None:
        first = decoder or source.load_decoder(dtype=torch.float32)
        cast("nn.Module", first).to(devices[0])
        others = [source.load_decoder(dtype=torch.float32, device=device) for device in devices[1:]]
        layers = collect(
            [first, *others],
            source.spec,
            contexts,
            gradients=recipe.needs_gradients,
            seed=request.seed,
            held_out=recipe.needs_held_out,
            noise=noise,
            progress=progress,
        )
        statistics = Statistics(layers, provenance)
        save_statistics(statistics, places.statistics)
    if request.save_statistics is not None:
        save_statistics(statistics, request.save_statistics)
    return statistics


def calibration_contexts(
    request: ConvertRequest, source: Source, recipe: Recipe, tokens: int
) -> tuple[LongTensor, CalibrationRecord]:
    """Return so many tokens of the calibration texts, in contexts, and what is recorded of them."""
    assert recipe.calibration is not None  # a recipe that needs text has it
    texts = [read_text(ref) for ref in request.calibration or (BUILTIN_TEXT,)]
    context = min(recipe.calibration.context, source.spec.max_position_embeddings)
    contexts = mixed_windows(
        source.load_tokenizer(),
        texts,
        context=min(context, max(1, tokens // len(texts))),
        max_tokens=tokens,
        seed=request.seed,
    )
    ref = " + ".join(text.ref for text in texts)
    return contexts, CalibrationRecord(ref, joint_digest(texts), contexts.numel())


def _left_over(kept: Path, provenance: Provenance) -> Statistics | None:
    """The statistics of an interrupted run, if they are what this run would collect."""
    if not kept.exists():
        return None
    try:
        statistics = load_statistics(kept)
    except StatisticsError as error:
        logger.info("calibrating again: %s", error)
        return None
    if statistics.provenance != provenance:
        return None
    logger.info("using the calibration of an interrupted run, %s", kept)
    return statistics

"""The conversion from first to last: the stages in order, each from one frozen artefact to the next."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import LongTensor

from mla_convert import __version__
from mla_convert.allocate import allocate
from mla_convert.calibrate.statistics import Statistics
from mla_convert.calibration import Places, calibration_contexts, low_memory, statistics_for
from mla_convert.card import CARD_NAME, model_card
from mla_convert.convert_layers import convert_layers
from mla_convert.devices import computing_devices
from mla_convert.errors import FormatError, OutputError, UsageError
from mla_convert.export.deepseek import check_deepseek, longrope_parameters, write_deepseek
from mla_convert.export.folder import check_output, staged_folder
from mla_convert.export.layerwise import verify_layerwise
from mla_convert.export.native import write_native
from mla_convert.export.obstacles import source_obstacles
from mla_convert.export.reading import checked_decoder
from mla_convert.export.reference import reference_logits
from mla_convert.export.reload import verify_folder
from mla_convert.export.shards import parse_size
from mla_convert.layer_store import LayerStore
from mla_convert.memory import keep_freed_memory, release_freed_memory
from mla_convert.mla import MLAWeights
from mla_convert.plan import ConversionPlan, make_plan
from mla_convert.progress import Progress, silent
from mla_convert.recipe import load_recipe
from mla_convert.record import (
    RECORD_NAME,
    CalibrationRecord,
    ConversionFacts,
    SourceRecord,
    build_record,
)
from mla_convert.report import LayerDetails, ReportDetails, write_report
from mla_convert.request import ConvertRequest, check_request
from mla_convert.sources import Source, open_source
from mla_convert.space import check_space
from mla_convert.spec import DTYPE_BYTES, RopeSpec
from mla_convert.transform import ConvertedLayer, slot_costs

# Where the weights take at most this many bytes, the reading of the source is compared with transformers' before a
# conversion, and the written folder is loaded again and compared with the source's decoder around the converted
# attention after it. `verify_folder` explains the tolerance's unit.
VERIFY_BYTES = 6 * 2**30
VERIFY_TOLERANCE = {"float64": 1e-3, "float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}
_VERIFY_TEXT = "Multi-head latent attention keeps one small vector for each token, from which every head reads."


def plan(request: ConvertRequest) -> ConversionPlan:
    """Return the sizes that the request leads to. Reads the source's description, no weights.

    Raises:
        MLAConvertError: the source, recipe, sizes or format do not go together.
    """
    return _prepare(request)[1]


def check_tokenizer(request: ConvertRequest) -> None:
    """Check that the source's tokenizer can be loaded, which a conversion needs.

    Raises:
        SourceError: it cannot.
    """
    open_source(request.source, revision=request.revision, token=request.token).load_tokenizer()


def convert(request: ConvertRequest, progress: Progress | None = None) -> dict[str, Any]:
    """Convert and write ``request.out``; return what its conversion.json says.

    What is done lies beside the output folder until that is written, and a run that was interrupted goes on from there:
    the calibration, if source, text and seed are the same, and every converted layer, if all that it depends on is. A
    model that would fill the memory is worked on a layer at a time, with every layer's calibration kept.

    Raises:
        MLAConvertError: anything the project expects to go wrong; nothing is left at ``request.out`` then.
    """
    progress = progress or silent
    check_output(request.out, overwrite=request.overwrite)
    source, planned, notes = _prepare(request)
    check_request(request, planned)
    check_space(request, planned, source)
    dtype_name = request.dtype or source.spec.dtype
    dtype = getattr(torch, dtype_name)
    timings: dict[str, float] = {}
    contexts, refit_text = None, None
    if planned.recipe.refit is not None and planned.recipe.refits:  # read now, as it may be too short
        tokens = min(planned.recipe.refit.tokens, request.calibration_tokens or planned.recipe.refit.tokens)
        contexts, refit_text = calibration_contexts(request, source, planned.recipe, tokens)

    whole = source.file_bytes() <= VERIFY_BYTES and not low_memory(request, source)
    keep_freed_memory()
    reading = None
    if whole:
        started = time.perf_counter()
        reading = checked_decoder(source, _verification_ids(source))
        timings["read"] = time.perf_counter() - started
    started = time.perf_counter()
    places = Places.beside(request.out)
    statistics = statistics_for(request, source, planned.recipe, places, progress, reading and reading.decoder)
    difference = reading and reading.difference
    del reading  # and the decoder
    release_freed_memory()
    timings["calibrate"] = time.perf_counter() - started
    counts, rope_parameters = _stock_slots(source, planned, statistics)
    if planned.provisional and statistics is not None:
        started = time.perf_counter()
        layer_sizes = allocate(planned, statistics.layers, source.attention, progress)
        planned = replace(planned, layers=layer_sizes, provisional=False)
        timings["allocate"] = time.perf_counter() - started

    started = time.perf_counter()
    store = LayerStore(places.layers, _key(source, planned, statistics, counts, refit_text))
    device = computing_devices(request.devices)[0]
    convert_layers(source, planned, statistics and statistics.layers, counts, store, contexts, progress, device)
    release_freed_memory()
    timings["convert"] = time.perf_counter() - started
    errors: list[dict[str, float]] = []
    dampings: list[float] = []
    details: list[LayerDetails] = []

    def layers() -> Iterator[tuple[int, MLAWeights]]:
        for i in range(source.spec.num_layers):
            layer = _kept(store, i)
            errors.append(dict(layer.errors))
            dampings.append(layer.damping)
            details.append(_details(layer, source.spec.rope_of(i)))
            weights = layer.weights
            del layer  # or it would live on while the next one is read
            yield i, weights
            del weights
            release_freed_memory()

    with staged_folder(request.out, request.overwrite) as folder:
        started = time.perf_counter()
        common: dict[str, Any] = {
            "dtype": dtype,
            "max_shard_size": request.max_shard_size,
            "progress": progress,
        }
        if planned.format == "native":
            write_native(source, layers(), planned.layers, folder, **common)
        else:
            write_deepseek(source, layers(), planned.layers[0], folder, rope_parameters=rope_parameters, **common)
        release_freed_memory()
        timings["write"] = time.perf_counter() - started
        started = time.perf_counter()
        verification = None
        if whole:
            again = {i: _kept(store, i).weights for i in range(source.spec.num_layers)}
            verification = _verify(source, again, folder, dtype_name)
        elif planned.format == "native":
            check = verify_layerwise(
                source,
                lambda i: _kept(store, i).weights,
                folder,
                _verification_ids(source),
                dtype=dtype,
                tolerance=VERIFY_TOLERANCE[dtype_name],
            )
            verification = asdict(check)
        release_freed_memory()
        timings["verify"] = time.perf_counter() - started
        used = statistics.provenance if statistics else None
        facts = ConversionFacts(
            source=SourceRecord(request.source, source.digests(), request.revision, source.licence()),
            spec=source.spec,
            format=planned.format,
            dtype=dtype_name,
            layers=planned.layers,
            recipe=planned.recipe.to_dict(),
            seeds=({"calibration": used.seed} if used else {}) | ({"refit": request.seed} if refit_text else {}),
            calibration=CalibrationRecord(used.text_ref, used.text_digest, used.tokens) if used else None,
            refit=refit_text,
            layer_errors=errors,
            dampings=dampings,
            timings=timings,
            reading_difference=difference,
            verification=verification,
            notes=notes,
        )
        record = build_record(facts)
        (folder / RECORD_NAME).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        (folder / CARD_NAME).write_text(model_card(record), encoding="utf-8")
        write_report(folder, ReportDetails.of(details, source.spec))
    places.clear()
    return record


def _key(
    source: Source,
    planned: ConversionPlan,
    statistics: Statistics | None,
    counts: list[int] | None,
    refit_text: CalibrationRecord | None,
) -> str:
    """What converted layers depend on, as text: those of an interrupted run serve only if it is the same."""
    facts = {
        "version": __version__,
        "source": source.digests(),
        "recipe": planned.recipe.to_dict(),
        "layers": [asdict(shape) for shape in planned.layers],
        "statistics": None if statistics is None else asdict(statistics.provenance),
        "counts": counts,
        "refit": None if refit_text is None else asdict(refit_text),
    }
    return json.dumps(facts, sort_keys=True)


def _kept(store: LayerStore, index: int) -> ConvertedLayer:
    layer = store.load(index)
    if layer is None:
        raise OutputError(
            f"a converted layer in {store.folder} is gone or damaged", "run the command again: it makes that layer anew"
        )
    return layer


def _details(layer: ConvertedLayer, rope: RopeSpec) -> LayerDetails:
    """What the report shows of a layer and no file says."""
    weights = layer.weights
    return LayerDetails.of(layer.spectrum.tolist(), weights.shape.kv_rank, weights.pairs, num_pairs=rope.dim // 2)


def _prepare(request: ConvertRequest) -> tuple[Source, ConversionPlan, tuple[str, ...]]:
    """Check everything that can be checked before any long work."""
    recipe = load_recipe(request.recipe, request.overrides)
    parse_size(request.max_shard_size)
    if request.dtype is not None and request.dtype not in DTYPE_BYTES:
        raise UsageError(f"there is no dtype {request.dtype!r}", f"one of {', '.join(DTYPE_BYTES)}")
    source = open_source(request.source, revision=request.revision, token=request.token)
    if request.format == "deepseek" and (obstacles := [*source_obstacles(source.spec)]):
        said = f"the stock DeepSeek class cannot hold this model. {' '.join(obstacles)}"
        raise FormatError(said, "--format native")
    planned = make_plan(
        source.spec,
        recipe=recipe,
        cache=request.cache,
        kv_rank=request.kv_rank,
        rope_dim=request.rope_dim,
        format=request.format,
        stock_rope=request.stock_rope,
    )
    notes: tuple[str, ...] = ()
    if planned.format == "deepseek":
        dtype = getattr(torch, request.dtype or source.spec.dtype)
        parameters = _rope_parameters(source, planned, 1)
        if planned.stock_rope == "longrope":
            parameters = longrope_parameters([1.0], 10000.0, source.spec.max_position_embeddings)
        notes = check_deepseek(source.spec, rope_parameters=parameters, dtype=dtype)
    if recipe.allocates and not planned.provisional:
        why = "the sizes were given" if planned.format == "native" else "a deepseek folder has one size for all layers"
        notes = (*notes, f"The recipe's allocation of sizes was not used: {why}.")
    return source, planned, notes


def _stock_slots(
    source: Source, planned: ConversionPlan, statistics: Statistics | None
) -> tuple[list[int] | None, dict[str, Any]]:
    """How many slots each pair holds in every layer of a stock folder, and the folder's ``rope_parameters``.

    Layers share one set of frequencies there: the one whose slots avoid the most cost, summed over layers.
    """
    if planned.format == "native":
        return None, {}
    rope = source.spec.rope
    slots = planned.layers[0].rope_dim // 2
    if planned.stock_rope == "default" and len(planned.rope_strides) == 1:
        best = planned.rope_strides[0]
    else:
        layers = statistics.layers if statistics else (None,) * source.spec.num_layers
        costs = sum(slot_costs(source.attention(i), layers[i], rope, planned.recipe) for i in range(len(layers)))
        assert isinstance(costs, torch.Tensor)  # there is at least one layer
        if planned.stock_rope == "longrope":
            chosen = costs.flatten().topk(slots).indices // costs.shape[1]
            counts = torch.bincount(chosen, minlength=len(rope.inv_freq)).tolist()
            frequencies = [f for f, count in zip(rope.inv_freq, counts, strict=True) for _ in range(count)]
            theta = float(rope.parameters.get("rope_theta", 10000.0))
            return counts, longrope_parameters(frequencies, theta, source.spec.max_position_embeddings)
        best = max(planned.rope_strides, key=lambda stride: float(costs[: slots * stride : stride, 0].sum()))
    counts = [int(pair % best == 0 and pair // best < slots) for pair in range(len(rope.inv_freq))]
    return counts, _rope_parameters(source, planned, best)


def _rope_parameters(source: Source, planned: ConversionPlan, stride: int) -> dict[str, Any]:
    """``rope_parameters`` under which a stock class turns R/2 slots at the frequencies of the pairs 0, s, 2s, ..."""
    rope, dim = source.spec.rope, planned.layers[0].rope_dim
    if dim == rope.dim:
        return {name: value for name, value in rope.parameters.items() if name != "partial_rotary_factor"}
    # theta'^(-2j/R) = inv_freq[s·j]: the plan lets only pairs in such a progression hold slots
    theta = rope.inv_freq[stride] ** (-dim / 2)
    return {"rope_type": "default", "rope_theta": theta}


def _verification_ids(source: Source) -> LongTensor:
    """The tokens of the text that models are compared on, [1 S]."""
    ids = source.load_tokenizer()(_VERIFY_TEXT, add_special_tokens=False)["input_ids"]
    return cast("LongTensor", torch.tensor([ids[: source.spec.max_position_embeddings]]))


def _verify(source: Source, layers: dict[int, MLAWeights], folder: Path, dtype_name: str) -> dict[str, Any]:
    """Load the folder again and compare it with the source's decoder around the converted attention."""
    dtype = getattr(torch, dtype_name)
    ids = _verification_ids(source)
    shortest = min((window for window in source.spec.windows if window is not None), default=ids.shape[1])
    ids = ids[:, :shortest]
    reference = reference_logits(source, layers, ids, dtype)
    release_freed_memory()
    check = verify_folder(folder, ids, reference, tolerance=VERIFY_TOLERANCE[dtype_name])
    return asdict(check)

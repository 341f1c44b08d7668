"""Records of conversions that were never made, of any size, with everything that a report can show."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from mla_convert.record import CalibrationRecord, ConversionFacts, SourceRecord, build_record
from mla_convert.report import LayerDetails, ReportDetails
from mla_convert.spec import MLAShape, RopeSpec, SourceSpec

LOG_RATIO = 0.1178


def spec(layers: int, groups: int, head_dim: int) -> SourceSpec:
    """A Llama of the given sizes."""
    return SourceSpec(
        architecture="LlamaForCausalLM",
        family="llama",
        num_layers=layers,
        hidden_size=groups * head_dim * 2,
        intermediate_size=96,
        vocab_size=64,
        num_heads=2 * groups,
        num_kv_heads=groups,
        head_dim=head_dim,
        rope=RopeSpec(dim=head_dim, inv_freq=tuple(10000.0 ** (-2 * i / head_dim) for i in range(head_dim // 2))),
        attention_scale=head_dim**-0.5,
        rms_norm_eps=1e-5,
        hidden_act="silu",
        max_position_embeddings=2048,
        query_bias=False,
        key_bias=False,
        value_bias=False,
        output_bias=False,
        mlp_bias=False,
        tie_word_embeddings=True,
        windows=(None,) * layers,
        dtype="bfloat16",
    )


def record(
    *, layers: int = 6, groups: int = 2, head_dim: int = 16, ref: str = "acme/tiny-llama", measured: bool = True
) -> dict[str, Any]:
    """A record as conversion.json holds it."""
    draw = random.Random(1)
    shape = MLAShape(
        kv_rank=groups * head_dim // 2, rope_dim=groups * head_dim // 4, nope_dim=head_dim, value_dim=head_dim
    )
    row = {
        "text": "corpus/wiki.txt",
        "text_sha256": "ef" * 32,
        "context": 512,
        "tokens": 30660,
        "dtype": "float32",
        "source_perplexity": 29.3,
        "perplexity": 32.96,
        "log_ratio": LOG_RATIO,
        "kl": 0.1543,
        "top1_agreement": 0.81,
    }
    news = row | {"text": "news.txt", "text_sha256": "01" * 32, "log_ratio": 0.1861, "perplexity": 37.3}
    facts = ConversionFacts(
        source=SourceRecord(ref, {"model.safetensors": "ab" * 32}),
        spec=spec(layers, groups, head_dim),
        format="native",
        dtype="bfloat16",
        layers=(shape,) * layers,
        recipe={"name": "fast", "decouple": {"damping": 0.25}},
        seeds={"calibration": 7},
        calibration=CalibrationRecord("builtin:pydoc", "cd" * 32, 16384),
        layer_errors=[
            {name: draw.uniform(0.01, 0.2) for name in ("keys", "values", "truncated", "moved", "held_out")}
            for _ in range(layers)
        ],
        dampings=[0.01] * layers,
        timings={"read": 1.5, "calibrate": 100.25, "write": 20.0},
        measurements=[row, news | {"source_perplexity": 31.0}] if measured else (),
        reading_difference=2.5e-6,
        verification={"max_logit_difference": 0.01, "top1_agreement": 1.0, "tokens": 20},
        notes=("The norm is not the source's.",),
    )
    return build_record(facts)


def healed(made: dict[str, Any]) -> dict[str, Any]:
    """The record with a healing of both stages."""
    layers = [
        {"layer": i, "first": 0.4, "last": 0.3, "held_out_before": 0.35, "held_out_after": 0.2, "kept": True}
        for i in range(len(made["plan"]["layers"]))
    ]
    course = {"tokens": 131072, "best_step": 200, "held_out_kl": {"0": 0.4, "100": 0.22, "200": 0.18}, "settings": {}}
    stage = {
        "stage": "all",
        "teacher": made["source"]["ref"],
        "timings": {"layers": 300.0, "global": 250.0},
        "layers": {"settings": {}, "results": layers},
        "global": course,
    }
    return {**made, "healing": [stage]}


def details(made: dict[str, Any]) -> ReportDetails:
    """Spectra that fall exponentially, and slots drawn at random."""
    draw = random.Random(2)
    source, pairs = made["source"], made["source"]["head_dim"] // 2
    size = 2 * source["num_kv_heads"] * source["head_dim"]
    layers = []
    for i, shape in enumerate(made["plan"]["layers"]):
        spectrum = [2.0 ** (-j / (4 + i)) for j in range(size)]
        chosen = [draw.randrange(pairs) for _ in range(shape["rope_dim"] // 2)]
        layers.append(LayerDetails.of(spectrum, shape["kv_rank"], chosen, num_pairs=pairs))
    return ReportDetails(tuple(layers), (tuple(10000.0 ** (-i / pairs) for i in range(pairs)),))


def write_folder(folder: Path, made: dict[str, Any]) -> Path:
    """A folder that holds the record, and the loss curve of its distillation if it was healed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "conversion.json").write_text(json.dumps(made), encoding="utf-8")
    if "healing" in made:
        points = [{"step": i, "loss": 0.5 - i / 1000, "tokens": i, "learning_rate": 1.0} for i in range(1, 201)]
        first = {"step": 0, "loss": None, "tokens": 0, "learning_rate": 0.0}
        (folder / "loss.jsonl").write_text("".join(json.dumps(point) + "\n" for point in (first, *points)))
    return folder

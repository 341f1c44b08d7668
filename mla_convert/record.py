"""What is written down about a conversion: ``conversion.json``, from which :mod:`mla_convert.card` makes the card."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from mla_convert import __version__
from mla_convert.card import CARD_NAME, model_card
from mla_convert.errors import OutputError
from mla_convert.features import cached_besides, features
from mla_convert.plan import is_full
from mla_convert.spec import DTYPE_BYTES, MLAShape, OutputFormat, SourceSpec

RECORD_NAME = "conversion.json"
# The loss curve of a distillation, a JSON object a line.
LOSS_NAME = "loss.jsonl"
SCHEMA_VERSION = 1

_LIBRARIES = ("torch", "transformers", "safetensors", "tokenizers", "gguf", "numpy")


@dataclass(frozen=True)
class SourceRecord:
    """Where the source came from.

    Attributes:
        ref: the reference the user gave.
        revision: the revision the user gave, if any.
        digests: file name -> sha256 of what was read.
        licence: ``license``, ``license_name`` and ``license_link``, as far as the source states them.
    """

    ref: str
    digests: Mapping[str, str]
    revision: str | None = None
    licence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """``builtin``, ``local`` (a path) or ``hub`` (a model ID)."""
        if self.ref.startswith("builtin:"):
            return "builtin"
        return "local" if Path(self.ref).exists() or self.ref.count("/") > 1 or self.ref.startswith(".") else "hub"


@dataclass(frozen=True)
class CalibrationRecord:
    """The text of the calibration or of refits: the reference the user gave, sha256 of it, and tokens used."""

    ref: str
    digest: str
    tokens: int


@dataclass(frozen=True)
class ConversionFacts:
    """All that :func:`build_record` writes down.

    Attributes:
        layers: per layer, the sizes of its MLA form.
        dtype: the dtype the weights are stored in.
        recipe: the whole recipe, defaults included, as plain values, with its ``name``.
        seeds: what was seeded -> seed.
        layer_errors: per layer, the name of an error -> its value.
        dampings: per layer, the damping of the output metric, as a share of its mean eigenvalue.
        timings: stage -> seconds.
        measurements: rows of measured quality; the keys that the card shows are ``text``, ``context``, ``tokens``,
            ``source_perplexity``, ``perplexity``, ``kl`` and ``top1_agreement``.
        reading_difference: the largest |Δ log p| between this project's reading of the source and transformers' own
            class, nats, in float32; None where it was not measured.
        verification: what loading the folder again gave.
        notes: what the output format's constraints cost, a sentence each.
    """

    source: SourceRecord
    spec: SourceSpec
    format: OutputFormat
    dtype: str
    layers: Sequence[MLAShape]
    recipe: Mapping[str, Any]
    seeds: Mapping[str, int] = field(default_factory=dict)
    calibration: CalibrationRecord | None = None
    refit: CalibrationRecord | None = None
    layer_errors: Sequence[Mapping[str, float]] = ()
    dampings: Sequence[float] = ()
    timings: Mapping[str, float] = field(default_factory=dict)
    measurements: Sequence[Mapping[str, Any]] = ()
    reading_difference: float | None = None
    verification: Mapping[str, Any] | None = None
    notes: Sequence[str] = ()


def build_record(facts: ConversionFacts) -> dict[str, Any]:
    """Return the contents of ``conversion.json``: plain JSON values, without a path the user did not give."""
    spec = facts.spec
    size = DTYPE_BYTES[facts.dtype]
    cached = sum(shape.cached for shape in facts.layers)
    source_cached = spec.kv_width * spec.num_layers
    record = {
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "mla-convert", "version": __version__},
        "libraries": library_versions(),
        "source": {
            "ref": facts.source.ref,
            "kind": facts.source.kind,
            "revision": facts.source.revision,
            "digests": facts.source.digests,
            "licence": facts.source.licence,
            "architecture": spec.architecture,
            "attention": spec.attention_kind,
            "num_layers": spec.num_layers,
            "num_heads": spec.num_heads,
            "num_kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "special": features(spec),
        },
        "format": facts.format,
        "dtype": facts.dtype,
        "recipe": facts.recipe,
        "seeds": facts.seeds,
        "calibration": facts.calibration,
        "refit": facts.refit,
        "plan": {
            "layers": facts.layers,
            "full_rank": all(is_full(spec, shape) for shape in facts.layers),
            "cached_besides": cached_besides(spec),
            "cache": {
                "source_numbers_per_token": source_cached,
                "numbers_per_token": cached,
                "source_bytes_per_token": source_cached * size,
                "bytes_per_token": cached * size,
                "ratio": cached / source_cached,
            },
        },
        "layer_errors": facts.layer_errors,
        "dampings": facts.dampings,
        "timings": facts.timings,
        "measurements": facts.measurements,
        "reading_difference": facts.reading_difference,
        "verification": facts.verification,
        "notes": facts.notes,
    }
    return json_safe(record)


def add_measurement(folder: Path, row: Mapping[str, Any]) -> None:
    """Append a row of measured quality to a converted folder's conversion.json, and write its model card anew.

    A row measured before on the same text, context and number of tokens is replaced. Each file appears whole.

    Raises:
        OutputError: the folder has no readable conversion.json, or cannot be written.
    """
    try:
        record = json.loads((folder / RECORD_NAME).read_text(encoding="utf-8"))
        same = ("text", "context", "tokens")
        others = [old for old in record["measurements"] if any(old.get(key) != row.get(key) for key in same)]
        record["measurements"] = [*others, json_safe(row)]
        contents = {RECORD_NAME: json.dumps(record, indent=2) + "\n", CARD_NAME: model_card(record)}
        for name, content in contents.items():
            temporary = folder / f".{name}.partial"
            temporary.write_text(content, encoding="utf-8")
            temporary.replace(folder / name)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OutputError(
            f"the measurement cannot be recorded in {folder}: {error}", "record it in a folder that convert wrote"
        ) from error


def library_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed libraries that the result depends on."""
    versions = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def json_safe(value: Any) -> Any:
    """Return `value` in JSON's own types: mappings and dataclasses as objects, sequences as arrays, numbers that JSON
    lacks (NaN, infinities) as null, one-element tensors and arrays as numbers.

    Raises:
        TypeError: a type that has no JSON form.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_dataclass(value):
        return json_safe({f.name: getattr(value, f.name) for f in fields(value)})
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value) if isinstance(value, set | frozenset) else value
        return [json_safe(item) for item in items]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return json_safe(value.tolist())
    raise TypeError(f"{type(value).__name__} has no JSON form: {value!r}")

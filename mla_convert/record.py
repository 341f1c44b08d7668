"""What is written down about a conversion: ``conversion.json``, and the model card made from it."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from mla_convert import __version__
from mla_convert.errors import OutputError
from mla_convert.spec import DTYPE_BYTES, MLAShape, OutputFormat, SourceSpec

RECORD_NAME = "conversion.json"
CARD_NAME = "README.md"
SCHEMA_VERSION = 1

_LIBRARIES = ("torch", "transformers", "safetensors", "tokenizers", "gguf", "numpy")

_MEASURED_COLUMNS = (
    ("text", "text"),
    ("context", "context"),
    ("tokens", "tokens"),
    ("source_perplexity", "perplexity of the source"),
    ("perplexity", "perplexity"),
    ("kl", "KL to the source, nats a token"),
    ("top1_agreement", "top-1 agreement"),
)


@dataclass(frozen=True)
class SourceRecord:
    """Where the source came from.

    Attributes:
        ref: the reference the user gave.
        revision: the revision the user gave, if any.
        digests: file name -> sha256 of what was read.
    """

    ref: str
    digests: Mapping[str, str]
    revision: str | None = None

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
            "architecture": spec.architecture,
            "attention": spec.attention_kind,
            "num_layers": spec.num_layers,
            "num_heads": spec.num_heads,
            "num_kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
        },
        "format": facts.format,
        "dtype": facts.dtype,
        "recipe": facts.recipe,
        "seeds": facts.seeds,
        "calibration": facts.calibration,
        "refit": facts.refit,
        "plan": {
            "layers": facts.layers,
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


def model_card(record: Mapping[str, Any]) -> str:
    """Return the README.md of a converted model: Hugging Face front matter, then what :func:`build_record` holds.

    Only measured figures are shown; where nothing was measured, the card says so.
    """
    source = record["source"]
    sections = [
        _front_matter(record),
        f"# {_title(source['ref'])}, converted to multi-head latent attention",
        _introduction(record),
        "## Loading\n\n" + _loading(record["format"]),
        "## Cache\n\n" + _cache_table(record),
        "## Quality\n\n" + _quality(record["measurements"]),
        "## Recipe\n\n" + _recipe(record),
        "## Limits\n\n" + _limits(record),
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(record: Mapping[str, Any]) -> str:
    entries: dict[str, Any] = {}
    if record["source"]["kind"] == "hub":
        entries["base_model"] = record["source"]["ref"]
    entries |= {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["mla-convert", "multi-head-latent-attention", "mla", "kv-cache"],
    }
    return "---\n" + yaml.safe_dump(entries, sort_keys=False, allow_unicode=True) + "---"


def _title(ref: str) -> str:
    return ref.removeprefix("builtin:").rstrip("/").split("/")[-1]


def _introduction(record: Mapping[str, Any]) -> str:
    source = record["source"]
    revision = f" (revision `{source['revision']}`)" if source["revision"] else ""
    return (
        f"`{source['ref']}`{revision}, a {source['attention']} model (`{source['architecture']}`), converted by "
        f"mla-convert {record['tool']['version']} to multi-head latent attention (MLA): each layer caches one latent "
        "and one shared RoPE key a token instead of keys and values of every KV head. `conversion.json` holds the "
        "recipe, seeds, versions, digests of the inputs and the errors of every layer."
    )


def _loading(output_format: str) -> str:
    if output_format == "native":
        arguments, remark = (
            "folder, trust_remote_code=True",
            "The model class lies beside the weights (`configuration_mla.py`, `attention_mla.py`, `modeling_mla.py`).",
        )
    else:
        arguments, remark = "folder", "The model class is transformers' own `DeepseekV3ForCausalLM`."
    return (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'folder = "path/to/this/folder"\n'
        f"model = AutoModelForCausalLM.from_pretrained({arguments})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({arguments})\n```\n\n" + remark
    )


def _cache_table(record: Mapping[str, Any]) -> str:
    cache = record["plan"]["cache"]
    layers = record["source"]["num_layers"]
    rows = [
        ("source", cache["source_numbers_per_token"], cache["source_bytes_per_token"], 1.0),
        ("this model", cache["numbers_per_token"], cache["bytes_per_token"], cache["ratio"]),
    ]
    lines = [
        f"| | numbers a token a layer | numbers a token | bytes a token ({record['dtype']}) | ratio |",
        "|---|---|---|---|---|",
        *(f"| {name} | {_figure(n / layers)} | {n:,} | {b:,} | {ratio:.3f} |" for name, n, b, ratio in rows),
    ]
    shapes = {(s["kv_rank"], s["rope_dim"], s["nope_dim"], s["value_dim"]) for s in record["plan"]["layers"]}
    if len(shapes) == 1:
        rank, rope, nope, value = next(iter(shapes))
        sizes = f"Latent rank C = {rank}, RoPE dim R = {rope}, no-RoPE dim N = {nope}, value dim V = {value}."
    else:
        sizes = "Layers differ in their sizes; `conversion.json` lists them."
    return "\n".join(lines) + f"\n\nThe sizes follow from the config. {sizes}"


def _quality(measurements: Sequence[Mapping[str, Any]]) -> str:
    if not measurements:
        return "Not measured. `mla-convert evaluate` measures perplexity, and agreement with the source."
    columns = [(key, title) for key, title in _MEASURED_COLUMNS if any(key in row for row in measurements)]
    lines = [
        "| " + " | ".join(title for _, title in columns) + " |",
        "|" + "---|" * len(columns),
        *("| " + " | ".join(_figure(row.get(key)) for key, _ in columns) + " |" for row in measurements),
    ]
    return "\n".join(lines)


def _figure(value: Any) -> str:
    """A table cell: floats to five significant digits, what was not measured by name."""
    if value is None:
        return "not measured"
    if isinstance(value, float):
        return f"{value:,.0f}" if value == int(value) else f"{value:.5g}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|")


def _recipe(record: Mapping[str, Any]) -> str:
    text = yaml.safe_dump(record["recipe"], sort_keys=False, allow_unicode=True)
    calibration = record["calibration"]
    used = (
        f"Calibration: {calibration['tokens']:,} tokens of `{calibration['ref']}` (sha256 {calibration['digest']})."
        if calibration
        else "No calibration text was used."
    )
    if refit := record.get("refit"):
        used += f" Refits: {refit['tokens']:,} tokens of `{refit['ref']}` (sha256 {refit['digest']})."
    seeds = ", ".join(f"{name} {seed}" for name, seed in record["seeds"].items())
    return f"```yaml\n{text}```\n\n{used}" + (f" Seeds: {seeds}." if seeds else "")


def _limits(record: Mapping[str, Any]) -> str:
    changes = (
        "The conversion changes the model's answers as far as the figures above say; what was not measured is not "
        "known. The limits and licence of the source model apply."
    )
    own = [changes]
    if record["format"] == "native":
        own.append(
            "Engines that know neither this class nor transformers' remote code cannot serve this folder; "
            "`--format deepseek` writes one for transformers' stock class."
        )
    return "\n".join(f"- {line}" for line in (*own, *record["notes"]))

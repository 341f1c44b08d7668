"""The model card of a converted model, made from what its ``conversion.json`` holds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import yaml

from mla_convert.features import BELOW, FULL_RANK
from mla_convert.text_ref import is_file_ref

CARD_NAME = "README.md"

_MEASURED_COLUMNS = (
    ("text", "text"),
    ("context", "context"),
    ("tokens", "tokens"),
    ("source_perplexity", "perplexity of the source"),
    ("perplexity", "perplexity"),
    ("kl", "KL to the source, nats a token"),
    ("top1_agreement", "top-1 agreement"),
)


def model_card(record: Mapping[str, Any]) -> str:
    """Return the README.md of a converted model: Hugging Face front matter, then what its record holds.

    Only measured figures are shown; where nothing was measured, the card says so.
    """
    source = record["source"]
    sections = [
        _front_matter(record),
        f"# {_title(source['ref'])}, converted to multi-head latent attention",
        _introduction(record),
        "## Loading\n\n" + (_exported(record["export"]) if "export" in record else _loading(record["format"])),
        "## Cache\n\n" + _cache_table(record),
        "## Exactness\n\n" + _exactness(record),
        "## Quality\n\n" + _quality(record),
        "## Recipe\n\n" + _recipe(record),
        "## Limits\n\n" + _limits(record),
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(record: Mapping[str, Any]) -> str:
    """The metadata by which the hub finds the model: what it was made of, its licence, and what was measured."""
    export = record.get("export", {})
    entries: dict[str, Any] = {}
    if record["source"]["kind"] == "hub":
        # Of the relations that the hub knows (adapter, finetune, merge, quantized), weights fitted anew are a finetune.
        relation = "quantized" if export.get("dtype") == "q8_0" else "finetune"
        entries = {"base_model": record["source"]["ref"], "base_model_relation": relation}
    entries |= record["source"].get("licence", {})
    entries |= {
        "library_name": "gguf" if export.get("form") == "gguf" else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["mla-convert", "multi-head-latent-attention", "mla", "kv-cache"],
    }
    if results := [_result(row) for row in _own_measurements(record) if row.get("perplexity") is not None]:
        entries["model-index"] = [{"name": f"{_title(record['source']['ref'])}-mla", "results": results}]
    return "---\n" + yaml.safe_dump(entries, sort_keys=False, allow_unicode=True) + "---"


def _result(row: Mapping[str, Any]) -> dict[str, Any]:
    """A measured perplexity in the form of the hub's model index."""
    text = str(row["text"])
    dataset = text if text.startswith("builtin:") else re.split("[:@#]", text)[0]
    if is_file_ref(text):  # which is no dataset of the hub
        dataset, text = "text", _text_name(text)
    how = "".join(f", {key} {row[key]:,}" for key in ("context", "tokens") if row.get(key) is not None)
    return {
        "task": {"type": "text-generation", "name": "Text generation"},
        "dataset": {"type": dataset, "name": text},
        "metrics": [{"type": "perplexity", "name": f"Perplexity{how}", "value": row["perplexity"]}],
    }


def _text_name(ref: str) -> str:
    """The names of texts without the folders of files: where those lie says nothing to others; digests tell them."""
    return " + ".join(PurePath(part).name if is_file_ref(part) else part for part in ref.split(" + "))


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
        + ("" if "export" in record else " `report.html` shows them, for a browser.")
    )


def _loading(output_format: str) -> str:
    if output_format == "native":
        arguments, remark = (
            "folder, trust_remote_code=True",
            "The model class lies beside the weights, in the files that end in `_mla.py`.",
        )
    else:
        arguments, remark = "folder", "The model class is transformers' own `DeepseekV3ForCausalLM`."
    return (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'folder = "path/to/this/folder"\n'
        f"model = AutoModelForCausalLM.from_pretrained({arguments})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({arguments})\n```\n\n" + remark
    )


_HOW_TO_LOAD = {
    "stock": "Any engine that serves `DeepseekV3ForCausalLM` loads this folder; it needs no code of this project.",
    "custom": (
        "The model class lies beside the weights; transformers loads it with `trust_remote_code=True`, or without "
        "where mla-convert is installed and `mla_convert.mla` imported."
    ),
    "gguf": "llama.cpp and what is built on it load the `.gguf` file (architecture `deepseek2`).",
}


def _exported(export: Mapping[str, Any]) -> str:
    """How the folder of an export is loaded, and what its verification found."""
    lines = [f"Exported for {export['target']}. {_HOW_TO_LOAD[export['form']]}"]
    if export["reasons"]:
        lines.append("Why not the stock form: " + " ".join(export["reasons"]))
    sizes = f"As written C = {export['kv_rank']} and R = {export['rope_dim']} in every layer"
    if export["cache_bytes"] is not None:
        sizes += f"; the engine keeps {export['cache_bytes']:,} bytes a token"
    lines.append(sizes + ".")
    checked = export["verification"]
    if checked is None:
        lines.append("Nothing has verified what this folder answers.")
    else:
        found = checked["difference"]
        lines.append(
            f"Loaded in {checked['engine']} {checked['version']} and compared with the converted model: "
            f"|Δ log p| {_figure(found['mean_logprob_difference'])} on average and "
            f"{_figure(found['max_logprob_difference'])} at most, {found['agreed']} of {found['continuation']} greedy "
            f"tokens alike; {'passed' if checked['passed'] else 'failed'}."
        )
    return "\n\n".join(lines)


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
    shapes = {tuple(shape.items()) for shape in record["plan"]["layers"]}
    if len(shapes) == 1:
        shape = dict(next(iter(shapes)))
        sizes = (
            f"Latent rank C = {shape['kv_rank']}, RoPE dim R = {shape['rope_dim']}, no-RoPE dim N = "
            f"{shape['nope_dim']}, value dim V = {shape['value_dim']}."
        )
        if shape.get("key_scales"):
            sizes += f" Cached are C + R and {shape['key_scales']} scales of keys."
    else:
        sizes = "Layers differ in their sizes; `conversion.json` lists them."
    return "\n".join(lines) + f"\n\nThe sizes follow from the config. {sizes}"


def _exactness(record: Mapping[str, Any]) -> str:
    """What is computed as the source does, what is not, and what the cache holds because it could not be absorbed."""
    lines = [FULL_RANK]
    full = record["plan"].get("full_rank")
    if full is not None:
        sizes = "every layer at full rank" if full else "less than that"
        lines.append(f"This model keeps {sizes}." if full else f"This model keeps {sizes}. {BELOW}")
    special = record["source"].get("special")
    if special:
        lines.append(f"Kept as the source has it: {'; '.join(special)}.")
    if besides := record["plan"].get("cached_besides"):
        lines.append(besides)
    if (difference := record.get("reading_difference")) is not None:
        lines.append(
            "Before the conversion the source was read once as this project reads it and once by transformers' own "
            f"class: |Δ log p| at most {_figure(difference)}."
        )
    return "\n".join(f"- {line}" for line in lines)


def _own_measurements(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What was measured on the weights that the card is of, and not on those that an export rounded."""
    before = record.get("export", {}).get("measured_before", [])
    return [row for row in record["measurements"] if row not in before]


def _quality(record: Mapping[str, Any]) -> str:
    own = _own_measurements(record)
    parts = [_measured_table(own)] if own else []
    if before := [row for row in record["measurements"] if row not in own]:
        stored = f"with its weights in {record['dtype']}, before they were written in {record['export']['dtype']}"
        parts.append(f"Measured on the converted model {stored}:\n\n{_measured_table(before)}")
    if not own:
        parts.insert(0, "Not measured. `mla-convert evaluate` measures perplexity, and agreement with the source.")
    return "\n\n".join(parts)


def _measured_table(measurements: Sequence[Mapping[str, Any]]) -> str:
    columns = [(key, title) for key, title in _MEASURED_COLUMNS if any(key in row for row in measurements)]
    lines = [
        "| " + " | ".join(title for _, title in columns) + " |",
        "|" + "---|" * len(columns),
        *("| " + " | ".join(_cell(row, key) for key, _ in columns) + " |" for row in measurements),
    ]
    return "\n".join(lines)


def _cell(row: Mapping[str, Any], key: str) -> str:
    return _figure(_text_name(str(row[key])) if key == "text" and key in row else row.get(key))


def _figure(value: Any) -> str:
    """A table cell: floats to five significant digits, what was not measured by name."""
    if value is None:
        return "not measured"
    if isinstance(value, float):
        return f"{value:,.0f}" if value == int(value) else f"{value:.5g}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|")


def _recipe(record: Mapping[str, Any]) -> str:
    text = yaml.safe_dump(record["recipe"], sort_keys=False, allow_unicode=True)
    used = "No calibration text was used."
    if calibration := record["calibration"]:
        used = f"Calibration: {_text_used(calibration)}"
    if refit := record.get("refit"):
        used += f" Refits: {_text_used(refit)}"
    seeds = ", ".join(f"{name} {seed}" for name, seed in record["seeds"].items())
    return f"```yaml\n{text}```\n\n{used}" + (f" Seeds: {seeds}." if seeds else "")


def _text_used(text: Mapping[str, Any]) -> str:
    return f"{text['tokens']:,} tokens of `{_text_name(text['ref'])}` (sha256 {text['digest']})."


def _limits(record: Mapping[str, Any]) -> str:
    changes = (
        "The conversion changes the model's answers as far as the figures above say; what was not measured is not "
        "known. The limits and licence of the source model apply."
    )
    own = [changes]
    if "export" in record:
        own += record["export"]["notes"]
    elif record["format"] == "native":
        own.append(
            "Engines that know neither this class nor transformers' remote code cannot serve this folder; "
            "`--format deepseek` writes one for transformers' stock class."
        )
    return "\n".join(f"- {line}" for line in (*own, *record["notes"]))

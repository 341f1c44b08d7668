"""conversion.json and the model card: complete, in JSON's own types, and without figures nobody measured."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard

from mla_convert.card import model_card
from mla_convert.record import (
    CalibrationRecord,
    ConversionFacts,
    SourceRecord,
    build_record,
    json_safe,
)
from mla_convert.spec import MLAShape, QKNormSpec, RopeSpec, SourceSpec

SPEC = SourceSpec(
    architecture="LlamaForCausalLM",
    family="llama",
    num_layers=2,
    hidden_size=48,
    intermediate_size=96,
    vocab_size=64,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    rope=RopeSpec(dim=8, inv_freq=(1.0, 0.1, 0.01, 0.001)),
    attention_scale=8**-0.5,
    rms_norm_eps=1e-5,
    hidden_act="silu",
    max_position_embeddings=128,
    query_bias=False,
    key_bias=False,
    value_bias=False,
    output_bias=False,
    mlp_bias=False,
    tie_word_embeddings=True,
    windows=(None, None),
    dtype="bfloat16",
)

FACTS = ConversionFacts(
    source=SourceRecord("acme/tiny-llama", {"model.safetensors": "ab" * 32}, revision="v1"),
    spec=SPEC,
    format="native",
    dtype="bfloat16",
    layers=(MLAShape(kv_rank=12, rope_dim=4, nope_dim=8, value_dim=8),) * 2,
    recipe={"name": "default", "rotation": "complex", "damping": 0.25},
    seeds={"calibration": 7},
    calibration=CalibrationRecord("builtin:pydoc", "cd" * 32, 1024),
    layer_errors=({"attention_output": 0.125}, {"attention_output": math.nan}),
    timings={"collect": 1.5},
    notes=("The norm is not the source's.",),
)

MEASURED = {
    "text": "a.txt",
    "context": 512,
    "tokens": 30208,
    "source_perplexity": 29.0312,
    "perplexity": 34.5678,
    "kl": 0.16543,
    "top1_agreement": 0.81,
}


def _front_matter(card: str) -> dict[str, object]:
    _, header, _ = card.split("---\n", 2)
    return yaml.safe_load(header)


def test_the_record_survives_json() -> None:
    record = build_record(FACTS)
    assert json.loads(json.dumps(record, allow_nan=False)) == record


def test_the_record_holds_what_reproduces_the_conversion() -> None:
    record = build_record(FACTS)
    assert record["schema_version"] == 1
    assert record["tool"]["name"] == "mla-convert"
    assert record["libraries"]["torch"] == torch.__version__
    assert record["source"]["ref"] == "acme/tiny-llama"
    assert record["source"]["revision"] == "v1"
    assert record["source"]["digests"] == {"model.safetensors": "ab" * 32}
    assert record["recipe"] == {"name": "default", "rotation": "complex", "damping": 0.25}
    assert record["seeds"] == {"calibration": 7}
    assert record["calibration"] == {"ref": "builtin:pydoc", "digest": "cd" * 32, "tokens": 1024}
    assert record["layer_errors"] == [{"attention_output": 0.125}, {"attention_output": None}]
    assert record["timings"] == {"collect": 1.5}
    assert record["notes"] == ["The norm is not the source's."]


def test_the_cache_arithmetic() -> None:
    # 2 layers x 2 KV heads x 8 dims x (key and value) = 64 numbers against 2 x (12 + 4) = 32; 2 bytes each
    assert build_record(FACTS)["plan"]["cache"] == {
        "source_numbers_per_token": 64,
        "numbers_per_token": 32,
        "source_bytes_per_token": 128,
        "bytes_per_token": 64,
        "ratio": 0.5,
    }


def test_no_path_of_the_machine_enters_the_record() -> None:
    assert str(Path.cwd()) not in json.dumps(build_record(FACTS))
    assert str(Path.home()) + "/" not in json.dumps(build_record(FACTS))


@pytest.mark.parametrize(
    ("ref", "kind"),
    [
        ("builtin:smollm2-135m", "builtin"),
        ("acme/tiny-llama", "hub"),
        ("./models/tiny", "local"),
        ("/data/models/tiny", "local"),
        ("../tiny", "local"),
    ],
)
def test_kinds_of_source(ref: str, kind: str) -> None:
    assert SourceRecord(ref, {}).kind == kind


def test_a_relative_folder_that_looks_like_a_hub_id_is_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert SourceRecord("models/tiny", {}).kind == "local"


def test_json_safe() -> None:
    value = {1: (torch.tensor(2.5), Path("a/b"), {"y", "x"}), "inf": float("inf"), "t": torch.arange(2), "n": None}
    assert json_safe(value) == {"1": [2.5, "a/b", ["x", "y"]], "inf": None, "t": [0, 1], "n": None}
    with pytest.raises(TypeError, match="no JSON form"):
        json_safe(object())


def test_the_card_of_a_hub_model_names_its_base() -> None:
    header = _front_matter(model_card(build_record(FACTS)))
    assert header["base_model"] == "acme/tiny-llama"
    assert header["library_name"] == "transformers"
    assert "multi-head-latent-attention" in header["tags"]  # type: ignore[operator]


def test_the_card_of_a_local_model_claims_no_base() -> None:
    facts = replace(FACTS, source=SourceRecord("./tiny", {}))
    assert "base_model" not in _front_matter(model_card(build_record(facts)))


def test_the_card_says_how_to_load_each_format() -> None:
    native = model_card(build_record(FACTS))
    stock = model_card(build_record(replace(FACTS, format="deepseek")))
    assert "from_pretrained(folder, trust_remote_code=True)" in native
    assert "trust_remote_code" not in stock
    assert "DeepseekV3ForCausalLM" in stock


def test_the_card_shows_the_cache_table_recipe_and_notes() -> None:
    card = model_card(build_record(FACTS))
    assert "| source | 32 | 64 | 128 | 1.000 |" in card
    assert "| this model | 16 | 32 | 64 | 0.500 |" in card
    assert "C = 12" in card
    assert "R = 4" in card
    assert "damping: 0.25" in card
    assert "1,024 tokens of `builtin:pydoc`" in card
    assert "- The norm is not the source's." in card


def test_the_card_shows_only_what_was_measured() -> None:
    card = model_card(build_record(FACTS))
    assert "Not measured." in card
    assert "perplexity of the source" not in card

    partly = {"text": "b.txt", "context": 512, "tokens": 100, "perplexity": 50.0}
    card = model_card(build_record(replace(FACTS, measurements=(MEASURED, partly))))
    assert "Not measured." not in card
    assert "| a.txt | 512 | 30,208 | 29.031 | 34.568 | 0.16543 | 0.81 |" in card
    assert "| b.txt | 512 | 100 | not measured | 50 | not measured | not measured |" in card


def _section(card: str, title: str) -> str:
    return card.split(f"## {title}\n\n", 1)[1].split("\n## ", 1)[0]


def test_the_card_says_what_is_exact() -> None:
    half = _section(model_card(build_record(FACTS)), "Exactness")
    assert "At full rank" in half
    assert "keeps less than that" in half
    assert "Kept as" not in half
    # both KV heads' slots, and their 16 content dims beside them
    whole = replace(FACTS, layers=(MLAShape(kv_rank=16, rope_dim=16, nope_dim=8, value_dim=8),) * 2)
    assert "every layer at full rank" in _section(model_card(build_record(whole)), "Exactness")
    one_short = replace(FACTS, layers=(*whole.layers[:1], MLAShape(kv_rank=15, rope_dim=16, nope_dim=8, value_dim=8)))
    assert "less than that" in _section(model_card(build_record(one_short)), "Exactness")


def test_the_card_says_what_is_cached_beside_the_latent() -> None:
    spec = replace(SPEC, qk_norm=QKNormSpec("head", 1e-6), attention_softcap=50.0)
    layers = (MLAShape(kv_rank=12, rope_dim=4, nope_dim=8, value_dim=8, key_scales=2),) * 2
    record = build_record(replace(FACTS, spec=spec, layers=layers, reading_difference=2.5e-6))
    assert record["plan"]["cache"]["numbers_per_token"] == 2 * (12 + 4 + 2)
    card = model_card(record)
    exactness = _section(card, "Exactness")
    assert "capped at 50; queries and keys are normalised over each head" in exactness
    assert "2 numbers a token and layer beside C + R" in exactness
    assert "at most 2.5e-06" in exactness
    assert "2 scales of keys" in _section(card, "Cache")


def test_the_card_of_an_older_record_is_still_made() -> None:
    record = build_record(FACTS)
    del record["source"]["special"], record["plan"]["full_rank"], record["plan"]["cached_besides"]
    del record["reading_difference"]
    assert "At full rank" in model_card(record)


def test_the_hub_reads_the_metadata_and_the_measured_perplexities() -> None:
    source = replace(FACTS.source, licence={"license": "other", "license_name": "acme-1", "license_link": "LICENSE"})
    data_row = {"text": "acme/stories:small@test#body", "context": None, "tokens": 64, "perplexity": 21.5}
    private = {"text": "/data/unpublished/text.txt", "context": None, "tokens": 64, "perplexity": 30.5}
    unmeasured = {"text": "c.txt", "context": 8, "tokens": 8, "kl": 0.1}
    card = model_card(
        build_record(replace(FACTS, source=source, measurements=(MEASURED, data_row, private, unmeasured)))
    )
    found = ModelCard(card, ignore_metadata_errors=False).data
    assert (found.base_model, found.base_model_relation) == ("acme/tiny-llama", "finetune")
    assert (found.license, found.license_name, found.license_link) == ("other", "acme-1", "LICENSE")
    assert found.pipeline_tag == "text-generation"
    assert [(row.dataset_type, row.dataset_name, row.metric_type, row.metric_value) for row in found.eval_results] == [
        ("text", "a.txt", "perplexity", 34.5678),
        ("acme/stories", "acme/stories:small@test#body", "perplexity", 21.5),
        ("text", "text.txt", "perplexity", 30.5),  # where a file lay says nothing to others
    ]
    assert "/data" not in card
    assert "| acme/stories:small@test#body |" in card
    assert found.eval_results[0].metric_name == "Perplexity, context 512, tokens 30,208"


def test_the_metadata_claims_neither_a_licence_nor_results_that_nobody_gave() -> None:
    header = _front_matter(model_card(build_record(FACTS)))
    assert not {"license", "model-index"} & set(header)

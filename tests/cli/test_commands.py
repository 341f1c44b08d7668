"""The commands on a tiny model: what each prints, and that ``--json`` prints that alone."""

import json
import math
import shutil

import pytest

from tests.tiny import HEAD_DIM, KV_HEADS

LAYERS = 2
KV_WIDTH = 2 * KV_HEADS["GQA"] * HEAD_DIM


def test_inspect_says_what_the_config_says(cli, tiny_folder) -> None:
    facts = cli("inspect", tiny_folder, "--json").json()
    assert facts["architecture"] == "LlamaForCausalLM"
    assert facts["attention"] == {"kind": "GQA", "heads": 4, "kv_heads": 2, "head_dim": 16, "scale": 16**-0.5}
    rope = facts["rope"]
    assert (rope["kind"], rope["theta"], rope["dim"], rope["frequencies"]) == ("default", 10000.0, 16, 8)
    assert rope["layout"] == "rotate_half"
    assert not any(facts["biases"].values())
    assert facts["windows"] == [None] * LAYERS
    assert facts["cache_bytes_per_token"] == {"bfloat16": LAYERS * KV_WIDTH * 2, "float32": LAYERS * KV_WIDTH * 4}
    assert facts["file_bytes"] == (tiny_folder / "model.safetensors").stat().st_size


def test_inspect_lists_budgets_that_are_kept(cli, tiny_folder) -> None:
    budgets = cli("inspect", tiny_folder, "--json").json()["budgets"]
    assert [budget["cache"] for budget in budgets] == [1.0, 0.75, 0.5, 0.375, 0.25]
    for budget in budgets:
        assert budget["kv_rank"] + budget["rope_dim"] == budget["cached_per_token_layer"]
        assert budget["cached_per_token_layer"] <= budget["cache"] * KV_WIDTH
        assert budget["rope_dim"] % 2 == 0


def test_inspect_reads_no_weights(cli, tiny_folder, monkeypatch) -> None:
    from mla_convert.sources import Source

    def refuse(*_: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(Source, "tensor", refuse)
    assert cli("inspect", tiny_folder).code == 0


def test_inspect_shows_a_table_that_names_the_same(cli, tiny_folder) -> None:
    answer = cli("inspect", tiny_folder)
    assert answer.code == 0
    assert "GQA: 4 heads, 2 KV heads of 16" in answer.out
    assert answer.err == ""


def test_a_dry_run_plans_within_the_budget_and_writes_nothing(cli, tiny_folder, tmp_path) -> None:
    out = tmp_path / "out"
    answer = cli("convert", tiny_folder, out, "--cache", "0.5", "--dry-run", "--json").json()
    assert answer["dry_run"] is True
    assert answer["plan"]["cached_per_token_layer"] <= KV_WIDTH / 2
    assert answer["plan"]["source_cached_per_token_layer"] == KV_WIDTH
    assert len(answer["plan"]["layers"]) == LAYERS
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_finds_what_the_conversion_would_end_on(cli, tiny_folder, tmp_path) -> None:
    source = shutil.copytree(tiny_folder, tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    failed = cli("convert", source, tmp_path / "out", "--dry-run")
    assert failed.code != 0
    assert "no tokenizer can be loaded" in failed.err


def test_a_device_that_is_not_there_is_refused(cli, tiny_folder, tmp_path) -> None:
    refused = cli("convert", tiny_folder, tmp_path / "out", "--device", "cpu", "--device", "gpu")
    assert refused.code == 2
    assert "there is no device 'gpu'" in refused.err
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_takes_given_sizes(cli, tiny_folder, tmp_path) -> None:
    sizes = ("--kv-rank", 24, "--rope-dim", 8)
    shape = cli("convert", tiny_folder, tmp_path / "out", *sizes, "--dry-run", "--json").json()["plan"]["layers"][0]
    assert (shape["kv_rank"], shape["rope_dim"]) == (24, 8)


def test_convert_answers_with_what_it_wrote(cli, tiny_folder, text_file, tmp_path) -> None:
    out = tmp_path / "out"
    sizes = ("--kv-rank", 24, "--rope-dim", 8, "--calibration", text_file, "--calibration-tokens", 512)
    answer = cli("convert", tiny_folder, out, *sizes, "--json")
    assert answer.json()["record"] == json.loads((out / "conversion.json").read_text())
    config = json.loads((out / "config.json").read_text())
    assert (config["kv_lora_rank"], config["qk_rope_head_dim"]) == (24, 8)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert answer.err == ""


def test_convert_shows_the_cache_before_and_after(cli, tiny_folder, text_file, tmp_path) -> None:
    sizes = ("--cache", 0.5, "--calibration", text_file, "--calibration-tokens", 512)
    answer = cli("convert", tiny_folder, tmp_path / "out", *sizes)
    assert answer.code == 0, answer.err
    assert str(KV_WIDTH) in answer.out
    assert "mla-convert evaluate" in answer.out


def test_evaluate_alone(cli, tiny_folder, text_file) -> None:
    options = ("--text", text_file, "--context", 64, "--max-tokens", 256)
    result = cli("evaluate", tiny_folder, *options, "--json").json()
    assert result["tokens"] == 4 * 63
    assert result["perplexity"] > 1
    assert result["cache_bytes_per_token"] == LAYERS * KV_WIDTH * 4
    assert "against" not in result


def test_evaluate_beside_itself_agrees_wholly(cli, tiny_folder, text_file) -> None:
    options = ("--against", tiny_folder, "--text", text_file, "--context", 64, "--max-tokens", 256)
    result = cli("evaluate", tiny_folder, *options, "--json").json()
    assert result["kl"] == pytest.approx(0, abs=1e-12)
    assert result["top1_agreement"] == 1
    assert result["log_ratio"] == 0
    assert result["against"]["perplexity"] == result["perplexity"]
    assert result["against"]["source"] == str(tiny_folder)


def test_evaluate_measures_a_smaller_cache_and_a_consistent_ratio(cli, converted, tiny_folder, text_file) -> None:
    options = ("--against", tiny_folder, "--text", text_file, "--context", 64, "--max-tokens", 512)
    result = cli("evaluate", converted, *options, "--json").json()
    assert result["cache_bytes_per_token"] <= result["against"]["cache_bytes_per_token"] / 2
    assert result["kl"] > 0
    ratio = math.log(result["perplexity"] / result["against"]["perplexity"])
    # Both logarithms are of means in float64; what differs is rounding.
    assert result["log_ratio"] == pytest.approx(ratio, abs=1e-9)


def test_evaluate_shows_both_side_by_side(cli, converted, tiny_folder, text_file) -> None:
    options = ("--against", tiny_folder, "--text", text_file, "--context", 64, "--max-tokens", 256)
    answer = cli("evaluate", converted, *options)
    assert answer.code == 0, answer.err
    for part in ("before", "after", "perplexity", "KL divergence", "top-1 agreement", "cache bytes a token"):
        assert part in answer.out
    assert answer.err == ""


def test_absorbed_matrices_do_not_change_what_is_written(cli, tiny_folder, text_file, tmp_path) -> None:
    out = tmp_path / "out"
    sizes = ("--cache", 0.5, "--calibration", text_file, "--calibration-tokens", 512)
    assert cli("convert", tiny_folder, out, *sizes).code == 0
    prompt = ("--prompt", "the cat sat", "--max-new-tokens", 12, "--json")
    before = cli("generate", out, *prompt, "--mode", "expanded").json()
    absorbed = cli("absorb", out, "--merge", "never", "--json").json()
    assert absorbed["layers"] == LAYERS
    assert absorbed["merged"] is False
    after = cli("generate", out, *prompt, "--mode", "absorbed").json()
    assert after["absorbed_matrices"] is True
    assert before["absorbed_matrices"] is False
    assert after["token_ids"] == before["token_ids"]


def test_generate_prints_prompt_and_continuation(cli, converted) -> None:
    options = ("--prompt", "the cat sat", "--max-new-tokens", 8)
    text = cli("generate", converted, *options, "--json").json()["text"]
    answer = cli("generate", converted, *options)
    assert answer.out == f"the cat sat{text}\n"


@pytest.mark.parametrize("extra", [(), ("--against", "SOURCE")])
def test_recording_needs_a_comparison_and_a_record(cli, tiny_folder, text_file, extra) -> None:
    extra = tuple(str(tiny_folder) if argument == "SOURCE" else argument for argument in extra)
    answer = cli("evaluate", tiny_folder, "--text", text_file, "--record", *extra)
    assert answer.code == 2
    assert "--record" in answer.err

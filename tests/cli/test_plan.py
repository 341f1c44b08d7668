"""``mla-convert plan``: its figures against arithmetic by hand, and that they are said to be what they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from mla_convert.errors import RecipeError, StatisticsError, UsageError
from mla_convert.sources import Source
from tests.tiny import HEAD_DIM, KV_HEADS, save_source, tiny_llama, tiny_mistral, tiny_qwen3

LAYERS, HEADS, CONTEXT = 2, 4, 256
KV_WIDTH = 2 * KV_HEADS["GQA"] * HEAD_DIM


@pytest.fixture(scope="module")
def statistics(tmp_path_factory, tiny_folder, text_file) -> Path:
    """The statistics of the tiny source, with gradients."""
    from mla_convert.cli import run

    folder = tmp_path_factory.mktemp("plan")
    arguments = ["convert", tiny_folder, folder / "mla", "--cache", "0.5", "--calibration", text_file]
    arguments += ["--calibration-tokens", "1024", "--save-statistics", folder / "text.st", "--quiet"]
    assert run([str(argument) for argument in arguments]) == 0
    return folder / "text.st"


def test_the_kinds_of_attention_stand_beside_each_other(cli, tiny_folder) -> None:
    facts = cli("plan", tiny_folder, "--dtype", "float32", "--json").json()
    mha, gqa, mqa, mla = facts["attention"]["kinds"]
    assert (mha["elements"], gqa["elements"], mqa["elements"]) == (2 * HEADS * HEAD_DIM, KV_WIDTH, 2 * HEAD_DIM)
    half = next(row for row in facts["budgets"] if row["cache"] == 0.5)
    assert facts["attention"]["cache"] == 0.5
    assert mla["elements"] == half["kv_rank"] + half["rope_dim"]
    assert mla["bytes_per_token"] == half["cache_bytes_per_token"] == LAYERS * 4 * mla["elements"]
    assert mla["change"] == pytest.approx(mla["elements"] / mha["elements"] - 1)


def test_a_memory_holds_whole_sequences(cli, tiny_folder) -> None:
    arguments = ("--budget-gb", 0.001, "--context", 100, "--batch", 3, "--dtype", "float16")
    facts = cli("plan", tiny_folder, *arguments, "--json").json()
    assert facts["before"]["cache_bytes"] == 3 * 100 * LAYERS * KV_WIDTH * 2
    assert facts["before"]["sequences"] == 10**6 // (100 * LAYERS * KV_WIDTH * 2)
    for row in facts["budgets"]:
        each = 100 * LAYERS * row["cached_per_token_layer"] * 2
        assert row["cache_bytes"] == 3 * each
        assert row["sequences"] * each <= 10**6 < (row["sequences"] + 1) * each
        assert row["predicted_loss"] is None
    assert cli("plan", tiny_folder, "--json").json()["context"] == CONTEXT


def test_a_window_bounds_the_cache(cli, tmp_path) -> None:
    folder = save_source(tiny_mistral(window=16), tmp_path)
    short, long = (cli("plan", folder, "--context", n, "--json").json() for n in (16, 200))
    assert short["before"]["cache_bytes"] == long["before"]["cache_bytes"]
    assert [row["cache_bytes"] for row in short["budgets"]] == [row["cache_bytes"] for row in long["budgets"]]
    assert "2 of 2 layers count with their sliding window of 16 tokens" in cli("plan", folder).out


def test_scales_of_keys_are_cached_besides(cli, tmp_path) -> None:
    folder = save_source(tiny_qwen3(), tmp_path)
    for row in cli("plan", folder, "--json").json()["budgets"]:
        assert row["key_scales"] == 2
        assert row["cached_per_token_layer"] == row["kv_rank"] + row["rope_dim"] + 2
    assert "scales" in cli("plan", folder).out


def test_the_loss_is_predicted_from_statistics(cli, tiny_folder, statistics) -> None:
    facts = cli("plan", tiny_folder, "--statistics", statistics, "--json").json()
    losses = [row["predicted_loss"] for row in facts["budgets"]]
    # at the whole cache what is left of it is rounding
    assert abs(losses[0]) < 1e-9
    assert losses[0] < losses[1] < losses[2] < losses[3] < losses[4]
    assert facts["time"]["stages"]["calibrate"] == 0
    shown = cli("plan", tiny_folder, "--statistics", statistics).out
    assert "predicted loss" in shown
    assert "a prediction, not a measurement" in shown


def test_statistics_settle_the_sizes_that_a_recipe_leaves_open(cli, tiny_folder, statistics) -> None:
    arguments = ("plan", tiny_folder, "--recipe", "fast", "--json")
    before = cli(*arguments).json()["budgets"]
    after = cli(*arguments, "--statistics", statistics).json()["budgets"]
    assert any(row["provisional"] for row in before)
    assert not any(row["provisional"] for row in after)
    for open_, settled in zip(before, after, strict=True):
        assert sum(settled["kv_ranks"]) + sum(settled["rope_dims"]) == LAYERS * open_["cached_per_token_layer"]


def test_without_statistics_nothing_is_predicted_and_no_weight_read(cli, tiny_folder, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(Source, "tensor", refuse)
    answer = cli("plan", tiny_folder)
    assert (answer.code, answer.err) == (0, "")
    assert "predicted loss" not in answer.out
    assert "--save-statistics FILE" in answer.out
    assert "estimated" in answer.out


def test_a_recipe_without_sizes_but_one_says_so(cli, tiny_folder) -> None:
    answer = cli("plan", tiny_folder, "--recipe", "exact")
    assert answer.code == 0
    assert "No sizes at 0.75, 0.5, 0.375, 0.25: " in answer.out


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (("--budget-gb", 0), UsageError),
        (("--budget-gb", "nan"), UsageError),
        (("--context", 0), UsageError),
        (("--recipe", "no-such"), RecipeError),
        (("--statistics", "no-such.st"), StatisticsError),
    ],
)
def test_bad_options(cli, tiny_folder, options, kind) -> None:
    answer = cli("plan", tiny_folder, *options)
    assert (answer.code, answer.out) == (kind.exit_code, "")
    assert [line[:7] for line in answer.err.splitlines()] == ["error: ", "  try: "]


def test_statistics_of_another_source_are_refused(cli, tmp_path, statistics) -> None:
    other = save_source(tiny_llama(seed=1), tmp_path)
    assert cli("plan", other, "--statistics", statistics).code == StatisticsError.exit_code

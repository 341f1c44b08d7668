"""``mla-convert inspect``: what is special, whether it converts, what holds it then, and what that takes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from mla_convert.errors import UnsupportedArchitectureError
from mla_convert.sources import Source
from tests.tiny import save_source, tiny_llama, tiny_qwen3

LAYERS, KV_HEADS = 2, 2


@pytest.fixture(scope="module")
def normed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source whose keys are normalised."""
    return save_source(tiny_qwen3(), tmp_path_factory.mktemp("inspect") / "qwen3")


def test_a_plain_source_is_exact_and_held_by_all(cli, tiny_folder) -> None:
    facts = cli("inspect", tiny_folder, "--json").json()
    assert (facts["special"], facts["cached_besides"], facts["key_scales"]) == ([], None, 0)
    assert facts["verdict"]["kind"] == "exact"
    assert all(target["holds"] for target in facts["targets"].values())
    assert set(facts["targets"]) == {"native", "deepseek", "transformers", "vllm", "sglang", "gguf"}


def test_only_the_whole_cache_is_exact(cli, tiny_folder) -> None:
    budgets = cli("inspect", tiny_folder, "--json").json()["budgets"]
    assert [budget["exact"] for budget in budgets] == [True, False, False, False, False]
    disks = [budget["disk_bytes"] for budget in budgets]
    assert disks == sorted(disks, reverse=True)
    assert all(budget["memory_bytes"] > budget["disk_bytes"] for budget in budgets)


def test_what_it_takes_is_of_the_way_that_this_machine_would_choose(cli, tiny_folder, monkeypatch) -> None:
    for total, chosen, said in (
        (2**50, "whole", "working on the whole model"),
        (2**10, "low_memory", "working a layer at a time"),
    ):
        monkeypatch.setattr(psutil, "virtual_memory", lambda total=total: SimpleNamespace(total=total))
        for command in ("inspect", "plan"):
            facts = cli(command, tiny_folder, "--json").json()
            assert facts["low_memory"] == (chosen == "low_memory")
            for row in facts["budgets"]:
                assert set(row["ways"]) == {"whole", "low_memory"}
                way = row["ways"][chosen]
                assert row["low_memory"] == facts["low_memory"]
                assert (row["memory_bytes"], row["scratch_bytes"]) == (way["memory_bytes"], way["scratch_bytes"])
                assert row["disk_bytes"] < way["disk_and_scratch_bytes"] <= row["disk_bytes"] + way["scratch_bytes"]
            shown = " ".join(cli(command, tiny_folder).out.split())
            assert said in shown
            assert "scratch" in shown


def test_what_norms_of_keys_cost_is_said(cli, normed) -> None:
    facts = cli("inspect", normed, "--json").json()
    assert facts["special"] == ["queries and keys are normalised over each head"]
    assert facts["key_scales"] == KV_HEADS
    assert f"{KV_HEADS} numbers a token and layer beside C + R" in facts["cached_besides"]
    refused = {name for name, target in facts["targets"].items() if not target["holds"]}
    assert refused == {"deepseek", "transformers", "vllm", "sglang", "gguf"}
    assert all("normalised" in target["reasons"][0] for target in facts["targets"].values() if not target["holds"])
    for budget in facts["budgets"]:
        cached = budget["kv_rank"] + budget["rope_dim"] + KV_HEADS
        assert budget["cached_per_token_layer"] == cached
        assert budget["cache_bytes_per_token"]["float32"] == LAYERS * cached * 4


def test_the_screen_says_the_same(cli, normed) -> None:
    answer = cli("inspect", normed)
    assert (answer.code, answer.err) == (0, "")
    shown = " ".join(answer.out.split())
    for said in ("normalised over each head", "exact at full rank", "can be held by native", "C + R + scales"):
        assert said in shown, said
    assert "not by deepseek, transformers, vllm, sglang, gguf" in shown


def test_a_source_of_another_kind_is_refused_by_name(cli, tmp_path) -> None:
    folder = save_source(tiny_llama(), tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["MambaForCausalLM"]}))
    answer = cli("inspect", folder)
    assert answer.code == UnsupportedArchitectureError.exit_code
    assert answer.out == ""
    assert "error: 'MambaForCausalLM' is a state-space model" in answer.err
    assert "try: use a model whose layers are all softmax attention" in answer.err


def test_no_weight_is_read(cli, normed, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(Source, "tensor", refuse)
    assert cli("inspect", normed, "--json").code == 0

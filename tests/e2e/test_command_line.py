"""The installed command, a process for each step: convert, evaluate, absorb, generate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from mla_convert.mla import MLAForCausalLM
from tests.tiny import HEAD_DIM, KV_HEADS, save_source, tiny_llama

LAYERS = 2
PROMPT = "the cat sat on"
KV_WIDTH = 2 * KV_HEADS["GQA"] * HEAD_DIM


def command(*arguments: object) -> dict[str, Any]:
    """Run ``mla-convert`` in a process of its own; its standard output as the one JSON object that it must be."""
    done = subprocess.run(
        [sys.executable, "-m", "mla_convert", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("command-line")
    save_source(tiny_llama(), folder / "source")
    lines = (f"Line {i}: the cat sat on mat {i * i} and saw {i % 7} dogs.\n" for i in range(300))
    (folder / "text.txt").write_text("".join(lines))
    return folder


def test_from_a_checkpoint_to_decoded_text(folder: Path) -> None:
    source, out, text = folder / "source", folder / "mla", folder / "text.txt"
    made = command(
        *("convert", source, out, "--cache", 0.5, "--calibration", text, "--calibration-tokens", 1024, "--json")
    )
    shape = made["plan"]["layers"][0]
    cached = shape["kv_rank"] + shape["rope_dim"]
    assert cached <= KV_WIDTH / 2
    assert made["record"]["verification"]["max_logit_difference"] <= 1e-4
    assert json.loads((out / "conversion.json").read_text()) == made["record"]

    measured = command(
        *("evaluate", out, "--against", source, "--text", text, "--context", 64, "--max-tokens", 512),
        *("--record", "--json"),
    )
    (row,) = json.loads((out / "conversion.json").read_text())["measurements"]
    assert row["perplexity"] == measured["perplexity"]
    assert row["source_perplexity"] == measured["against"]["perplexity"]
    assert f"{measured['perplexity']:.5g}" in (out / "README.md").read_text()
    assert measured["cache_bytes_per_token"] == LAYERS * cached * 4
    assert measured["against"]["cache_bytes_per_token"] == LAYERS * KV_WIDTH * 4
    assert measured["tokens"] == 8 * 63
    assert measured["perplexity"] > 1
    assert measured["kl"] > 0
    assert 0 <= measured["top1_agreement"] <= 1

    assert command("absorb", out, "--merge", "auto", "--json")["layers"] == LAYERS
    written = command(*("generate", out, "--prompt", PROMPT, "--max-new-tokens", 64, "--mode", "absorbed", "--json"))
    assert written["absorbed_matrices"]
    assert written["token_ids"] == expanded_continuation(out)


def expanded_continuation(out: Path) -> list[int]:
    """64 greedy tokens with keys and values expanded, by transformers' own calls."""
    model, tokenizer = MLAForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    model.set_attention_mode("expanded")
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    found = model.generate(ids, attention_mask=ids.new_ones(ids.shape), max_new_tokens=64, do_sample=False)
    return found[0, ids.shape[1] :].tolist()

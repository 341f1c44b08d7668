"""Stage `layers`: what it calls a layer's input and output, what it changes, and that it can be gone on with."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mla_convert.cli import run
from mla_convert.errors import VerificationError
from mla_convert.evaluate import load_for_evaluation
from mla_convert.heal import healing
from mla_convert.heal.data import healing_text
from mla_convert.heal.healing import HealRequest, TextSettings, heal
from mla_convert.heal.layers import LayerCall, LayerSettings, embed, heal_layers, layers_of
from mla_convert.sources import open_source
from tests.tiny import VOCAB_SIZE, save_source, tiny_llama, tiny_mistral, tiny_qwen2

SETTINGS = LayerSettings(steps=30, batch=4, learning_rate=0.01)
TEXT = TextSettings(tokens=1024, context=32, held_out_share=0.2)


@pytest.fixture
def request_for(converted: Path, source: Path, text: Path, tmp_path: Path) -> HealRequest:
    return HealRequest(converted, tmp_path / "healed", str(source), (str(text),), text=TEXT, layers=SETTINGS)


def random_tokens(contexts: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB_SIZE, (contexts, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "model",
    [tiny_llama("MHA", tied=True), tiny_mistral(window=9), tiny_qwen2(window=9)],
    ids=["llama", "mistral", "qwen2"],
)
@torch.no_grad()
def test_layers_called_one_by_one_are_the_model(model: Any, tmp_path: Path) -> None:
    """Also where layers differ in their masks; and a layer is its attention's part and its feed-forward's."""
    model = open_source(str(save_source(model, tmp_path / "source"))).load_decoder(dtype=torch.float32)
    tokens = random_tokens(6, 24)
    wanted = model(tokens, output_hidden_states=True, use_cache=False).hidden_states
    call = LayerCall(model, tokens[:1])
    hidden = embed(model, tokens)
    assert torch.equal(hidden, wanted[0])
    for i, layer in enumerate(layers_of(model)):
        attended = hidden + call.attention(layer, hidden, i)
        composed = attended + layer.mlp(layer.post_attention_layernorm(attended))
        hidden = call(layer, hidden, i)
        torch.testing.assert_close(composed, hidden, atol=1e-5, rtol=1e-5)
    final = model.get_decoder().norm(hidden)
    torch.testing.assert_close(final, wanted[-1], atol=1e-5, rtol=1e-5)


def test_healing_brings_the_model_closer_on_text_that_it_did_not_see(request_for: HealRequest, source: Path) -> None:
    result = heal(request_for)
    assert all(layer.held_out_after <= layer.held_out_before for layer in result.layers)
    assert sum(layer.held_out_after for layer in result.layers) < 0.8 * sum(
        layer.held_out_before for layer in result.layers
    )
    teacher, tokenizer = load_for_evaluation(str(source), torch.float32)
    options = {"context": TEXT.context, "tokens": TEXT.tokens, "held_out_share": TEXT.held_out_share, "seed": TEXT.seed}
    tokens = healing_text(tokenizer, request_for.texts, **options).held_out
    distances = []
    for folder in (request_for.model, request_for.out):
        model, _ = load_for_evaluation(str(folder), torch.float32)
        with torch.no_grad():
            distances.append((model(tokens).logits - teacher(tokens).logits).square().mean().item())
    assert distances[1] < distances[0]


def test_only_attention_changes_and_what_was_made_from_old_weights_is_gone(request_for: HealRequest) -> None:
    assert run(["absorb", str(request_for.model), "--quiet"]) == 0
    heal(request_for)
    before = load_file(request_for.model / "model.safetensors")
    after = load_file(request_for.out / "model.safetensors")
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype == after[name].dtype
        assert torch.equal(value, after[name]) == (".self_attn." not in name)
    assert not (request_for.out / "absorbed.safetensors").exists()
    record = json.loads((request_for.out / "conversion.json").read_text())
    assert record["measurements"] == []
    assert [entry["stage"] for entry in record["healing"]] == ["layers"]
    assert "Healed layer by layer" in (request_for.out / "README.md").read_text()


def test_a_healed_folder_is_a_model_like_any_other(
    request_for: HealRequest, source: Path, text: Path, capfd: Any
) -> None:
    heal(request_for)
    out = str(request_for.out)
    measured = ["--against", str(source), "--text", str(text), "--context", "32", "--max-tokens", "256", "--record"]
    for arguments in (
        ["evaluate", out, *measured],
        ["absorb", out],
        ["generate", out, "--prompt", "the cat", "--max-new-tokens", "4"],
        [
            "heal",
            out,
            f"{out}-again",
            "--teacher",
            str(source),
            "--text",
            str(text),
            "--tokens",
            "256",
            "--context",
            "32",
        ],
    ):
        capfd.readouterr()
        assert run([*arguments, "--quiet", "--json"]) == 0
        assert json.loads(capfd.readouterr().out)
    record = json.loads((request_for.out.with_name(f"{request_for.out.name}-again") / "conversion.json").read_text())
    assert len(record["healing"]) == 2


def test_an_exact_conversion_keeps_its_weights(source: Path, text: Path, tmp_path: Path) -> None:
    """There is nothing to win, and a layer that got no better keeps what it had."""
    out = tmp_path / "exact"
    assert run(["convert", str(source), str(out), "--cache", "1.0", "--recipe", "exact", "--quiet"]) == 0
    student, _ = load_for_evaluation(str(out), torch.float32)
    teacher = open_source(str(source)).load_decoder(dtype=torch.float32)
    before = {name: value.clone() for name, value in student.state_dict().items()}
    results = list(heal_layers(student, teacher, random_tokens(8, 16), random_tokens(4, 16, seed=1), SETTINGS))
    assert not any(result.kept for result in results)
    assert all(result.held_out_before < 1e-8 for result in results)
    assert all(torch.equal(value, before[name]) for name, value in student.state_dict().items())


def test_a_run_that_failed_is_gone_on_with_to_the_same_bits(
    request_for: HealRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = HealRequest(**{**vars(request_for), "out": tmp_path / "whole"})
    heal(whole)
    heal_layers_before = healing.heal_layers

    def failing(*arguments: Any, **options: Any) -> Any:
        for result in heal_layers_before(*arguments, **options):
            yield result
            raise KeyboardInterrupt

    monkeypatch.setattr(healing, "heal_layers", failing)
    with pytest.raises(KeyboardInterrupt):
        heal(request_for)
    assert not request_for.out.exists()
    assert (request_for.out.parent / ".healed.heal").is_dir()
    monkeypatch.setattr(healing, "heal_layers", heal_layers_before)
    result = heal(request_for)
    assert [layer.layer for layer in result.layers] == [0, 1]
    assert not (request_for.out.parent / ".healed.heal").exists()
    assert_same_weights(whole.out, request_for.out)


def test_a_killed_run_is_gone_on_with_to_the_same_bits(request_for: HealRequest, tmp_path: Path) -> None:
    """SIGKILL, as soon as the first layer's checkpoint is there."""
    whole = HealRequest(**{**vars(request_for), "out": tmp_path / "whole"})
    heal(whole)
    command = [
        sys.executable, "-m", "mla_convert", "heal", str(request_for.model), str(request_for.out),
        "--teacher", request_for.teacher, "--text", request_for.texts[0], "--tokens", str(TEXT.tokens),
        "--context", str(TEXT.context), "--held-out", str(TEXT.held_out_share), "--layer-steps", str(SETTINGS.steps),
        "--layer-batch", str(SETTINGS.batch), "--layer-rate", str(SETTINGS.learning_rate), "--json",
    ]  # fmt: skip
    work = request_for.out.parent / ".healed.heal" / "layers"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(work.glob("step-*.safetensors")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    if request_for.out.exists():
        pytest.skip("the run was over before it could be killed")
    assert list(work.glob("step-*.safetensors"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert_same_weights(whole.out, request_for.out)


def assert_same_weights(one: Path, other: Path) -> None:
    first, second = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_teacher_that_the_model_was_not_made_from_is_refused(
    request_for: HealRequest, tmp_path: Path, capfd: Any
) -> None:
    other = save_source(tiny_llama(vocab_size=320), tmp_path / "other")
    arguments = ["heal", request_for.model, request_for.out, "--teacher", other, "--text", request_for.texts[0]]
    assert run([str(argument) for argument in arguments]) not in (0, 70)
    assert "vocabulary has 320 tokens" in capfd.readouterr().err
    assert not request_for.out.exists()


def test_a_loss_that_is_not_finite_stops_the_run(request_for: HealRequest, capfd: Any) -> None:
    student, _ = load_for_evaluation(str(request_for.model), torch.float32)
    teacher = open_source(request_for.teacher).load_decoder(dtype=torch.float32)
    before = {name: value.clone() for name, value in student.state_dict().items()}
    with torch.no_grad():
        layers_of(teacher)[0].self_attn.o_proj.weight[0, 0] = float("nan")
    from mla_convert.errors import HealError

    with pytest.raises(HealError, match="layer 0"):
        list(heal_layers(student, teacher, random_tokens(4, 16), random_tokens(2, 16), SETTINGS))
    assert all(torch.equal(value, before[name]) for name, value in student.state_dict().items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--held-out", "1.5"], "held-out"),
        (["--layer-rate", "0"], "layer-rate"),
        (["--stage", "global", "--learning-rate", "-1"], "learning_rate"),
        (["--tokens", "100000000"], "tokens"),
    ],
)
def test_bad_options_name_what_to_do(request_for: HealRequest, options: list[str], message: str, capfd: Any) -> None:
    arguments = ["heal", request_for.model, request_for.out, "--teacher", request_for.teacher]
    arguments += ["--text", request_for.texts[0], "--context", 32, *options]
    assert run([str(argument) for argument in arguments]) not in (0, 70)
    err = capfd.readouterr().err
    assert message in err
    assert "try:" in err
    assert not request_for.out.exists()


def test_a_folder_that_changed_while_it_was_healed_is_not_written_over_what_was_trained(
    request_for: HealRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    request_for = replace(request_for, model=Path(shutil.copytree(request_for.model, tmp_path / "model")))
    path = request_for.model / "config.json"
    config = json.loads(path.read_text())
    write = healing._write

    def change(*arguments: Any) -> None:
        path.write_text(json.dumps(config | {"attention_scale": 2 * config["attention_scale"]}))
        write(*arguments)

    monkeypatch.setattr(healing, "_write", change)
    with pytest.raises(VerificationError, match="attention_scale differs"):
        heal(request_for)
    assert not request_for.out.exists()


def test_the_curve_of_an_earlier_healing_is_not_carried_over(request_for: HealRequest, tmp_path: Path) -> None:
    request_for = replace(request_for, model=Path(shutil.copytree(request_for.model, tmp_path / "model")))
    for name in ("loss.jsonl", "loss.png"):
        (request_for.model / name).write_text("of another run")
    heal(request_for)
    assert not [name for name in ("loss.jsonl", "loss.png") if (request_for.out / name).exists()]


def test_gradients_are_taken_on_every_text(
    request_for: HealRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("".join(f"{i} other words than those, {i % 5} of them.\n" for i in range(400)))
    seen: list[torch.Tensor] = []
    metrics = healing.output_metrics

    def kept(teacher: Any, contexts: torch.Tensor, **options: Any) -> Any:
        seen.append(contexts)
        return metrics(teacher, contexts, **options)

    monkeypatch.setattr(healing, "output_metrics", kept)
    settings = replace(request_for.layers, metric="fisher", steps=2)
    wanted = replace(request_for, texts=(*request_for.texts, str(other)), layers=settings)
    heal(wanted)
    _, tokenizer = load_for_evaluation(wanted.teacher, torch.float32)
    text = healing.text_of(wanted, tokenizer)
    rows = [tuple(row) for row in text.train.tolist()]
    places = [rows.index(tuple(row)) for row in seen[0].tolist()]
    assert len(set(places)) == len(places)
    half = len(rows) // 2
    assert abs(sum(place < half for place in places) - len(places) / 2) <= 1

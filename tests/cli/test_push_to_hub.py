"""`--push-to-hub` of convert, heal and export: asked about before the work, and sent once the folder is whole."""

from __future__ import annotations

import inspect
import json
import shlex
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from mla_convert import api
from mla_convert.cli import run
from mla_convert.errors import FormatError, HubError, OutputError, UsageError, VerificationError
from tests.cli.conftest import Answer
from tests.hub_stub import READER, WRITER, Hub, Repo

REPO = "acme/tiny-mla"
WRITERS = ("convert", "heal", "export")
LICENCE = "Do as you like.\n"
MEASURED = {"text": "a.txt", "context": 64, "tokens": 640, "dtype": "float32", "perplexity": 34.5678}

Write = Callable[..., Answer]


@pytest.fixture(scope="session")
def model(tiny_folder, text_file, tmp_path_factory) -> Path:
    """A conversion that every target takes, as one of a licensed model on the hub whose perplexity was measured."""
    out = tmp_path_factory.mktemp("pushed") / "mla"
    text = ["--calibration", str(text_file), "--calibration-tokens", "1024"]
    assert run(["convert", str(tiny_folder), str(out), "--cache", "1", "--recipe", "stock", *text, "--json"]) == 0
    record = json.loads((out / "conversion.json").read_text())
    record["source"] |= {"kind": "hub", "ref": "acme/tiny-llama", "licence": {"license": "apache-2.0"}}
    record["measurements"] = [MEASURED]
    (out / "conversion.json").write_text(json.dumps(record))
    (out / "LICENSE").write_text(LICENCE)
    return out


@pytest.fixture
def write(cli, tiny_folder, model, text_file) -> Write:
    """Run a command that writes a folder, quickly, with options besides."""

    def call(command: str, out: Path, *options: object, of: Path = model) -> Answer:
        if command == "convert":
            text = ("--calibration", text_file, "--calibration-tokens", 256, "--recipe", "forward")
            return cli(command, tiny_folder, out, "--cache", 0.5, *text, *options)
        if command == "heal":
            text = ("--text", text_file, "--tokens", 1024, "--context", 64, "--layer-steps", 2)
            return cli(command, of, out, "--teacher", tiny_folder, *text, *options)
        return cli(command, of, out, "--target", "transformers", "--no-verify", *options)

    return call


def _there(hub: Hub) -> dict[str, bytes]:
    return {name: file for name, file in hub.repos[REPO].branches["main"].items() if name != ".gitattributes"}


def _here(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _card(text: str | bytes) -> tuple[str, Any]:
    """A card's text and its metadata, as the hub's client reads them."""
    card = ModelCard(text if isinstance(text, str) else text.decode(), ignore_metadata_errors=False)
    return card.text, card.data


@pytest.mark.parametrize("command", WRITERS)
def test_what_was_written_is_sent_whole(command: str, write: Write, hub: Hub, tmp_path: Path) -> None:
    out = tmp_path / "sent"
    found = write(command, out, "--push-to-hub", REPO, "--private", "--token", WRITER, "--json").json()
    assert _there(hub) == _here(out)
    assert hub.repos[REPO].private
    assert (found["out"], found["pushed"]["commit"]) == (str(out), hub.repos[REPO].heads["main"])


@pytest.mark.parametrize("command", WRITERS)
def test_a_reader_is_told_where_it_is(command: str, write: Write, hub: Hub, tmp_path: Path) -> None:
    answer = write(command, tmp_path / "sent", "--push-to-hub", REPO, "--token", WRITER)
    assert f"{hub.url}/{REPO} (main, public)" in answer.out


def test_the_card_of_a_healed_model_names_its_base_and_licence(write: Write, hub: Hub, tmp_path: Path) -> None:
    assert write("heal", tmp_path / "sent", "--push-to-hub", REPO, "--token", WRITER).code == 0
    text, data = _card(_there(hub)["README.md"])
    assert (data.base_model, data.base_model_relation) == ("acme/tiny-llama", "finetune")
    assert data.license == "apache-2.0"
    assert data.eval_results is None  # measured before the weights were trained
    assert "Healed layer by layer" in text
    assert _there(hub)["LICENSE"].decode() == LICENCE


@pytest.mark.parametrize(
    ("target", "dtype", "relation", "library", "said", "weights"),
    [
        ("transformers", "float32", "finetune", "transformers", "trust_remote_code=True", "model.safetensors"),
        ("vllm", "float32", "finetune", "transformers", "Exported for vllm", "model.safetensors"),
        ("sglang", "bfloat16", "finetune", "transformers", "`DeepseekV3ForCausalLM`", "model.safetensors"),
        ("gguf", "float32", "finetune", "gguf", "llama.cpp", "model.gguf"),
        ("gguf", "bfloat16", "finetune", "gguf", "llama.cpp", "model.gguf"),
    ],
)
def test_the_card_of_each_export_is_that_of_what_was_written(
    target, dtype, relation, library, said, weights, cli, hub: Hub, model: Path, tmp_path: Path
) -> None:
    if target == "gguf":
        pytest.importorskip("gguf")
    out = tmp_path / "sent"
    how = ("--target", target, "--dtype", dtype, "--no-verify", "--push-to-hub", REPO, "--token", WRITER)
    answer = cli("export", model, out, *how)
    assert answer.code == 0, answer.err
    assert _there(hub) == _here(out)
    assert weights in _there(hub)
    assert _there(hub)["LICENSE"].decode() == LICENCE
    text, data = _card(_there(hub)["README.md"])
    assert (data.base_model, data.base_model_relation) == ("acme/tiny-llama", relation)
    assert (data.license, data.library_name) == ("apache-2.0", library)
    assert said in text
    # Figures stand in the metadata only where these weights are what was measured.
    if dtype == "float32":
        assert [row.metric_value for row in data.eval_results or ()] == [MEASURED["perplexity"]]
        assert "Not measured" not in text
    else:
        assert data.eval_results is None
        assert f"weights in float32, before they were written in {dtype}" in text
        assert "34.568" in text


def test_an_export_that_rounds_is_measured_on_its_own(cli, model, tiny_folder, text_file, tmp_path) -> None:
    out = tmp_path / "out"
    assert cli("export", model, out, "--target", "transformers", "--dtype", "bfloat16", "--no-verify").code == 0
    text = ("--text", text_file, "--context", 32, "--max-tokens", 256)
    found = cli("evaluate", out, "--against", tiny_folder, "--record", *text, "--json").json()
    _, data = _card((out / "README.md").read_text())
    assert [row.metric_value for row in data.eval_results or ()] == [pytest.approx(found["perplexity"])]


def _work_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every long work fail the test."""
    for name in ("complete.convert_and_heal", "heal.healing.heal", "export.exporting.export_model"):
        monkeypatch.setattr(f"mla_convert.{name}", lambda *_, **__: pytest.fail("the work was begun"))


@pytest.mark.parametrize("command", WRITERS)
@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        (("--push-to-hub", "tiny-mla", "--token", WRITER), UsageError, "owner/name"),
        (("--push-to-hub", "acme/ti ny", "--token", WRITER), UsageError, "cannot name a repository"),
        (("--private",), UsageError, "without --push-to-hub"),
        (("--push-to-hub", REPO), HubError, "no access token"),
        (("--push-to-hub", REPO, "--token", READER), HubError, "may not write"),
    ],
)
def test_what_cannot_be_sent_is_refused_before_any_work(
    command, options, kind, said, write: Write, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _work_fails(monkeypatch)
    answer = write(command, tmp_path / "out", *options)
    assert answer.code == kind.exit_code, answer.err
    assert said in answer.err
    assert hub.repos == {}
    assert kind is HubError or hub.requests == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", WRITERS)
def test_a_repository_with_files_is_refused_before_any_work(
    command: str, write: Write, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _work_fails(monkeypatch)
    hub.repos[REPO] = Repo(private=False)
    hub.repos[REPO].branches["main"]["config.json"] = b"{}"
    answer = write(command, tmp_path / "out", "--push-to-hub", REPO, "--token", WRITER)
    assert answer.code == HubError.exit_code
    assert "holds 1 files already" in answer.err
    assert _there(hub) == {"config.json": b"{}"}


@pytest.mark.parametrize("command", WRITERS)
def test_no_repository_is_made_for_an_output_that_is_there(command: str, write: Write, hub: Hub, tmp_path) -> None:
    (tmp_path / "out").mkdir()
    answer = write(command, tmp_path / "out", "--push-to-hub", REPO, "--token", WRITER)
    assert answer.code == OutputError.exit_code
    assert hub.requests == []


def test_no_repository_is_made_for_what_cannot_be_healed_or_exported(
    write: Write, hub: Hub, tiny_folder: Path, tmp_path: Path
) -> None:
    push = ("--push-to-hub", REPO, "--token", WRITER)
    assert write("heal", tmp_path / "out", *push, of=tiny_folder).code == FormatError.exit_code
    assert write("export", tmp_path / "out", "--kv-rank", 1, *push).code == FormatError.exit_code
    assert write("export", tmp_path / "out", "--max-shard-size", "0", *push).code == UsageError.exit_code
    assert hub.requests == []


def test_a_dry_run_checks_the_name_and_makes_no_request(write: Write, hub: Hub, tmp_path: Path) -> None:
    for command in ("convert", "export"):
        assert write(command, tmp_path / "out", "--dry-run", "--push-to-hub", REPO).code == 0
        assert write(command, tmp_path / "out", "--dry-run", "--push-to-hub", "x").code == UsageError.exit_code
    assert hub.requests == []


@pytest.mark.parametrize("command", WRITERS)
def test_an_upload_that_fails_leaves_the_folder_and_says_how_to_send_it(
    command: str, write: Write, cli, hub: Hub, tmp_path: Path
) -> None:
    assert write(command, tmp_path / "first").code == 0
    weights = (tmp_path / "first" / "model.safetensors").read_bytes()  # the same commands write the same bytes
    hub.refuse_lfs = {sha256(weights).hexdigest()}
    out = tmp_path / "my out"
    failed = write(command, out, "--push-to-hub", REPO, "--token", WRITER)
    assert failed.code == HubError.exit_code
    message, remedy = failed.err.splitlines()
    assert message.startswith(f"error: {out} is written, but ")
    assert WRITER not in failed.err
    assert "the same command" not in failed.err  # which would find the folder in its way
    assert _there(hub) == {}
    hub.refuse_lfs.clear()
    later = shlex.split(remedy.partition("send it: mla-convert ")[2])
    assert cli(*later, "--token", WRITER).code == 0
    assert _there(hub) == _here(out)
    assert _there(hub)["model.safetensors"] == weights


@pytest.mark.parametrize("command", WRITERS)
def test_an_interrupted_upload_says_how_to_send_the_folder(
    command: str, write: Write, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("huggingface_hub.HfApi.create_commit", interrupt)
    answer = write(command, tmp_path / "out", "--push-to-hub", REPO, "--token", WRITER)
    assert answer.code == 130
    assert f"{tmp_path / 'out'} is written; to send it: mla-convert push {tmp_path / 'out'} {REPO}" in answer.err
    assert (tmp_path / "out" / "conversion.json").is_file()


def test_an_export_that_is_rejected_is_not_sent(cli, hub: Hub, model: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("mla_convert.export.verify.checking.passes", lambda *_: False)
    push = ("--push-to-hub", REPO, "--token", WRITER)
    answer = cli("export", model, tmp_path / "out", "--target", "transformers", *push)
    assert answer.code == VerificationError.exit_code
    assert _there(hub) == {}
    assert hub.uploads() == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of how the client sends files; commands hide it
def test_python_sends_too(hub: Hub, model: Path, tmp_path: Path) -> None:
    for name in WRITERS:
        parameters = inspect.signature(api.FUNCTIONS[name]).parameters
        assert {"push_to_hub", "private", "token"} <= set(parameters)
    copy = shutil.copytree(model, tmp_path / "mla")
    options: dict[str, Any] = {"target": "transformers", "verify": False, "push_to_hub": REPO, "token": WRITER}
    found = api.FUNCTIONS["export"](copy, tmp_path / "out", **options)
    assert found["pushed"]["commit"] == hub.repos[REPO].heads["main"]

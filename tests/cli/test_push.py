"""`mla-convert push` against a hub on this machine: the bytes that arrive, and every way in which it is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import yaml

from mla_convert.card import model_card
from mla_convert.decode.absorbed import ABSORBED_FILE
from mla_convert.errors import HubError, OutputError, UsageError
from mla_convert.hub import DERIVED
from mla_convert.record import SourceRecord, build_record
from tests.hub_stub import READER, WRITER, Hub, Repo
from tests.test_record import FACTS, MEASURED

REPO = "acme/tiny-mla"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as conversions write it, of two small weight files, with what must stay at home beside them."""
    folder = tmp_path / "mla"
    folder.mkdir()
    facts = replace(FACTS, source=replace(FACTS.source, licence={"license": "apache-2.0"}), measurements=(MEASURED,))
    _describe(folder, build_record(facts))
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    for i, shard in enumerate(shards):
        (folder / shard).write_bytes(bytes(range(256)) * (40 + i))
    index = {"weight_map": {"a": shards[0], "b": shards[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "mla"}')
    (folder / "empty.txt").write_bytes(b"")
    (folder / DERIVED[0]).write_bytes(b"made again anywhere")
    (folder / ".conversion.json.partial").write_text("half")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "modeling_mla.pyc").write_bytes(b"x")
    return folder


def _describe(folder: Path, record: dict) -> None:
    (folder / "conversion.json").write_text(json.dumps(record))
    (folder / "README.md").write_text(model_card(record), encoding="utf-8")


def _expected(folder: Path) -> dict[str, bytes]:
    """The files that should arrive, found without the code under test."""
    names = ("conversion.json", "README.md", "config.json", "empty.txt", "model.safetensors.index.json")
    return {name: (folder / name).read_bytes() for name in (*names, *(f.name for f in folder.glob("model-*")))}


def _there(hub: Hub, branch: str = "main") -> dict[str, bytes]:
    files = hub.repos[REPO].branches[branch]
    return {name: content for name, content in files.items() if name != ".gitattributes"}


def test_what_arrives_is_the_folder_in_one_commit(cli, hub, folder) -> None:
    found = cli("push", folder, REPO, "--private", "--token", WRITER, "--message", "First", "--json").json()
    assert _there(hub) == _expected(folder)
    assert hub.commits == ["First"]
    assert hub.repos[REPO].private
    assert found["private"]
    assert (found["url"], found["commit"]) == (f"{hub.url}/{REPO}", hub.repos[REPO].heads["main"])
    assert (found["files"], found["bytes"]) == (7, sum(map(len, _expected(folder).values())))


def test_a_dry_run_shows_files_and_metadata_and_makes_no_request(cli, hub, folder) -> None:
    found = cli("push", folder, REPO, "--dry-run", "--json").json()
    assert found["files"] == {name: len(content) for name, content in _expected(folder).items()}
    assert found["metadata"]["base_model"] == "acme/tiny-llama"
    assert found["metadata"]["license"] == "apache-2.0"
    assert found["metadata"]["model-index"][0]["results"][0]["metrics"][0]["value"] == MEASURED["perplexity"]
    assert found["notes"] == []
    shown = cli("push", folder, REPO, "--dry-run").out
    assert "model-00002-of-00002.safetensors" in shown
    assert yaml.safe_load(shown.split("card\n")[1])["base_model_relation"] == "finetune"
    assert hub.requests == []


def test_what_the_card_lacks_and_shows_is_said(cli, folder) -> None:
    _describe(folder, build_record(replace(FACTS, source=SourceRecord("./my/model", {}))))
    notes = " ".join(cli("push", folder, REPO, "--dry-run", "--json").json()["notes"])
    assert all(word in notes for word in ("base_model", "license", "./my/model"))


def test_an_interrupted_upload_shows_nothing_and_sends_only_the_rest(cli, hub, folder) -> None:
    second = (folder / "model-00002-of-00002.safetensors").read_bytes()
    hub.refuse_lfs = {sha256(second).hexdigest()}
    failed = cli("push", folder, REPO, "--token", WRITER)
    assert failed.code == HubError.exit_code
    assert "status 400" in failed.err
    assert "run the same command again" in failed.err
    assert len(failed.err.splitlines()) == 2
    assert _there(hub) == {}
    hub.refuse_lfs.clear()
    hub.requests.clear()
    assert cli("push", folder, REPO, "--token", WRITER).code == 0
    assert _there(hub) == _expected(folder)
    assert hub.uploads() == 1


def test_a_repository_with_files_is_replaced_only_when_asked(cli, hub, folder) -> None:
    hub.repos[REPO] = Repo(private=False)
    hub.repos[REPO].branches["main"] |= {"model.safetensors": b"of another model", "config.json": b"{}"}
    before = _there(hub)
    refused = cli("push", folder, REPO, "--token", WRITER)
    assert (refused.code, _there(hub)) == (HubError.exit_code, before)
    assert "holds 2 files" in refused.err
    found = cli("push", folder, REPO, "--token", WRITER, "--overwrite", "--json").json()
    assert found["deleted"] == ["model.safetensors"]
    assert _there(hub) == _expected(folder)


def test_a_branch_is_made_and_main_left_alone(cli, hub, folder) -> None:
    hub.repos[REPO] = Repo(private=False)
    hub.repos[REPO].branches["main"]["old.txt"] = b"old"
    assert cli("push", folder, REPO, "--token", WRITER, "--revision", "half").code == 0
    assert _there(hub, "half") == _expected(folder)
    assert _there(hub) == {"old.txt": b"old"}
    again = cli("push", folder, REPO, "--token", WRITER, "--revision", "half")
    assert again.code == HubError.exit_code


@pytest.mark.parametrize(
    ("token", "said"), [((), "no access token"), (READER, "may not write"), ("hf_unknown", "does not accept")]
)
def test_without_permission_nothing_is_sent(token, said: str, cli, hub, folder) -> None:
    answer = cli("push", folder, REPO, *(("--token", token) if token else ()))
    assert answer.code == HubError.exit_code
    assert said in answer.err
    assert "  try: " in answer.err
    assert hub.repos == {}
    assert hub.uploads() == 0


def test_private_does_not_publish_to_a_public_repository(cli, hub, folder) -> None:
    hub.repos[REPO] = Repo(private=False)
    answer = cli("push", folder, REPO, "--token", WRITER, "--private")
    assert answer.code == HubError.exit_code
    assert "is a public repository" in answer.err
    assert hub.uploads() == 0


def test_no_network_says_so(cli, hub, folder, monkeypatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # the discard port, where nothing listens
    answer = cli("push", folder, REPO, "--token", WRITER)
    assert answer.code == HubError.exit_code
    assert "check the network" in answer.err
    assert WRITER not in answer.err


def test_the_offline_switch_is_named(cli, hub, folder, monkeypatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    answer = cli("push", folder, REPO, "--token", WRITER)
    assert answer.code == HubError.exit_code
    assert "unset HF_HUB_OFFLINE" in answer.err
    assert hub.requests == []


def test_ctrl_c_says_how_to_go_on_and_shows_no_token(cli, hub, folder, monkeypatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("huggingface_hub.HfApi.create_commit", interrupt)
    answer = cli("push", folder, REPO, "--token", WRITER)
    assert answer.code == 130
    assert "is not sent again" in answer.err
    assert WRITER not in answer.err
    assert _there(hub) == {}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of how the client sends files; commands hide it
def test_somebody_elses_commit_meanwhile_is_not_overwritten(hub, folder) -> None:
    from mla_convert import hub as sending

    shipment = sending.prepare(folder, REPO)
    repository = sending.claim(REPO, token=WRITER, private=False)
    hub.repos[REPO].heads["main"] = "1" * 40
    with pytest.raises(HubError, match="somebody else"):
        sending.push(shipment, repository, token=WRITER)
    assert _there(hub) == {}


@pytest.mark.parametrize("repo", ["tiny-mla", "a/b/c", "acme/ti ny", "acme/-x", ""])
def test_a_repository_is_owner_and_name(repo: str, cli, folder) -> None:
    assert cli("push", folder, repo, "--dry-run").code == UsageError.exit_code


def _lose_shard(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def _break_card(folder: Path) -> None:
    (folder / "README.md").write_text("---\nmodel-index:\n- name: x\n  results: [{}]\n---\n")


def _lose_record(folder: Path) -> None:
    (folder / "conversion.json").unlink()


@pytest.mark.parametrize("damage", [_lose_shard, _break_card, _lose_record])
def test_a_folder_that_is_not_whole_is_not_sent(damage, cli, hub, folder) -> None:
    damage(folder)
    answer = cli("push", folder, REPO, "--token", WRITER)
    assert answer.code == OutputError.exit_code, answer.err
    assert hub.requests == []


def test_what_stays_at_home_is_what_absorb_writes() -> None:
    assert ABSORBED_FILE in DERIVED

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from mla_convert.errors import SourceError
from mla_convert.sources import open_source
from tests.tiny import save_source, tiny_llama


def _answer(monkeypatch: pytest.MonkeyPatch, answer: Path | BaseException) -> list[dict[str, Any]]:
    """Let the hub answer with a folder or an error; returns the list that calls are recorded in."""
    calls: list[dict[str, Any]] = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        calls.append({"repo_id": repo_id, **options})
        if isinstance(answer, BaseException):
            raise answer
        return str(answer)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def _made(kind: type[BaseException], message: str = "the hub says so") -> BaseException:
    """An error of the hub's client without the HTTP response that its constructor asks for."""
    error = kind.__new__(kind)
    error.args = (message,)
    return error


def test_a_hub_model_is_fetched_at_its_revision_with_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _answer(monkeypatch, save_source(tiny_llama(), tmp_path))
    source = open_source("owner/model-1.0", revision="abc123", token="secret")
    assert source.ref == "owner/model-1.0"
    assert source.spec.num_layers == 2
    (call,) = calls
    assert (call["repo_id"], call["revision"], call["token"]) == ("owner/model-1.0", "abc123", "secret")
    assert "*.safetensors" in call["allow_patterns"]
    assert not any(pattern.endswith((".bin", ".gguf", ".pth")) for pattern in call["allow_patterns"])


@pytest.mark.parametrize(
    ("raised", "message", "remedy"),
    [
        (errors.RepositoryNotFoundError, "neither a local path nor a model on the hub", "spelling"),
        (errors.GatedRepoError, "is gated", "ask for access"),
        (errors.RevisionNotFoundError, "at revision 'main'", "branch, tag or commit"),
        (errors.LocalEntryNotFoundError, "not in the local cache", "network"),
        (errors.OfflineModeIsEnabled, "not in the local cache", "HF_HUB_OFFLINE"),
        (ConnectionError, "cannot fetch", "network"),
    ],
)
def test_hub_errors_come_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, raised: type[BaseException], message: str, remedy: str
) -> None:
    _answer(monkeypatch, _made(raised))
    with pytest.raises(SourceError) as caught:
        open_source("owner/model", revision="main")
    assert message in caught.value.message
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    "ref",
    ["./nowhere", "/no/such/folder", "~/nothing-here", "models/", "a/b/c", "x.gguf", "C:\\models", "two words"],
)
def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(ref: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _answer(monkeypatch, AssertionError("the hub was asked"))
    with pytest.raises(SourceError, match="no file or folder"):
        open_source(ref)
    assert not calls


def test_a_local_folder_comes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _answer(monkeypatch, AssertionError("the hub was asked"))
    save_source(tiny_llama(), tmp_path / "owner" / "model")
    monkeypatch.chdir(tmp_path)
    assert open_source("owner/model").spec.family == "llama"
    assert not calls


def test_no_reference_at_all() -> None:
    with pytest.raises(SourceError, match="no source was named"):
        open_source(" ")


def test_an_unknown_builtin() -> None:
    with pytest.raises(SourceError, match="no built-in model 'gpt'"):
        open_source("builtin:gpt")

import errno
import resource
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from mla_convert.errors import HealError, OutputError
from mla_convert.heal import checkpoint
from mla_convert.heal.checkpoint import Checkpoints, fingerprint, weight_digests

FINGERPRINT = {"teacher": "source", "learning_rate": "0.001"}


@pytest.fixture
def kept(tmp_path) -> Checkpoints:
    return Checkpoints(tmp_path / "heal", FINGERPRINT)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fill_disk(monkeypatch, after: int) -> None:
    """From now on, files end after that many bytes, as on a full disk."""

    def save_file(tensors, path, metadata):
        Path(path).write_bytes(b"\0" * after)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", save_file)


def test_gives_back_what_was_saved_to_the_bit(kept):
    tensors = {"a/b.c": torch.randn(3, 5), "rng": torch.tensor([1, 255], dtype=torch.uint8), "n": torch.tensor(7.0)}
    state = {"loss": [0.1 + 0.2, 1e-300], "best": None}
    kept.save(7, tensors, state)
    found = kept.load()
    assert found is not None
    assert (found.step, found.state) == (7, state)
    assert found.tensors.keys() == tensors.keys()
    assert all(torch.equal(found.tensors[name], value) for name, value in tensors.items())


def test_there_is_none_at_first_and_only_the_last_afterwards(kept):
    assert kept.load() is None
    for step in (9, 10, 100):
        kept.save(step, {"x": torch.tensor(float(step))}, {})
    assert len(names(kept.folder)) == 1
    assert kept.load().step == 100


def test_a_full_disk_leaves_the_last_good_one(kept, monkeypatch):
    kept.save(1, {"x": torch.ones(4)}, {"n": 1})
    with monkeypatch.context() as patch:
        fill_disk(patch, after=10)
        with pytest.raises(OutputError, match="No space left") as raised:
            kept.save(2, {"x": torch.zeros(4)}, {"n": 2})
    assert "last good checkpoint" in raised.value.remedy
    assert kept.load().state == {"n": 1}
    assert len(names(kept.folder)) == 1
    kept.save(2, {"x": torch.zeros(4)}, {"n": 2})
    assert kept.load().step == 2


def test_a_write_that_really_fails_leaves_the_last_good_one(kept):
    kept.save(1, {"x": torch.ones(4)}, {})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OutputError, match="cannot be written"):
            kept.save(2, {"x": torch.ones(1 << 20)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(kept.folder) == ["step-0000000001.safetensors"]
    assert kept.load().step == 1


def test_a_damaged_file_gives_way_to_an_earlier_one(kept):
    kept.save(1, {"x": torch.ones(4)}, {})
    good = (kept.folder / names(kept.folder)[0]).read_bytes()
    (kept.folder / "step-0000000002.safetensors").write_bytes(good[:-3])
    assert kept.load().step == 1


def test_damaged_files_alone_are_an_error(kept):
    kept.save(1, {"x": torch.ones(4)}, {})
    path = kept.folder / names(kept.folder)[0]
    path.write_bytes(b"")
    with pytest.raises(HealError, match="can be read"):
        kept.load()


def test_what_a_killed_run_left_is_swept(kept):
    kept.folder.mkdir()
    (kept.folder / ".step-0000000001.safetensors.partial-1").write_bytes(b"half")
    assert kept.load() is None
    kept.save(2, {"x": torch.ones(1)}, {})
    assert names(kept.folder) == ["step-0000000002.safetensors"]


def test_another_run_is_told_what_differs(kept):
    kept.save(1, {"x": torch.ones(1)}, {})
    other = Checkpoints(kept.folder, {"teacher": "another", "learning_rate": "0.001", "rank": "8"})
    with pytest.raises(HealError) as raised:
        other.load()
    assert "teacher: source then, another now" in raised.value.message
    assert "rank: nothing then, 8 now" in raised.value.message
    assert "learning_rate" not in raised.value.message
    assert raised.value.remedy


def test_discard_removes_everything(kept):
    kept.save(1, {"x": torch.ones(1)}, {})
    kept.discard()
    assert not kept.folder.exists()
    kept.discard()


@dataclass(frozen=True)
class Settings:
    rate: float = 0.1
    top: int | None = None


def test_a_fingerprint_tells_weights_settings_texts_and_teacher_apart(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"one")
    base = {"model": weight_digests(folder), "teacher": "t", "settings": Settings(), "texts": {"a": "x"}}
    first = fingerprint(**base)
    assert first == fingerprint(**base)
    assert all(isinstance(value, str) for value in first.values())
    (folder / "model.safetensors").write_bytes(b"two")
    for changed in (
        {"model": weight_digests(folder)},
        {"teacher": "u"},
        {"settings": Settings(rate=0.2)},
        {"settings": Settings(top=1)},
        {"texts": {"a": "y"}},
        {"texts": {"a": "x", "b": "x"}},
        {"stage": "layers"},
    ):
        assert fingerprint(**base | changed) != first

"""The shard writer: what is written loads back equal, in shards of the size asked for, or not at all."""

from __future__ import annotations

import errno
import json
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mla_convert.errors import OutputError, UsageError
from mla_convert.export.shards import ShardWriter, parse_size


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (4, 5), "b": (3,), "big": (40, 10), "c": (7, 2), "scalar": ()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _write(folder: Path, size: int | str, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    with ShardWriter(folder, size) as writer:
        for name, tensor in tensors:
            writer.add(name, tensor)


def _load_all(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("5GB", 5 * 10**9), ("200MB", 2 * 10**8), ("512MiB", 2**29), ("1.5 kb", 1500), ("77", 77), (77, 77)],
)
def test_sizes(text: int | str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "5XB", "-1GB", "0", 0, "five", "1e3", "nan"])
def test_bad_sizes_are_usage_errors(text: int | str) -> None:
    with pytest.raises(UsageError, match="shard size"):
        parse_size(text)


def test_single_shard_has_the_plain_name_and_no_index(tmp_path: Path) -> None:
    _write(tmp_path, "1GB", _tensors().items())
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    torch.testing.assert_close(_load_all(tmp_path), _tensors(), rtol=0, atol=0)


def test_tiny_shards_load_back_equal_and_respect_the_size(tmp_path: Path) -> None:
    limit = 150
    _write(tmp_path, limit, _tensors().items())
    torch.testing.assert_close(_load_all(tmp_path), _tensors(), rtol=0, atol=0)

    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in _tensors().values())
    assert set(index["weight_map"]) == set(_tensors())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    for name, file in index["weight_map"].items():
        held = load_file(tmp_path / file)
        assert name in held
        assert len(held) == 1 or sum(t.numel() * 4 for t in held.values()) <= limit
    assert len(load_file(tmp_path / index["weight_map"]["big"])) == 1


def test_no_tensor_is_kept(tmp_path: Path) -> None:
    kept: list[weakref.ref[torch.Tensor]] = []
    with ShardWriter(tmp_path, "1MB") as writer:
        for i in range(20):
            tensor = torch.full((100,), float(i))
            writer.add(f"{i}", tensor)
            kept.append(weakref.ref(tensor))
            del tensor
            assert all(reference() is None for reference in kept)
    assert float(_load_all(tmp_path)["19"][0]) == 19.0


@pytest.mark.parametrize("size", ["1GB", "150"])
def test_the_bytes_are_the_same_each_time(tmp_path: Path, size: str) -> None:
    folders = tmp_path / "one", tmp_path / "other"
    for folder in folders:
        folder.mkdir()
        _write(folder, size, _tensors().items())
    one, other = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
    assert one == other


def test_strided_shared_and_view_tensors_are_stored_by_value(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    with ShardWriter(tmp_path, "1MB") as writer:
        writer.add("transposed", base.T)
        writer.add("row", base[1])
        writer.add("same", base)
        writer.add("again", base)
    loaded = _load_all(tmp_path)
    assert loaded["transposed"].is_contiguous()
    torch.testing.assert_close(loaded["transposed"], base.T)
    torch.testing.assert_close(loaded["row"], base[1])
    torch.testing.assert_close(loaded["same"], loaded["again"])


def test_a_name_written_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'a' was written twice"):
        _write(tmp_path, 1, ((name, torch.zeros(2)) for name in "aba"))


def test_a_failing_block_leaves_no_file(tmp_path: Path) -> None:
    def interrupted() -> None:
        with ShardWriter(tmp_path, 8) as writer:
            writer.add("a", torch.zeros(4))
            writer.add("b", torch.zeros(4))
            assert list(tmp_path.iterdir())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(tmp_path.iterdir())


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow beyond 300 kB: to a writer what a full disk is, wherever the tests run."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("numbers", [10, 10_000, 1_000_000], ids=lambda numbers: f"{numbers} numbers a tensor")
def test_a_full_disk_is_an_output_error(tmp_path: Path, numbers: int) -> None:
    """Met when the tensor is written, when its shard is finished, or when the header takes its place."""
    with pytest.raises(OutputError, match="too large") as caught:
        _write(tmp_path, "1GB", ((f"{i}", torch.zeros(numbers)) for i in range(2000)))
    assert "disk space" in caught.value.remedy
    assert not list(tmp_path.iterdir())


def test_a_rename_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if "00002-of" in target.name:
            raise OSError(errno.EIO, "Input/output error")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OutputError, match="Input/output"):
        _write(tmp_path, 8, _tensors().items())
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="No such file"):
        _write(tmp_path / "absent", 8, [("a", torch.zeros(4))])

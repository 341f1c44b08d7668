"""One safetensors file written as its tensors come: what any reader finds in it, and what writing it takes."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mla_convert.shard_file import ShardFile

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random finite numbers in a dtype that normal_ may not know."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).add(0.5).to(dtype)


def written(path: Path, tensors: dict[str, torch.Tensor], **options: int) -> Path:
    file = ShardFile(path, **options)
    for name, tensor in tensors.items():
        file.write(name, tensor)
    file.finish()
    return path


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    plain = (one.dtype, one.shape) == (other.dtype, other.shape)
    return plain and torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


def check_layout(path: Path) -> dict[str, tuple[int, int]]:
    """Check the file against the format's description; return where each tensor lies in it."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    assert length % 8 == 0
    assert raw[8:9] == b"{"
    header = json.loads(raw[8 : 8 + length])
    assert raw[8 : 8 + length].rstrip(b" ").endswith(b"}")
    assert header.pop("__metadata__") == {"format": "pt"}
    spans = {name: tuple(entry["data_offsets"]) for name, entry in header.items()}
    end = 0
    for start, stop in sorted(spans.values()):
        assert start == end
        end = stop
    assert 8 + length + end == len(raw)
    sizes = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
    assert all(spans[name][0] % sizes.get(entry["dtype"], 1) == 0 for name, entry in header.items())
    return spans


@pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8], ids=str)
def test_it_holds_what_save_file_would(tmp_path: Path, dtype: torch.dtype) -> None:
    shapes = {"matrix": (3, 5), "scalar": (), "empty": (0, 4), "row": (7,), "ünïcode.weight": (2,)}
    tensors = {name: random(shape, dtype) for name, shape in shapes.items()}
    path = written(tmp_path / "mine", tensors)
    save_file(tensors, tmp_path / "theirs")
    check_layout(path)
    mine, theirs = load_file(path), load_file(tmp_path / "theirs")
    assert mine.keys() == theirs.keys()
    assert all(same_bytes(mine[name], theirs[name]) for name in theirs)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_tensors_lie_in_the_order_they_came_in(tmp_path: Path) -> None:
    spans = check_layout(written(tmp_path / "file", {name: random((4,), torch.float32) for name in "cab"}))
    assert sorted(spans, key=lambda name: spans[name]) == ["c", "a", "b"]


def test_dtypes_of_all_sizes_are_aligned(tmp_path: Path) -> None:
    kinds = (torch.float16, torch.float8_e5m2, torch.float64, torch.bfloat16, torch.float32, torch.float8_e4m3fn)
    tensors = {f"{i}": random((2 * i + 1,), kind, seed=i) for i, kind in enumerate(kinds)}
    path = written(tmp_path / "file", tensors)
    check_layout(path)
    loaded = load_file(path)
    assert all(same_bytes(loaded[name], tensor) for name, tensor in tensors.items())
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("room", [0, 8, 100, 4096])
def test_a_header_of_any_size_fits(tmp_path: Path, room: int) -> None:
    tensors = {f"layer.{i}.weight": random((5, 3), torch.bfloat16, seed=i) for i in range(20)}
    path = written(tmp_path / "file", tensors, header_room=room)
    check_layout(path)
    loaded = load_file(path)
    assert all(same_bytes(loaded[name], tensor) for name, tensor in tensors.items())
    assert list(tmp_path.iterdir()) == [path]


def test_a_header_that_outgrows_its_room_is_copied_in_blocks(tmp_path: Path) -> None:
    """Of more than one block, so that a block lost or taken twice would show."""
    tensors = {"a": random((3 << 20,), torch.float32), "b": random((5,), torch.float32)}
    path = written(tmp_path / "file", tensors, header_room=0)
    check_layout(path)
    assert same_bytes(load_file(path)["a"], tensors["a"])


@pytest.mark.parametrize("room", [1 << 12, 8])
def test_other_metadata_takes_the_place_of_the_frameworks_name(tmp_path: Path, room: int) -> None:
    file = ShardFile(tmp_path / "file", room)
    file.write("a", random((3,), torch.float32))
    file.write("b", random((3,), torch.float64))
    file.finish({"says": 'a "ü"', "and": "b"})
    with safe_open(tmp_path / "file", "pt") as opened:
        assert opened.metadata() == {"says": 'a "ü"', "and": "b"}
        assert torch.equal(opened.get_tensor("b"), random((3,), torch.float64))


@pytest.mark.parametrize("room", [1 << 12, 8])
def test_the_bytes_are_the_same_each_time(tmp_path: Path, room: int) -> None:
    tensors = {f"{i}": random((5, i), kind, seed=i) for i, kind in enumerate(FLOATS)}
    one, other = (written(tmp_path / name, tensors, header_room=room) for name in ("one", "other"))
    assert one.read_bytes() == other.read_bytes()


def test_what_is_not_a_float_is_refused(tmp_path: Path) -> None:
    file = ShardFile(tmp_path / "file")
    with pytest.raises(ValueError, match=r"'ids' is torch\.int64"):
        file.write("ids", torch.zeros(3, dtype=torch.int64))
    file.discard()
    assert not list(tmp_path.iterdir())


_PEAK = """
import sys
from pathlib import Path
import torch
from mla_convert.export.shards import ShardWriter
def peak():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10
torch.zeros(1 << 24).view(torch.uint8).numpy()
before = peak()
with ShardWriter(Path(sys.argv[1]), "1GB") as writer:
    for i in range(8):
        writer.add(str(i), torch.full((4096, 4096), float(i)))
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_no_more_than_a_tensor_is_in_memory(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, "-c", _PEAK, str(tmp_path)], capture_output=True, text=True, check=True)
    # Eight tensors of 64 MiB in one shard, beyond a first one that was made and let go before: no second one is held,
    # for which a quarter of one leaves no room.
    assert int(run.stdout) < 16 << 20
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert len(file.keys()) == 8
        assert float(file.get_slice("7")[4095, 4095]) == 7.0

"""A file of statistics: written and read a layer at a time, and refused at opening where it is not whole."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mla_convert.calibrate import statistics_file
from mla_convert.calibrate.statistics import (
    LayerStatistics,
    Statistics,
    StoredLayers,
    load_statistics,
    save_statistics,
)
from mla_convert.errors import StatisticsError
from mla_convert.sources.safetensors_reader import SafetensorsCheckpoint
from tests.calibrate.samples import PROVENANCE, layer, same


@pytest.fixture
def read_names(monkeypatch) -> list[str]:
    """The tensors that are read from files of statistics, in order."""
    names: list[str] = []
    read = SafetensorsCheckpoint.read

    def counted(self: SafetensorsCheckpoint, name: str) -> torch.Tensor:
        names.append(name)
        return read(self, name)

    monkeypatch.setattr(SafetensorsCheckpoint, "read", counted)
    return names


def test_opening_reads_no_layer_and_asking_for_one_reads_that_one(saved: Path, read_names: list[str]) -> None:
    opened = load_statistics(saved)
    assert (len(opened.layers), opened.provenance, read_names) == (2, PROVENANCE, [])
    assert same(opened.layers[1], layer(2))
    assert {name.partition(".")[0] for name in read_names} == {"1"}
    assert len(read_names) == len(set(read_names))
    assert same(opened.layers[-1], layer(2))
    assert [same(a, layer(seed)) for a, seed in zip(opened.layers[:], (1, 2), strict=True)] == [True, True]
    with pytest.raises(IndexError):
        opened.layers[2]


class Made(Sequence[LayerStatistics]):
    """Layers made when they are asked for, whose tensors are counted as long as they live."""

    def __init__(self, count: int) -> None:
        self.length, self.alive, self.most = count, 0, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        if index >= self.length:
            raise IndexError(index)
        made = layer(index)
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(made, self._gone)
        return made

    def _gone(self) -> None:
        self.alive -= 1


def test_writing_holds_one_layer_at_a_time(tmp_path: Path) -> None:
    layers = Made(5)
    save_statistics(Statistics(layers, PROVENANCE), tmp_path / "statistics")
    assert layers.most == 1
    read = load_statistics(tmp_path / "statistics")
    assert all(same(found, layer(seed)) for seed, found in enumerate(read.layers))
    assert same(read.layers[4], layer(4))


def test_a_file_is_copied_from_a_folder_of_layers(tmp_path: Path, read_names: list[str]) -> None:
    stored = StoredLayers(tmp_path / "layers", 3, PROVENANCE)
    for i in range(3):
        save_statistics(Statistics((layer(i),), PROVENANCE), stored.path(i))
        assert [stored.has(j) for j in range(3)] == [j <= i for j in range(3)]
    save_statistics(Statistics(stored, PROVENANCE), tmp_path / "statistics")
    assert len(read_names) == 3 * len(load_file(stored.path(0)))
    assert all(same(found, layer(i)) for i, found in enumerate(load_statistics(tmp_path / "statistics").layers))
    # one that is damaged meanwhile leaves nothing behind
    stored.path(2).write_bytes(b"half")
    with pytest.raises(StatisticsError, match=r"statistics\.00002"):
        save_statistics(Statistics(stored, PROVENANCE), tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["layers", "statistics"]


_PEAK = """
import sys
from pathlib import Path
import torch
from mla_convert.calibrate.statistics import LayerStatistics, Provenance, Statistics, load_statistics, save_statistics
from tests.calibrate.samples import PROVENANCE
def peak():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10
class Layers:
    def __len__(self):
        return 40
    def __getitem__(self, i):
        if i >= len(self):
            raise IndexError(i)
        key, attended, query, noise = (torch.full((512, 512), float(i), dtype=torch.float64) for _ in range(4))  # 2 MB
        head = torch.zeros(2, 2, dtype=torch.complex128)
        return LayerStatistics(1, key, attended, 1.0, query, head, head.real.clone(), noise, 1.0)
file = Path(sys.argv[1])
one = Layers()[0]
before = peak()
save_statistics(Statistics(Layers(), PROVENANCE), file)
total = 0.0
for layer in load_statistics(file).layers:
    total += float(layer.attended[0, 0])
assert total == sum(range(40))
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_neither_writing_nor_reading_holds_the_file(tmp_path: Path) -> None:
    file = tmp_path / "statistics"
    done = subprocess.run([sys.executable, "-c", _PEAK, str(file)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert file.stat().st_size > 320e6  # 40 layers of four sums of 2 MB
    assert int(done.stdout) < 60e6  # two layers, one read while the last is held, and what allocators keep


@pytest.mark.parametrize("room", [0, 4096])
def test_a_header_of_any_size_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    monkeypatch.setattr(statistics_file, "_ROOM", room)
    digests = {f"model-{i:05d}-of-00999.safetensors": "ab" * 32 for i in range(999)}
    kept = Statistics((layer(1),), replace(PROVENANCE, source_digests=digests, text_ref='"\n' * 20000))
    save_statistics(kept, tmp_path / "statistics")
    read = load_statistics(tmp_path / "statistics")
    assert read.provenance == kept.provenance
    assert same(read.layers[0], layer(1))


@pytest.mark.parametrize(("kept_bytes", "said"), [(-1000, "changed while it was read"), (None, "No such file")])
def test_a_file_that_changes_after_it_was_opened_is_not_read(saved: Path, kept_bytes: int | None, said: str) -> None:
    opened = load_statistics(saved)
    assert same(opened.layers[0], layer(1))
    if kept_bytes is None:
        saved.unlink()
    else:
        os.truncate(saved, saved.stat().st_size + kept_bytes)
    with pytest.raises(StatisticsError, match=r"statistics\.safetensors") as caught:
        opened.layers[1]
    assert said in caught.value.message
    assert "--save-statistics" in caught.value.remedy


def altered(file: Path, tensors: dict[str, torch.Tensor | None]) -> Path:
    """The file with some tensors replaced, added, or for None left out."""
    with safe_open(file, framework="pt") as opened:
        found = opened.metadata()
    merged = load_file(file) | tensors
    save_file({name: value for name, value in merged.items() if value is not None}, file, metadata=found)
    return file


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"2.attended": torch.ones(2, dtype=torch.float64)}, r"counts 2 layers and holds 2\.attended"),
        ({"-1.attended": torch.ones(2, dtype=torch.float64)}, r"holds -1\.attended"),
        ({"0.colour": torch.ones(2, dtype=torch.float64)}, "colour, which is no part"),
        ({"0.rotation": torch.ones(4, 3, dtype=torch.float64)}, "no complex numbers"),
        ({"1.query": torch.ones(4, 6, 6, dtype=torch.int64)}, "stored as I64"),
        (dict.fromkeys(("1.held_out.attended", "1.held_out.content")), "layer 1 lacks held_out"),
    ],
)
def test_tensors_that_are_not_those_of_statistics_are_refused_at_opening(saved: Path, tensors, said: str) -> None:
    with pytest.raises(StatisticsError, match=said):
        load_statistics(altered(saved, tensors))


def test_layers_that_hold_different_parts_are_refused_at_opening(tmp_path: Path) -> None:
    save_statistics(Statistics((layer(1), layer(2, held_out=False)), PROVENANCE), tmp_path / "statistics")
    with pytest.raises(StatisticsError, match=r"only one of the layers 0 and 1 holds held_out\.attended"):
        load_statistics(tmp_path / "statistics")

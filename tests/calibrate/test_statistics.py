"""Statistics add up, come back from their file as they were, and say so when a file is not theirs."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mla_convert.calibrate.statistics import (
    GradientStatistics,
    HeldOutStatistics,
    LayerStatistics,
    Statistics,
    load_statistics,
    merge,
    save_statistics,
)
from mla_convert.errors import StatisticsError
from mla_convert.shard_file import ShardFile
from mla_convert.sources import open_source
from tests.calibrate.samples import PROVENANCE, WIDTH, layer, same
from tests.tiny import save_source, tiny_llama


def test_merging_adds_every_sum() -> None:
    first, second = layer(1), layer(2)
    merged = merge(first, second)
    for field in fields(LayerStatistics):
        if field.name not in ("gradients", "held_out"):
            total = getattr(first, field.name) + getattr(second, field.name)
            assert same(getattr(merged, field.name), total), field.name
    assert merged.gradients is not None and first.gradients is not None and second.gradients is not None  # noqa: PT018
    for field in fields(GradientStatistics):
        one, other = getattr(first.gradients, field.name), getattr(second.gradients, field.name)
        expected = one if field.name == "constants" else one + other
        assert same(getattr(merged.gradients, field.name), expected), field.name
    for field in fields(HeldOutStatistics):
        total = getattr(first.held_out, field.name) + getattr(second.held_out, field.name)
        assert same(getattr(merged.held_out, field.name), total), field.name


def test_merging_does_not_depend_on_the_order_and_changes_nothing() -> None:
    first, second = layer(1), layer(2)
    assert same(merge(first, second), merge(second, first))
    assert same(first, layer(1))


def test_forward_statistics_merge_alone() -> None:
    merged = merge(layer(1, gradients=False), layer(2, gradients=False))
    assert merged.gradients is None
    assert merged.tokens == 63


def test_what_does_not_add_up_is_refused() -> None:
    with pytest.raises(ValueError, match="with and without gradients"):
        merge(layer(1), layer(2, gradients=False))
    with pytest.raises(ValueError, match="with and without held-out"):
        merge(layer(1), layer(2, held_out=False))
    other = layer(2)
    assert other.gradients is not None
    other = replace(other, gradients=replace(other.gradients, constants=-other.gradients.constants))
    with pytest.raises(ValueError, match="different constants"):
        merge(layer(1), other)


def test_means_are_sums_over_their_own_weights() -> None:
    statistics = layer(3)
    assert statistics.gradients is not None
    torch.testing.assert_close(statistics.plain_moment * 33, statistics.key_value)
    torch.testing.assert_close(statistics.attended_moment() * 3.1, statistics.attended)
    noisy = (statistics.attended / 3.1 + 0.5 * statistics.noise_attended / 3.2) / 1.5
    torch.testing.assert_close(statistics.attended_moment(0.5), noisy)
    silent = replace(statistics, noise_attended=torch.zeros(WIDTH, WIDTH, dtype=torch.float64), noise_weight=0.0)
    torch.testing.assert_close(silent.attended_moment(0.5), statistics.attended_moment())
    torch.testing.assert_close(statistics.mean_rotation * statistics.query_energy, statistics.rotation)
    torch.testing.assert_close(statistics.gradients.pair_moment * 13, statistics.gradients.pairs)
    torch.testing.assert_close(statistics.gradients.content_moment * 23, statistics.gradients.content)
    assert statistics.held_out is not None
    torch.testing.assert_close(statistics.held_out.attended_moment * 3.3, statistics.held_out.attended)
    torch.testing.assert_close(statistics.held_out.content_moment * 43, statistics.held_out.content)


def test_a_pair_without_energy_is_taken_not_to_turn() -> None:
    statistics = layer(3)
    energy, rotation = statistics.query_energy.clone(), statistics.rotation.clone()
    energy[1, 2], rotation[1, 2] = 0.0, 0.0
    assert replace(statistics, query_energy=energy, rotation=rotation).mean_rotation[1, 2] == 1.0


@pytest.mark.parametrize(("gradients", "held_out"), [(False, False), (True, False), (True, True)])
def test_a_file_gives_back_every_bit(tmp_path: Path, gradients: bool, held_out: bool) -> None:
    layers = tuple(layer(seed, gradients=gradients, held_out=held_out) for seed in (1, 2))
    kept = Statistics(layers, replace(PROVENANCE, held_out=held_out))
    file = tmp_path / "new" / "statistics.safetensors"
    save_statistics(kept, file)
    read = load_statistics(file)
    assert read.provenance == kept.provenance
    assert len(read.layers) == 2
    assert all(same(a, b) for a, b in zip(read.layers, kept.layers, strict=True))
    assert [path.name for path in file.parent.iterdir()] == ["statistics.safetensors"]


def test_a_file_from_before_contexts_were_held_out_is_read(tmp_path: Path) -> None:
    file = tmp_path / "statistics.safetensors"
    kept = tuple(layer(seed, held_out=False) for seed in (1, 2))
    save_statistics(Statistics(kept, PROVENANCE), file)
    with safe_open(file, framework="pt") as opened:
        provenance = json.loads(opened.metadata()["provenance"])
        assert not [name for name in opened.keys() if "held_out" in name]  # noqa: SIM118 - not a mapping
    del provenance["held_out"]
    read = load_statistics(edited(file, provenance=json.dumps(provenance)))
    assert read.provenance == PROVENANCE
    assert all(same(a, b) for a, b in zip(read.layers, kept, strict=True))


@pytest.mark.parametrize("kept_bytes", [0, 4, 100, -1])
def test_a_truncated_file_is_refused(saved: Path, kept_bytes: int) -> None:
    saved.write_bytes(saved.read_bytes()[:kept_bytes])
    with pytest.raises(StatisticsError, match=r"statistics\.safetensors"):
        load_statistics(saved)


def test_garbage_a_folder_and_nothing_are_refused(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage"
    garbage.write_bytes(bytes(range(256)) * 40)
    for path in (garbage, tmp_path, tmp_path / "absent"):
        with pytest.raises(StatisticsError) as caught:
            load_statistics(path)
        assert caught.value.remedy


def edited(file: Path, *, without: str = "", **metadata: str) -> Path:
    """The file without one tensor, or with some of its metadata replaced."""
    with safe_open(file, framework="pt") as opened:
        found = opened.metadata() | metadata
    tensors = {name: value for name, value in load_file(file).items() if name != without}
    save_file(tensors, file, metadata=found)
    return file


def test_another_safetensors_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(2)}, file)
    with pytest.raises(StatisticsError, match="version"):
        load_statistics(file)


def test_another_version_is_refused(saved: Path) -> None:
    with pytest.raises(StatisticsError, match="version"):
        load_statistics(edited(saved, version="0"))


@pytest.mark.parametrize("metadata", [{"counts": "[]"}, {"counts": "{"}, {"provenance": '{"tokens": 3}'}])
def test_damaged_metadata_is_refused(saved: Path, metadata: dict[str, str]) -> None:
    with pytest.raises(StatisticsError):
        load_statistics(edited(saved, **metadata))


@pytest.mark.parametrize("name", ["1.attended", "0.gradients.pairs"])
def test_a_missing_tensor_is_refused(saved: Path, name: str) -> None:
    with pytest.raises(StatisticsError, match=name.rpartition(".")[2]):
        load_statistics(edited(saved, without=name))


@pytest.mark.parametrize("when", ["write", "finish"])
def test_a_failed_write_leaves_what_was_there(saved: Path, monkeypatch, when: str) -> None:
    before = saved.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ShardFile, when, fail)
    with pytest.raises(StatisticsError, match="No space left"):
        save_statistics(Statistics((layer(5),), PROVENANCE), saved)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_a_folder_in_the_way_is_an_error_of_the_statistics(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(StatisticsError, match="cannot be written"):
        save_statistics(Statistics((layer(5),), PROVENANCE), tmp_path / "taken")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_nothing_in_the_file_tells_of_the_machine(saved: Path) -> None:
    with safe_open(saved, framework="pt") as opened:
        metadata = opened.metadata()
    assert set(metadata) == {"version", "provenance", "counts"}
    assert json.loads(metadata["provenance"])["text_ref"] == "text.txt"
    assert str(saved.parent) not in json.dumps(metadata)


def test_statistics_of_another_source_or_without_gradients_are_refused(tmp_path: Path) -> None:
    spec = open_source(str(save_source(tiny_llama(), tmp_path / "source"))).spec
    kept = Statistics((layer(1), layer(2)), PROVENANCE)
    digests = dict(PROVENANCE.source_digests)
    kept.check(digests, spec, gradients=True)
    with pytest.raises(StatisticsError, match="another source"):
        kept.check(digests | {"model.safetensors": "ff"}, spec, gradients=False)
    with pytest.raises(StatisticsError, match="another source"):
        Statistics((layer(1),), PROVENANCE).check(digests, spec, gradients=False)
    forward = Statistics((layer(1, gradients=False), layer(2, gradients=False)), PROVENANCE)
    forward.check(digests, spec, gradients=False)
    with pytest.raises(StatisticsError, match="gradients"):
        forward.check(digests, spec, gradients=True)
    kept.check(digests, spec, gradients=True, held_out=True)
    whole = Statistics((layer(1, held_out=False), layer(2, held_out=False)), PROVENANCE)
    whole.check(digests, spec, gradients=True)
    with pytest.raises(StatisticsError, match="hold no contexts out") as caught:
        whole.check(digests, spec, gradients=True, held_out=True)
    assert "factorise.damping" in caught.value.remedy

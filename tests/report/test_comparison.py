"""Conversions beside each other."""

import re
from pathlib import Path

import pytest

from mla_convert.errors import SourceError
from mla_convert.report.comparison import COLUMNS, MEASURED_COLUMNS, compare_folders, comparison_page, rows
from tests.report.reading import read
from tests.report.samples import LOG_RATIO, healed, record, write_folder


@pytest.fixture
def folders(tmp_path) -> list[Path]:
    better = healed(record())
    better["measurements"][0]["log_ratio"] = 0.05
    made = {"plain": record(), "healed": better, "bare": record(measured=False)}
    return [write_folder(tmp_path / name, one) for name, one in made.items()]


def test_a_row_a_measurement_and_one_for_what_was_not_measured(folders) -> None:
    table = [dict(zip((*COLUMNS, *MEASURED_COLUMNS), row, strict=True)) for row in rows(compare_folders(folders))]
    assert [Path(row["model"]).name for row in table] == ["plain", "plain", "healed", "healed", "bare"]
    assert [row["ln ratio"] for row in table] == ["+0.1178", "+0.1861", "+0.0500", "+0.1861", "–"]
    assert [row["healing"] for row in table] == ["none", "none", "layers, global", "layers, global", "none"]
    assert {row["cache"] for row in table} == {"37.5%"}
    assert table[4]["text"] == "not measured"


def test_what_is_compared_in_plain_values(folders) -> None:
    plain = compare_folders(folders)[0].to_json()
    assert (plain["ratio"], plain["cached"], plain["bytes_per_token"]) == (0.375, 24.0, 6 * 24 * 2)
    assert [row["log_ratio"] for row in plain["measurements"]] == [LOG_RATIO, 0.1861]


def test_a_line_a_text_and_texts_of_one_name_apart(tmp_path, folders) -> None:
    other = record()
    other["measurements"][0]["text_sha256"] = "77" * 32
    svg = read(comparison_page(compare_folders([*folders, write_folder(tmp_path / "other", other)]))).all("svg")[0]
    legend = [one.text for one in svg.all("text") if "tokens in contexts" in one.text]
    assert sorted(re.sub(",.*", "", one) for one in legend) == ["news.txt", "wiki.txt", "wiki.txt"]


def test_the_page_without_any_measurement_says_how_to_get_one(folders) -> None:
    parsed = read(comparison_page(compare_folders(folders[2:])))
    assert parsed.all("svg") == []
    assert "--record" in parsed.all("section")[0].said()


def test_a_folder_that_is_no_conversion(tmp_path) -> None:
    with pytest.raises(SourceError, match=r"no conversion\.json"):
        compare_folders([tmp_path])

"""The commands that show conversions: report and compare."""

import json
import shutil

import pytest


@pytest.fixture
def folder(converted, tmp_path):
    """A copy of the converted folder, to be written to."""
    return shutil.copytree(converted, tmp_path / "mla")


def test_report_names_what_it_wrote(cli, folder) -> None:
    answer = cli("report", folder, "--json").json()
    assert answer["html"] == str(folder / "report.html")
    assert answer["bytes"] == (folder / "report.html").stat().st_size
    assert (folder / "report.json").is_file()
    said = cli("report", folder)
    assert (said.code, said.err) == (0, "")
    assert "report.html" in said.out


def test_a_conversion_has_a_report_with_every_layers_spectrum_and_slots(converted) -> None:
    data = json.loads((converted / "report.json").read_text())
    made = data["conversion"]["plan"]["layers"]
    errors = data["conversion"]["layer_errors"]
    for layer, shape, error in zip(data["details"]["layers"], made, errors, strict=True):
        assert sum(layer["slots"]) == shape["rope_dim"] / 2
        lost = dict(zip(layer["ranks"], layer["lost"], strict=True))
        assert lost[shape["kv_rank"]] == pytest.approx(error["truncated"], rel=1e-3)  # four digits are kept
    assert 'id="spectra"' in (converted / "report.html").read_text()


def test_a_recorded_evaluation_is_in_the_report(cli, folder, tiny_folder, text_file) -> None:
    options = ("--against", tiny_folder, "--text", text_file, "--context", 64, "--max-tokens", 256, "--record")
    measured = cli("evaluate", folder, *options, "--json").json()
    shown = json.loads((folder / "report.json").read_text())["conversion"]["measurements"]
    assert [row["log_ratio"] for row in shown] == [measured["log_ratio"]]
    assert f"{measured['log_ratio']:+.3f}" in (folder / "report.html").read_text()


def test_compare_shows_a_table_and_writes_a_page(cli, folder, converted, tmp_path) -> None:
    page = tmp_path / "compared.html"
    answer = cli("compare", folder, converted, "--html", page)
    assert answer.code == 0, answer.err
    assert answer.out.count("not measured") == 2
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_compare_in_json(cli, folder, converted) -> None:
    answer = cli("compare", folder, converted, "--json").json()
    assert [one["model"] for one in answer["models"]] == [str(folder), str(converted)]
    assert answer["html"] is None


def test_a_folder_that_is_no_conversion(cli, tmp_path) -> None:
    for command in ("report", "compare"):
        answer = cli(command, tmp_path)
        assert answer.code == 3
        assert answer.err.startswith("error: ")
        assert "  try: " in answer.err


def test_a_page_that_cannot_be_written(cli, converted, tmp_path) -> None:
    answer = cli("compare", converted, "--html", tmp_path / "missing" / "page.html")
    assert answer.code == 9
    assert "page.html" in answer.err


def test_a_healed_model_has_a_report_of_its_healing_and_keeps_its_spectra(
    cli, converted, tiny_folder, text_file, tmp_path
) -> None:
    options = ("--teacher", tiny_folder, "--text", text_file, "--stage", "all", "--tokens", 512, "--context", 32)
    assert cli("heal", converted, tmp_path / "healed", *options, "--layer-steps", 2).code == 0
    before, after = (json.loads((folder / "report.json").read_text()) for folder in (converted, tmp_path / "healed"))
    assert after["details"] == before["details"]
    assert after["conversion"]["healing"][0]["stage"] == "all"
    lines = [json.loads(line) for line in (tmp_path / "healed" / "loss.jsonl").read_text().splitlines()]
    trained = [[line["step"], line["loss"]] for line in lines if line["loss"] is not None]
    assert after["training_loss"] == trained  # as few steps as these are not thinned
    page = (tmp_path / "healed" / "report.html").read_text()
    assert 'id="healing-0-layers"' in page
    assert 'id="healing-0-global"' in page

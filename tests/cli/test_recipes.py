"""``mla-convert recipes``, and ``convert --set``."""

import json
from pathlib import Path

import yaml

from mla_convert.recipe import available_recipes, load_recipe

ROOT = Path(__file__).resolve().parent.parent.parent


def test_list_names_every_recipe(cli) -> None:
    answer = cli("recipes")
    assert answer.code == 0
    assert [line.split()[0] for line in answer.out.splitlines()[:-1]] == list(available_recipes())
    listed = cli("recipes", "list", "--json").json()["recipes"]
    assert {one["name"]: one["heals"] for one in listed}["best"] == ["layers", "global"]
    assert {one["name"]: one["calibration_tokens"] for one in listed}["exact"] is None


def test_show_prints_yaml_that_convert_takes(cli, tmp_path) -> None:
    shown = cli("recipes", "show", "fast").out
    assert str(ROOT / "recipes" / "fast.yaml") in shown.splitlines()[0]
    file = tmp_path / "mine.yaml"
    file.write_text(shown)
    assert load_recipe(file) == load_recipe("fast")
    as_json = cli("recipes", "show", str(file), "--json").json()
    assert as_json["recipe"] == yaml.safe_load(shown)
    assert as_json["file"] == str(file)


def test_wrong_names_and_arguments(cli) -> None:
    assert cli("recipes", "show", "defualt").err.splitlines()[1].startswith("  try: did you mean default?")
    assert cli("recipes", "show").code == 2
    assert cli("recipes", "list", "fast").code == 2
    assert cli("recipes", "delete").code == 2


def test_set_changes_the_recipe_and_is_recorded(cli, tiny_folder, text_file, tmp_path) -> None:
    out = tmp_path / "mla"
    text = ["--calibration", text_file, "--calibration-tokens", 512, "--quiet"]
    answer = cli("convert", tiny_folder, out, *text, "--set", "factorise.damping=0.3", "--set", "factorise.noise=0")
    assert answer.code == 0, answer.err
    said = json.loads((out / "conversion.json").read_text())["recipe"]
    assert (said["factorise"]["damping"], said["factorise"]["noise"]) == (0.3, 0.0)
    assert said["name"] == "default with factorise.damping=0.3, factorise.noise=0"
    card = (out / "README.md").read_text()
    assert "factorise.damping=0.3" in card


def test_a_wrong_set_writes_nothing(cli, tiny_folder, tmp_path) -> None:
    answer = cli("convert", tiny_folder, tmp_path / "mla", "--set", "factorise.dampin=1")
    assert answer.code == 7
    assert "did you mean factorise.damping?" in answer.err
    assert not (tmp_path / "mla").exists()

"""Recipes: faults name the file's line, unknown keys the right one, and single values are replaced from outside."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mla_convert.errors import RecipeError
from mla_convert.recipe import available_recipes, commented, load_recipe, read_recipe, recipe_file
from mla_convert.recipe.schema import fields_at, known_keys

TEXT = """\
# One line of comment.
name: mine
description: A recipe of one's own.
calibration: {tokens: 4096, context: 128}
decouple:
  mixing: complex
  damping: 0.01

factorise:
  # My own words.
  moment: attended
  metric: mixed
  damping: [0.1, 0.2]
"""


@pytest.fixture
def write(tmp_path: Path):
    def written(text: str) -> Path:
        file = tmp_path / "my.yaml"
        file.write_text(text, encoding="utf-8")
        return file

    return written


@pytest.mark.parametrize(
    ("old", "new", "line", "remedy"),
    [
        ("  metric: mixed", "  metrik: mixed", 12, "did you mean factorise.metric?"),
        ("  metric: mixed", "  rank: 3", 12, "factorise.moment, factorise.metric, factorise.damping"),
        ("  metric: mixed", "  slots: cost", 12, "did you mean decouple.slots?"),
        ("  damping: 0.01", "  damping: -1", 7, ""),
        ("[0.1, 0.2]", "[0.1, -0.2]", 13, ""),
        ("factorise:\n", "factorize:\n", 9, "did you mean factorise?"),
        ("tokens: 4096, ", "", 4, ""),
        ("decouple:\n  mixing: complex\n  damping: 0.01\n", "decouple: 3\n", 5, ""),
    ],
)
def test_a_fault_names_its_line_and_an_unknown_key_the_right_one(write, old, new, line, remedy) -> None:
    assert old in TEXT
    file = write(TEXT.replace(old, new))
    with pytest.raises(RecipeError) as caught:
        load_recipe(file)
    assert f"{file}:{line}: " in caught.value.message
    assert remedy in caught.value.remedy


def test_a_key_that_stands_twice_is_refused_with_both_lines(write) -> None:
    with pytest.raises(RecipeError, match=r"my\.yaml:13: factorise\.metric stands in line 12 already"):
        load_recipe(write(TEXT.replace("  damping: [0.1, 0.2]", "  metric: fisher")))


def test_faults_after_validation_have_a_line_too(write) -> None:
    text = TEXT.replace("  mixing: complex\n", "  mixing: complex\n  slots: all\n")
    with pytest.raises(RecipeError, match=r"my\.yaml:15: .*keeps all slots"):
        load_recipe(write(text + "allocation: {split: predicted}\n"))


def test_anchors_and_merges_are_followed(write) -> None:
    text = TEXT.replace("decouple:\n", "decouple: &it\n") + "refit: {<<: *it}\n"
    with pytest.raises(RecipeError, match=r"refit\.mixing: there is no such key"):
        load_recipe(write(text))


def test_numbers_are_read_as_yaml_1_2_writes_them(write) -> None:
    """PyYAML follows YAML 1.1, where 1e-3 is text; YAML 1.2 (section 10.3.2) has it as a number."""
    assert load_recipe(write(TEXT.replace("0.01", "1e-3"))).decouple.damping == 1e-3
    with pytest.raises(RecipeError, match="damping"):
        load_recipe(write(TEXT.replace("0.01", "'1e-3'")))


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("factorise.damping=0.2", ("factorise", "damping"), 0.2),
        ("factorise.damping=[0.1, 1]", ("factorise", "damping"), [0.1, 1.0]),
        ("decouple.rope_share=null", ("decouple", "rope_share"), None),
        ("calibration.tokens=2048", ("calibration", "tokens"), 2048),
        ("decouple.damping=5e-3", ("decouple", "damping"), 5e-3),
        ("refit.outputs=0.1", ("refit", "outputs"), 0.1),
        ("heal.global.passes=3", ("heal", "global", "passes"), 3),
        (" decouple.mixing = real", ("decouple", "mixing"), "real"),
    ],
)
def test_an_override_replaces_one_value_and_the_name_says_so(override, path, value) -> None:
    recipe = load_recipe("default", [override])
    found = recipe.to_dict()
    for key in path:
        found = found[key]
    assert found == value
    assert recipe.name == f"default with {override}"
    assert load_recipe("default").name == "default"


def test_of_several_overrides_the_last_one_counts_and_all_are_recorded() -> None:
    recipe = load_recipe("default", ["factorise.prior=0.5", "factorise.prior=0.25", "decouple.damping=1"])
    assert (recipe.factorise.prior, recipe.decouple.damping) == (0.25, 1.0)
    assert recipe.name == "default with factorise.prior=0.5, factorise.prior=0.25, decouple.damping=1"


def test_a_section_is_taken_out() -> None:
    assert load_recipe("balanced", ["heal=null"]).heal is None


@pytest.mark.parametrize(
    ("override", "message", "remedy"),
    [
        ("factorise.rank=3", "no key factorise.rank", "factorise.moment"),
        ("factorise.dampin=3", "no key factorise.dampin", "did you mean factorise.damping?"),
        ("damping=0.2", "no key damping", "did you mean decouple.damping or factorise.damping?"),
        ("heal.layers.rate=1", "no key heal.layers.rate", "heal.layers.learning_rate"),
        ("name=other", "renames a recipe", "recipes show"),
        ("factorise.damping", "names no value", "--set factorise.damping=0.2"),
        ("=3", "names no value", "KEY=VALUE"),
        ("factorise.damping=[0.1", "is not YAML", ""),
        ("factorise.damping=much", "--set factorise.damping=much: factorise.damping: ", ""),
        ("calibration.tokens=many", "--set calibration.tokens=many: calibration.tokens: ", ""),
        ("calibration=null", "--set calibration=null: the recipe uses calibration text", ""),
    ],
)
def test_a_wrong_override_is_named(override: str, message: str, remedy: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("default", [override])
    assert message in caught.value.message
    assert remedy in caught.value.remedy


@pytest.mark.parametrize("name", available_recipes())
def test_comments_change_nothing_and_stand_above_every_key(name: str) -> None:
    read = read_recipe(recipe_file(name))
    shown = commented(read)
    assert yaml.safe_load(shown) == yaml.safe_load(read.text)
    lines = shown.splitlines()
    keys = [i for i, line in enumerate(lines) if line.partition(":")[0].strip() in {k[-1] for k in known_keys()}]
    keys = [i for i in keys if not lines[i].startswith(("name:", "description:"))]
    assert keys
    assert all(lines[i - 1].lstrip().startswith("# ") for i in keys)


def test_a_files_own_comments_stay(write) -> None:
    shown = commented(read_recipe(write(TEXT)))
    assert "# One line of comment." in shown
    assert "  # My own words.\n  moment: attended" in shown
    assert yaml.safe_load(shown) == yaml.safe_load(TEXT)


def test_every_key_says_what_it_means() -> None:
    for key in known_keys():
        assert fields_at(key[:-1])[key[-1]].description, key

"""Recipes: those that ship are whole, and what is wrong with another is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from mla_convert.errors import RecipeError
from mla_convert.recipe import Recipe, available_recipes, load_recipe
from mla_convert.recipe import folder as module

RECIPES = Path(__file__).parent.parent / "recipes"


def content(**changes: Any) -> dict[str, Any]:
    """A valid recipe as YAML holds it; a dotted key replaces one value of a section, None removes a section."""
    made: dict[str, Any] = {
        "name": "mine",
        "description": "A recipe of one's own.",
        "calibration": {"tokens": 4096, "context": 128},
        "decouple": {
            "mixing": "real",
            "slots": "one_per_pair",
            "constants": "attention",
            "rope_share": 0.5,
            "damping": 0.25,
        },
        "factorise": {"moment": "plain", "metric": "mixed", "damping": 0.125, "prior": 0.5, "noise": 0.25},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            made[section] = made[section] | {name: value}
        elif value is None:
            del made[section]
        else:
            made[section] = value
    return made


@pytest.fixture
def written(tmp_path: Path):
    def write(text: object, name: str = "mine.yaml") -> Path:
        file = tmp_path / name
        file.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
        return file

    return write


def test_the_folders_recipes_are_the_available_ones() -> None:
    assert set(available_recipes()) == {path.stem for path in RECIPES.iterdir()}
    assert {"default", "exact", "transmla"} <= set(available_recipes())


@pytest.mark.parametrize("name", [path.stem for path in sorted(RECIPES.iterdir())])
def test_what_ships_loads_under_its_own_name(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.description
    said = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    assert recipe.to_dict() == {"calibration": None} | said


def test_exact_needs_no_calibration_and_forward_no_backward_pass() -> None:
    assert load_recipe("exact").calibration is None
    assert not load_recipe("forward").needs_gradients
    assert not load_recipe("transmla").needs_gradients


def test_transmla_is_the_method_without_this_projects_additions() -> None:
    """One slot a pair, real rotations, no constants, plain moments, one balancing factor (arXiv:2502.07864)."""
    recipe = load_recipe("transmla")
    assert (recipe.decouple.mixing, recipe.decouple.slots, recipe.decouple.constants) == ("real", "one_per_pair", "one")
    assert (recipe.factorise.moment, recipe.factorise.metric) == ("plain", "balanced")
    assert (recipe.factorise.prior, recipe.factorise.noise) == (0.0, 0.0)


def test_a_file_of_ones_own(written) -> None:
    recipe = load_recipe(written(content()))
    assert isinstance(recipe, Recipe)
    assert recipe.to_dict() == content()
    assert recipe.needs_gradients  # the mixed metric
    assert load_recipe(str(written(content(), "again.yml"))).to_dict() == content()


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({"factorise__metric": "fisher"}, True),
        ({"factorise__metric": "attention_output"}, False),
        ({"factorise__metric": "identity", "decouple__constants": "fisher"}, True),
        ({"factorise__metric": "balanced", "decouple__constants": "one"}, False),
    ],
)
def test_gradients_are_needed_by_what_uses_them(written, changes: dict[str, Any], needed: bool) -> None:
    assert load_recipe(written(content(**changes))).needs_gradients is needed


def test_several_dampings_are_chosen_from_by_gradients_on_contexts_held_out(written) -> None:
    forward = {"factorise__metric": "balanced", "factorise__damping": [0.1, 1]}
    recipe = load_recipe(written(content(**forward)))
    assert recipe.factorise.dampings == (0.1, 1.0)
    assert recipe.needs_held_out
    assert recipe.needs_gradients
    assert recipe.to_dict() == content(**forward)
    one = load_recipe(written(content(factorise__metric="balanced", factorise__damping=[0.1])))
    assert one.factorise.dampings == (0.1,)
    assert not one.needs_held_out
    assert not one.needs_gradients
    with pytest.raises(RecipeError, match="no calibration section"):
        load_recipe(written(content(calibration=None, **WEIGHTS_ONLY, factorise__damping=[0.1, 1.0])))


def test_refits_are_absent_unless_a_ridge_asks_for_them(written) -> None:
    assert "refit" not in load_recipe(written(content())).to_dict()
    empty = load_recipe(written(content(refit={})))
    assert empty.to_dict()["refit"] == {"tokens": 16384, "inputs": 0.0, "outputs": 0.0}
    assert not empty.refits
    for ridge in ("inputs", "outputs"):
        recipe = load_recipe(written(content(refit={"tokens": 512, ridge: 0.01})))
        assert recipe.refits
        assert not recipe.needs_held_out
    with pytest.raises(RecipeError, match="no calibration section"):
        load_recipe(written(content(calibration=None, **WEIGHTS_ONLY, refit={"outputs": 0.1})))


def test_allocation_is_absent_unless_it_is_asked_for(written) -> None:
    assert "allocation" not in load_recipe(written(content())).to_dict()
    assert not load_recipe(written(content(allocation={"step": 4}))).allocates
    said = {"split": "predicted", "layers": "waterfill", "step": 16, "moved_weight": 0.25, "spread": 32}
    recipe = load_recipe(written(content(allocation=said)))
    assert recipe.allocates
    assert recipe.to_dict() == content(allocation=said)
    for one in ({"split": "predicted"}, {"layers": "waterfill"}):
        assert load_recipe(written(content(allocation=one))).allocates


@pytest.mark.parametrize("allocation", [{"split": "predicted"}, {"layers": "waterfill"}])
def test_allocation_without_gradients_or_without_a_choice_is_refused(written, allocation: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="gradients"):
        load_recipe(written(content(allocation=allocation, factorise__metric="balanced")))
    with pytest.raises(RecipeError, match="all slots"):
        load_recipe(written(content(allocation=allocation, decouple__slots="all")))
    assert load_recipe(written(content(allocation={}, factorise__metric="balanced"))).allocation is not None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ranks": 3}, "ranks"),
        ({"allocation": {"step": 7}}, "allocation.step"),
        ({"allocation": {"step": 0}}, "allocation.step"),
        ({"allocation": {"spread": -8}}, "allocation.spread"),
        ({"allocation": {"moved_weight": -0.5}}, "allocation.moved_weight"),
        ({"allocation": {"split": "even"}}, "allocation.split"),
        ({"allocation": {"layers": "greedy"}}, "allocation.layers"),
        ({"allocation": {"ranks": [1]}}, "allocation.ranks"),
        ({"decouple__mixer": "real"}, "decouple.mixer"),
        ({"factorise__damping": -0.1}, "factorise.damping"),
        ({"factorise__prior": -1.0}, "factorise.prior"),
        ({"factorise__noise": -1.0}, "factorise.noise"),
        ({"factorise__damping": "much"}, "factorise.damping"),
        ({"factorise__damping": []}, "factorise.damping"),
        ({"refit": {"tokens": 0}}, "refit.tokens"),
        ({"refit": {"inputs": -0.1}}, "refit.inputs"),
        ({"refit": {"outputs": float("inf")}}, "refit.outputs"),
        ({"refit": {"outputs": "0.1"}}, "refit.outputs"),
        ({"refit": {"queries": 0.1}}, "refit.queries"),
        ({"factorise__damping": 10**400}, "factorise.damping"),
        ({"factorise__noise": float("inf")}, "factorise.noise"),
        ({"decouple__damping": float("inf")}, "decouple.damping"),
        ({"allocation": {"moved_weight": float("inf")}}, "allocation.moved_weight"),
        ({"heal": {}}, "heal"),
        ({"heal": {"layers": None, "global": None}}, "heal"),
        ({"heal": {"whole": {}}}, "heal.whole"),
        ({"heal": {"layers": {"tokens": 10**30}}}, "heal.layers.tokens"),
        ({"heal": {"layers": {"learning_rate": 0}}}, "heal.layers.learning_rate"),
        ({"heal": {"global": {"tokens": 1024, "batch": 3}}}, "heal"),
        ({"factorise__damping": [0.1, -0.1]}, "factorise.damping"),
        ({"factorise__damping": [[0.1]]}, "factorise.damping"),
        ({"factorise__damping": True}, "factorise.damping"),
        ({"factorise__damping": float("inf")}, "factorise.damping"),
        ({"factorise__metric": "hessian"}, "factorise.metric"),
        ({"decouple__mixing": "quaternion"}, "decouple.mixing"),
        ({"decouple__rope_share": 1.5}, "decouple.rope_share"),
        ({"decouple__slots": None}, "decouple.slots"),
        ({"calibration__tokens": 0}, "calibration.tokens"),
        ({"calibration__tokens": 1000.5}, "calibration.tokens"),
        ({"calibration__tokens": "4096"}, "calibration.tokens"),
        ({"calibration__context": 1}, "calibration.context"),
        ({"calibration": {"tokens": 100}}, "calibration.context"),
        ({"decouple": None}, "decouple"),
        ({"factorise": None}, "factorise"),
        ({"factorise": [1]}, "factorise"),
        ({"name": None}, "name"),
        ({"name": 3}, "name"),
        ({"description": None}, "description"),
    ],
    ids=str,
)
def test_a_faulty_key_is_named(written, changes: dict[str, Any], named: str) -> None:
    file = written(content(**changes))
    with pytest.raises(RecipeError) as caught:
        load_recipe(file)
    assert f"{named}: " in caught.value.message
    assert str(file) in caught.value.message


def test_all_faults_are_named_at_once(written) -> None:
    with pytest.raises(RecipeError, match=r"decouple\.mixing.*factorise\.metric"):
        load_recipe(written(content(decouple__mixing="x", factorise__metric="y")))


@pytest.mark.parametrize("text", ["a: [1, 2", "{", "a: b: c", "\tname: x"])
def test_what_is_not_yaml(written, text: str) -> None:
    with pytest.raises(RecipeError, match="is not YAML"):
        load_recipe(written(text))


@pytest.mark.parametrize("text", ["", "- 1\n- 2\n", "just words\n", "3\n"])
def test_yaml_that_is_no_recipe(written, text: str) -> None:
    with pytest.raises(RecipeError, match="does not validate"):
        load_recipe(written(text))


def test_yaml_cannot_make_python_objects(written) -> None:
    with pytest.raises(RecipeError, match="is not YAML"):
        load_recipe(written("name: !!python/object/apply:os.getcwd []\n"))


def test_an_absent_file_and_an_unknown_name(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(tmp_path / "absent.yaml")
    with pytest.raises(RecipeError, match="there is no recipe 'defualt'") as caught:
        load_recipe("defualt")
    for name in available_recipes():
        assert name in caught.value.remedy


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    file = tmp_path / "binary.yaml"
    file.write_bytes(b"\xff\xfe\x00name")
    with pytest.raises(RecipeError):
        load_recipe(file)


def test_a_name_does_not_reach_outside_the_folder() -> None:
    with pytest.raises(RecipeError):
        load_recipe("../recipes/default")


WEIGHTS_ONLY = {
    "decouple__slots": "all",
    "decouple__constants": "one",
    "factorise__moment": "weights",
    "factorise__metric": "identity",
}


def test_without_calibration_only_weights_may_be_used(written) -> None:
    assert load_recipe(written(content(calibration=None, **WEIGHTS_ONLY))).calibration is None
    for key, value in (
        ("decouple__slots", "cost"),
        ("decouple__constants", "attention"),
        ("factorise__moment", "plain"),
        ("factorise__metric", "fisher"),
    ):
        with pytest.raises(RecipeError, match="no calibration section"):
            load_recipe(written(content(calibration=None, **WEIGHTS_ONLY | {key: value})))


def test_an_installed_wheels_copy_comes_first(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "_recipes").mkdir()
    (tmp_path / "_recipes" / "only.yaml").write_text(yaml.safe_dump(content(name="only")))
    monkeypatch.setattr(module, "_PACKAGE", tmp_path)
    assert available_recipes() == ("only",)
    assert load_recipe("only").name == "only"


def test_healing_is_absent_unless_it_is_asked_for(written) -> None:
    assert "heal" not in load_recipe(written(content())).to_dict()
    layers = {"tokens": 1024, "steps": 3, "batch": 1, "learning_rate": 0.01}
    whole = {"tokens": 2048, "passes": 2, "batch": 2, "learning_rate": 0.02}
    for stages in ({"layers": layers}, {"global": whole}, {"layers": layers, "global": whole}):
        said = content(heal={"context": 64} | stages)
        assert load_recipe(written(said)).to_dict() == said


@pytest.mark.parametrize(
    ("text", "message"),
    [("name: [1,\nother: 2\n", "line 3, column 1"), ("[" * 3000, "is not YAML")],
    ids=["a bracket that stays open", "brackets without end"],
)
def test_what_is_not_yaml_is_said_in_one_line(tmp_path, text: str, message: str) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    with pytest.raises(RecipeError, match=message) as caught:
        load_recipe(file)
    assert "\n" not in caught.value.message

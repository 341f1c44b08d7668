"""A recipe from conversion to healing in one call: its stages, what an interruption leaves, what is refused early."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mla_convert import complete
from mla_convert.cli import run
from mla_convert.complete import convert_and_heal
from mla_convert.errors import OutputError, RecipeError, StatisticsError, TextError, UsageError
from mla_convert.evaluate.load import load_for_evaluation
from mla_convert.heal.checkpoint import Checkpoints
from mla_convert.heal.healing import HealRequest, text_of
from mla_convert.pipeline import ConvertRequest, convert
from mla_convert.recipe import load_recipe
from tests.tiny import save_source, tiny_llama

LAYERS = {"tokens": 512, "steps": 20, "batch": 2, "learning_rate": 0.003}
GLOBAL = {"tokens": 1024, "passes": 2, "batch": 2, "learning_rate": 0.003}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tiny_llama(), tmp_path_factory.mktemp("complete") / "source")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("complete-text") / "text.txt"
    file.write_text("".join(f"Line {i}: the cat sat on mat {i * i} and saw {i % 7} dogs.\n" for i in range(300)))
    return file


@pytest.fixture
def request_for(source: Path, text: Path, tmp_path: Path) -> Callable[..., ConvertRequest]:
    def make(heal: dict[str, Any] | None, **changes: Any) -> ConvertRequest:
        content = load_recipe("default").to_dict() | ({} if heal is None else {"heal": {"context": 64} | heal})
        file = tmp_path / "recipe.yaml"
        file.write_text(yaml.safe_dump(content))
        fields: dict[str, Any] = {
            "source": str(source),
            "out": tmp_path / "out",
            "recipe": str(file),
            "cache": 0.3,
            "calibration": (str(text),),
            "calibration_tokens": 1024,
        }
        return ConvertRequest(**fields | changes)

    return make


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_recipe_that_does_not_heal_is_a_conversion(request_for, tmp_path) -> None:
    convert_and_heal(request_for(None))
    convert(request_for(None, out=tmp_path / "plain"))
    assert weights(tmp_path / "out") == weights(tmp_path / "plain")
    assert names(tmp_path) == ["out", "plain", "recipe.yaml"]


def test_every_stage_brings_the_model_closer_to_its_source(request_for, tmp_path, source, text) -> None:
    converted = tmp_path / "converted"
    convert(request_for(None, out=converted))
    local, whole = tmp_path / "local", tmp_path / "whole"
    assert [entry["stage"] for entry in convert_and_heal(request_for({"layers": LAYERS}, out=local))["healing"]] == [
        "layers"
    ]
    record = convert_and_heal(request_for({"layers": LAYERS, "global": GLOBAL}, out=whole))
    assert [entry["stage"] for entry in record["healing"]] == ["layers", "global"]
    assert record["recipe"]["heal"]["global"]["tokens"] == 1024
    assert names(tmp_path) == ["converted", "local", "recipe.yaml", "whole"]

    teacher, tokenizer = load_for_evaluation(str(source), torch.float32)
    ids = torch.tensor([tokenizer(text.read_text(), add_special_tokens=False)["input_ids"][-640:]]).view(10, 64)

    def distance(folder: Path) -> float:
        model, _ = load_for_evaluation(str(folder), torch.float32)
        with torch.no_grad():
            log_q, log_p = (m(ids).logits.log_softmax(-1).flatten(0, 1) for m in (model, teacher))
        return torch.nn.functional.kl_div(log_q, log_p, reduction="batchmean", log_target=True).item()

    assert distance(whole) < distance(local) < distance(converted)


@pytest.mark.parametrize("stopped", ["layers", "global"])
def test_an_interrupted_run_goes_on_with_the_stage_that_was_interrupted(
    request_for, monkeypatch, tmp_path, stopped
) -> None:
    request = request_for({"layers": LAYERS, "global": GLOBAL})
    convert_and_heal(request_for({"layers": LAYERS, "global": GLOBAL}, out=tmp_path / "whole"))
    begun: list[str] = []
    heal = complete.heal

    def stop(wanted: HealRequest, progress: Any) -> Any:
        begun.append(wanted.stage)
        if wanted.stage == stopped:
            raise KeyboardInterrupt
        return heal(wanted, progress)

    monkeypatch.setattr(complete, "heal", stop)
    with pytest.raises(KeyboardInterrupt):
        convert_and_heal(request)
    assert names(tmp_path) == [".out.stages", "recipe.yaml", "whole"]

    def count(wanted: HealRequest, progress: Any) -> Any:
        begun.append(wanted.stage)
        return heal(wanted, progress)

    monkeypatch.setattr(complete, "heal", count)
    monkeypatch.setattr(complete, "convert", None)  # what is finished is not made again
    convert_and_heal(request)
    assert begun == (["layers", "layers", "global"] if stopped == "layers" else ["layers", "global", "global"])
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
    assert names(tmp_path) == ["out", "recipe.yaml", "whole"]


def test_stages_of_another_request_are_not_taken_up(request_for, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(complete, "heal", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        convert_and_heal(request_for({"layers": LAYERS}))
    first = weights(tmp_path / ".out.stages" / "converted")
    with pytest.raises(KeyboardInterrupt):
        convert_and_heal(request_for({"layers": LAYERS}, cache=0.6))
    assert weights(tmp_path / ".out.stages" / "converted") != first


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("this is to be refused before any long work")


@pytest.mark.parametrize(
    ("heal", "changes", "error"),
    [
        ({"global": GLOBAL | {"tokens": 10**6}}, {}, TextError),
        ({"global": GLOBAL | {"batch": 17}}, {}, RecipeError),
        ({}, {}, RecipeError),
        ({"layers": LAYERS}, {"statistics": Path("absent.safetensors")}, StatisticsError),
        ({"layers": LAYERS}, {"statistics": Path("absent.safetensors"), "calibration": ()}, UsageError),
        ({"layers": LAYERS}, {"format": "deepseek", "cache": None, "kv_rank": 20, "rope_dim": 8}, UsageError),
    ],
)
def test_what_cannot_be_healed_is_refused_before_it_is_converted(
    request_for, monkeypatch, tmp_path, heal, changes, error
) -> None:
    monkeypatch.setattr(complete, "convert", refuse)
    with pytest.raises(error):
        convert_and_heal(request_for(heal, **changes))
    assert names(tmp_path) == ["recipe.yaml"]


def test_an_output_that_exists_is_kept_unless_it_may_be_replaced(request_for, monkeypatch, tmp_path) -> None:
    convert(request_for(None))
    before = weights(tmp_path / "out")
    with monkeypatch.context() as patched:
        patched.setattr(complete, "convert", refuse)
        with pytest.raises(OutputError):
            convert_and_heal(request_for({"layers": LAYERS}))
    assert weights(tmp_path / "out") == before
    convert_and_heal(request_for({"layers": LAYERS}, overwrite=True))
    assert weights(tmp_path / "out") != before


def test_the_command_line_heals_where_its_recipe_does(request_for, tmp_path, source, text, capsys) -> None:
    request = request_for({"layers": LAYERS})
    options = [
        "--recipe",
        request.recipe,
        "--cache",
        0.3,
        "--calibration",
        text,
        "--calibration-tokens",
        1024,
        "--json",
    ]
    assert run([str(argument) for argument in ["convert", source, tmp_path / "out", *options]]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["record"]["healing"][0]["stage"] == "layers"
    assert printed["plan"]["heal"]["layers"]["steps"] == 20
    assert run([str(argument) for argument in ["convert", source, tmp_path / "no", *options[:-1], "--dry-run"]]) == 0
    assert "heals after the conversion: layers" in capsys.readouterr().out


def stopped_in_the_last_stage(request: ConvertRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run until a checkpoint of the last stage is written."""
    save = Checkpoints.save

    def save_and_stop(self: Checkpoints, *arguments: Any) -> None:
        save(self, *arguments)
        if self.folder.parent.name == ".out.heal":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "save", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            convert_and_heal(request)


def test_a_checkpoint_of_another_request_is_not_in_the_way(request_for, monkeypatch, tmp_path) -> None:
    stopped_in_the_last_stage(request_for({"layers": LAYERS}), monkeypatch)
    assert names(tmp_path) == [".out.heal", ".out.stages", "recipe.yaml"]
    convert_and_heal(request_for({"layers": LAYERS}, cache=0.6))
    assert names(tmp_path) == ["out", "recipe.yaml"]


def test_a_mistyped_command_loses_nothing(request_for, monkeypatch, tmp_path) -> None:
    request = request_for({"layers": LAYERS})
    stopped_in_the_last_stage(request, monkeypatch)
    with pytest.raises(StatisticsError):
        convert_and_heal(request_for({"layers": LAYERS}, statistics=tmp_path / "absent.safetensors"))
    monkeypatch.setattr(complete, "convert", refuse)
    convert_and_heal(request)


def test_a_second_run_on_the_same_output_is_refused(request_for, monkeypatch, tmp_path) -> None:
    def interfere(*_: Any) -> None:
        convert_and_heal(request_for({"layers": LAYERS}, cache=0.6))

    monkeypatch.setattr(complete, "heal", interfere)
    with pytest.raises(OutputError, match="another run is writing"):
        convert_and_heal(request_for({"layers": LAYERS}))


def test_no_stage_trains_on_what_another_checks_itself_on(request_for, monkeypatch) -> None:
    seen: list[HealRequest] = []
    heal = complete.heal
    monkeypatch.setattr(complete, "heal", lambda wanted, progress: seen.append(wanted) or heal(wanted, progress))
    convert_and_heal(request_for({"layers": LAYERS, "global": GLOBAL | {"tokens": 4096}}))
    _, tokenizer = load_for_evaluation(seen[0].teacher, torch.float32)
    texts = [text_of(wanted, tokenizer) for wanted in seen]
    trained = {tuple(row) for text in texts for row in text.train.tolist()}
    assert not trained & {tuple(row) for text in texts for row in text.held_out.tolist()}


def test_a_text_in_the_output_is_not_replaced_with_it(request_for, tmp_path, text) -> None:
    convert(request_for(None))
    inside = tmp_path / "out" / "text.txt"
    inside.write_text(text.read_text())
    with pytest.raises(UsageError, match="lies in the output folder"):
        convert_and_heal(request_for({"layers": LAYERS}, calibration=(str(inside),), overwrite=True))
    assert inside.exists()


def test_a_foreign_folder_of_the_stages_name_is_left_alone(request_for, tmp_path) -> None:
    foreign = tmp_path / ".out.stages" / "mine.txt"
    foreign.parent.mkdir()
    foreign.write_text("mine")
    with pytest.raises(OutputError, match="is in the way"):
        convert_and_heal(request_for({"layers": LAYERS}))
    assert foreign.read_text() == "mine"


def test_what_was_being_removed_when_it_was_killed_is_not_taken_up(request_for, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(complete.shutil, "rmtree", lambda path, **_: None)
    convert_and_heal(request_for({"layers": LAYERS}))
    monkeypatch.undo()
    (tmp_path / ".out.stages" / "converted" / "config.json").unlink()
    before = weights(tmp_path / "out")
    convert_and_heal(request_for({"layers": LAYERS}, overwrite=True))
    assert weights(tmp_path / "out") == before

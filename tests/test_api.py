"""The Python functions: each mirrors its command, takes what it takes, and runs on a tiny model."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import mla_convert
from mla_convert import api
from mla_convert.cli import COMMANDS, run
from mla_convert.errors import MLAConvertError, UsageError
from tests.tiny import save_source, tiny_llama

CONSOLE_ONLY = {"json", "quiet", "verbose"}
COMMANDS_BY_NAME = {command.__name__: command for command, _ in COMMANDS}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return save_source(tiny_llama(), tmp_path_factory.mktemp("api") / "tiny")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("api-text") / "text.txt"
    file.write_text("".join(f"Line {i}: the cat sat on mat {i * i} and saw {i % 7} dogs.\n" for i in range(300)))
    return file


@pytest.fixture(scope="module")
def converted(source, text, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("api-out") / "mla"
    found = mla_convert.convert(source, out, cache=0.5, calibration=text, calibration_tokens=1024)
    assert found["record"] == json.loads((out / "conversion.json").read_text())
    return out


def test_every_command_but_serve_is_a_function() -> None:
    assert set(api.FUNCTIONS) == set(COMMANDS_BY_NAME) - {"serve"}
    assert set(api.FUNCTIONS) | {"open_source"} <= set(dir(mla_convert))


@pytest.mark.parametrize("name", sorted(api.FUNCTIONS))
def test_a_function_has_the_commands_parameters_and_defaults(name: str) -> None:
    function = inspect.signature(getattr(mla_convert, name)).parameters
    command = {k: p for k, p in inspect.signature(COMMANDS_BY_NAME[name]).parameters.items() if k not in CONSOLE_ONLY}
    assert set(function) == {*command, "progress"}
    assert {k: function[k].default for k in command} == {k: p.default for k, p in command.items()}
    documentation = getattr(api, name).__doc__
    assert all(f"    {parameter}: " in documentation for parameter in function)


def test_importing_the_package_loads_nothing_heavy_and_names_are_steady() -> None:
    """Modules of the same name stay importable in every form, before and after the function is asked for."""
    script = """
import sys
import mla_convert
assert not {"torch", "transformers", "numpy", "typer", "yaml"} & set(sys.modules), sorted(sys.modules)
import mla_convert.heal.layers as layers
from mla_convert import convert, evaluate, heal, plan
from mla_convert.evaluate import perplexity
from mla_convert.plan import make_plan
import mla_convert.evaluate as package
assert package.perplexity is perplexity is mla_convert.evaluate.perplexity
assert mla_convert.plan.make_plan is make_plan
assert all(callable(one) for one in (convert, evaluate, heal, plan, package, perplexity))
assert layers.__name__ == "mla_convert.heal.layers"
try:
    mla_convert.nothing
except AttributeError as error:
    assert "nothing" in str(error)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_the_stub_is_what_the_commands_say() -> None:
    subprocess.run([sys.executable, "docs/generate_api.py", "--check"], cwd=Path(api.__file__).parents[1], check=True)


def test_functions_return_what_json_prints_and_print_nothing(source, capfd) -> None:
    assert run(["inspect", str(source), "--json"]) == 0
    printed = json.loads(capfd.readouterr().out)
    assert json.loads(json.dumps(mla_convert.inspect(source))) == printed
    assert capfd.readouterr() == ("", "")


def test_open_source_gives_the_layers(source) -> None:
    opened = mla_convert.open_source(str(source))
    assert opened.attention(0).w_k.shape == (2, 16, 64)


def test_recipes_and_plans(source) -> None:
    assert "fast" in [one["name"] for one in mla_convert.recipes()["recipes"]]
    assert mla_convert.recipes("show", "exact")["recipe"]["decouple"]["slots"] == "all"
    assert mla_convert.plan(source, context=64)["budgets"]


def test_convert_takes_overrides_and_reports_progress(source, text, tmp_path) -> None:
    stages = []
    found = mla_convert.convert(
        source,
        tmp_path / "mla",
        set="factorise.damping=0.3",
        calibration=[text],
        calibration_tokens=512,
        progress=lambda stage, done, total: stages.append(stage),
    )
    assert found["record"]["recipe"]["factorise"]["damping"] == 0.3
    assert stages


def test_evaluate_report_and_compare(converted, source, text) -> None:
    found = mla_convert.evaluate(converted, text=text, against=str(source), context=64, max_tokens=512, record=True)
    assert found["against"]["perplexity"] > 1
    assert found["tokens"] == 8 * 63
    assert Path(mla_convert.report(converted)["html"]).is_file()
    assert len(mla_convert.compare([converted, converted])["models"]) == 2


def test_absorb_and_generate(converted) -> None:
    assert mla_convert.absorb(converted)["layers"] == 2
    found = mla_convert.generate(converted, prompt=["the cat", "the dog"], max_new_tokens=4)
    assert [one["prompt"] for one in found["results"]] == ["the cat", "the dog"]
    assert found["absorbed_matrices"]


def test_export_and_verify(converted, tmp_path) -> None:
    out = tmp_path / "served"
    assert mla_convert.export(converted, out, target="transformers")["out"] == str(out)
    assert mla_convert.verify(out, engine="transformers")["passed"]


def test_heal(converted, source, text, tmp_path) -> None:
    found = mla_convert.heal(
        converted, tmp_path / "healed", teacher=str(source), text=text, tokens=512, context=32, layer_steps=2
    )
    assert len(found["layers"]) == 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"format": "onnx"}, "format='onnx'"),
        ({"calibration_tokens": 0}, "calibration_tokens=0"),
        ({"seed": 2**32}, "at most"),
        ({"recipe": None}, "recipe=None"),
        ({"cache": 2.0}, "--cache 2.0"),
        ({"set": ["factorise.rank=1"]}, "factorise.rank"),
    ],
)
def test_what_the_command_line_refuses_is_refused(source, tmp_path, arguments, named) -> None:
    with pytest.raises(MLAConvertError) as caught:
        mla_convert.convert(source, tmp_path / "mla", **arguments)
    assert named in caught.value.message
    assert not (tmp_path / "mla").exists()


def test_an_unknown_parameter_is_a_type_error_as_in_any_function(source, tmp_path) -> None:
    with pytest.raises(TypeError, match="ranks"):
        mla_convert.convert(source, tmp_path / "mla", ranks=3)


def test_a_failed_call_leaves_the_command_line_as_it_was(source, tmp_path, capfd) -> None:
    with pytest.raises(UsageError):
        mla_convert.convert(source, tmp_path / "mla", cache=2.0)
    assert run(["recipes"]) == 0
    assert "default" in capfd.readouterr().out

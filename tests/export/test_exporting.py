"""Exports: verified before they appear, kept aside when they answer otherwise, and recorded."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mla_convert.errors import FormatError, OutputError, SourceError, UsageError, VerificationError
from mla_convert.export import exporting
from mla_convert.export.converted import ConvertedModel, open_converted
from mla_convert.export.exporting import export_model, plan_exports
from mla_convert.export.targets.target import ExportOptions, ExportPlan
from mla_convert.export.targets.transformers import TRANSFORMERS
from mla_convert.export.verify.answers import Answers, Probe, compare_answers
from mla_convert.export.verify.checking import PROBE_FILE, check, load_reference
from mla_convert.export.verify.reference import passes, rounded
from tests.export.conversions import converted_folder
from tests.tiny import tiny_llama, tiny_mistral, tiny_qwen2

OPTIONS = ExportOptions()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ConvertedModel:
    return open_converted(converted_folder(tiny_qwen2(), tmp_path_factory.mktemp("converted")))


def _break(monkeypatch: pytest.MonkeyPatch, tensor: str) -> None:
    """Have the target write that tensor of the last layer with its sign changed."""
    write = type(TRANSFORMERS).write

    def broken(self, model, plan: ExportPlan, options, folder: Path, progress) -> None:
        write(self, model, plan, options, folder, progress)
        tensors = load_file(folder / "model.safetensors")
        name = f"model.layers.{model.config.num_hidden_layers - 1}.self_attn.{tensor}"
        tensors[name] = -tensors[name]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(type(TRANSFORMERS), "write", broken)


def test_an_export_is_verified_in_a_fresh_process_and_recorded(model: ConvertedModel, tmp_path: Path) -> None:
    done = export_model(model, tmp_path / "out", "transformers", OPTIONS)
    assert done.verdict is not None
    assert done.verdict.passed
    assert done.verdict.engine == "transformers"
    assert done.verdict.difference.agreed == done.verdict.difference.continuation == 64
    assert done.verdict.difference.max_logprob_difference <= 1e-4
    record = json.loads((tmp_path / "out" / "conversion.json").read_text())
    before = json.loads((model.folder / "conversion.json").read_text())
    assert record["export"]["verification"]["passed"] is True
    assert {key: value for key, value in record.items() if key != "export"} == before
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Exported for transformers" in card
    assert "64 of 64 greedy tokens alike; passed" in card
    # asked again later, from what lies in the folder alone
    again = check(tmp_path / "out", load_reference(tmp_path / "out"), "transformers")
    assert again.passed


@pytest.mark.parametrize("tensor", ["kv_b_proj.weight", "kv_a_proj_with_mqa.bias", "q_proj.bias"])
def test_a_broken_export_is_kept_aside(
    model: ConvertedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensor: str
) -> None:
    _break(monkeypatch, tensor)
    (tmp_path / "out.rejected").mkdir()  # of an earlier run
    with pytest.raises(VerificationError, match="does not answer as the model does") as caught:
        export_model(model, tmp_path / "out", "transformers", OPTIONS)
    assert "out.rejected-2" in caught.value.remedy
    record = json.loads((tmp_path / "out.rejected-2" / "conversion.json").read_text())
    assert record["export"]["verification"]["passed"] is False
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.rejected", "out.rejected-2"]


def test_a_rejected_export_leaves_the_one_it_would_have_replaced(
    model: ConvertedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_model(model, tmp_path / "out", "transformers", OPTIONS, verify=False)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    _break(monkeypatch, "o_proj.weight")
    with pytest.raises(VerificationError):
        export_model(model, tmp_path / "out", "transformers", OPTIONS, overwrite=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_nothing_is_asked_where_that_is_not_wanted_and_the_record_says_so(
    model: ConvertedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "check", None)
    done = export_model(model, tmp_path / "out", "transformers", OPTIONS, verify=False)
    assert done.verdict is None
    assert json.loads((tmp_path / "out" / "conversion.json").read_text())["export"]["verification"] is None
    assert "Nothing has verified" in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(SourceError, match=PROBE_FILE):
        load_reference(tmp_path / "out")


def test_what_an_engine_does_not_load_is_kept_aside_beside_what_a_link_leads_to(
    model: ConvertedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path, *_: object) -> None:
        raise VerificationError(f"transformers does not run {folder}: a reason", "file an issue")

    monkeypatch.setattr(exporting, "check", refuse)
    (tmp_path / "disk" / "real").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "real")
    with pytest.raises(VerificationError, match="a reason") as caught:
        export_model(model, tmp_path / "link", "transformers", OPTIONS, overwrite=True)
    kept = tmp_path / "disk" / "real.rejected"
    assert str(kept) in caught.value.message
    assert str(kept) in caught.value.remedy
    assert ".partial-" not in str(caught.value)
    assert json.loads((kept / "conversion.json").read_text())["export"]["verification"] is None
    assert (kept / "model.safetensors").is_file()
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["real", "real.rejected"]


def _copy(model: ConvertedModel, folder: Path) -> Path:
    return shutil.copytree(model.folder, folder, symlinks=True)


def test_an_export_does_not_replace_its_model(model: ConvertedModel, tmp_path: Path) -> None:
    copy = open_converted(_copy(model, tmp_path / "all" / "mla"))
    (tmp_path / "all" / "conversion.json").write_text("{}")
    (tmp_path / "link").symlink_to(copy.folder)
    for out in (copy.folder, tmp_path / "link", tmp_path / "all"):
        with pytest.raises(UsageError, match="does not replace"):
            export_model(copy, out, "transformers", OPTIONS, verify=False, overwrite=True)
    export_model(copy, copy.folder / "out", "transformers", OPTIONS, verify=False)
    assert open_converted(copy.folder).config.model_type == "mla_convert"


@pytest.mark.parametrize("record", [None, "{", "[]", "{}", '{"source": 3}'])
def test_a_record_that_no_card_can_be_made_from_is_found_before_a_file_is_begun(
    model: ConvertedModel, tmp_path: Path, record: str | None
) -> None:
    copy = open_converted(_copy(model, tmp_path / "mla"))
    (copy.folder / "conversion.json").unlink()
    if record is not None:
        (copy.folder / "conversion.json").write_text(record)
    with pytest.raises(SourceError, match=r"conversion\.json cannot be read"):
        export_model(copy, tmp_path / "out" / "deep", "transformers", OPTIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["mla"]


def test_an_interpreter_without_the_engine_and_a_damaged_tokenizer_are_found_before_a_file_is_begun(
    model: ConvertedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(TRANSFORMERS), "write", None)
    with pytest.raises(VerificationError, match="not installed in"):
        export_model(model, tmp_path / "out", "transformers", OPTIONS, python=tmp_path / "python")
    copy = open_converted(_copy(model, tmp_path / "mla"))
    state = json.loads((copy.folder / "tokenizer.json").read_text())
    (copy.folder / "tokenizer.json").write_text(json.dumps(state | {"model": {"type": "BPE", "vocab": {"a": "b"}}}))
    with pytest.raises(SourceError, match="no tokenizer can be loaded"):
        export_model(copy, tmp_path / "out", "transformers", OPTIONS)


def test_a_tokenizer_of_another_model_and_weights_that_are_no_numbers_are_not_the_engines_fault(
    model: ConvertedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "check", None)
    monkeypatch.setattr(exporting, "make_probe", lambda *_, **__: Probe((3, 288), 4))
    with pytest.raises(SourceError, match=r"not the model's.* 288 rows"):
        export_model(model, tmp_path / "out", "transformers", OPTIONS)
    monkeypatch.undo()
    folder = _copy(model, tmp_path / "mla")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"].fill_(math.nan)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError, match=r"model\.norm\.weight.* not a number"):
        export_model(open_converted(folder), tmp_path / "out", "transformers", replace(OPTIONS, dtype="bfloat16"))
    assert [path.name for path in tmp_path.iterdir()] == ["mla"]


def test_what_a_target_refuses_is_not_begun(model: ConvertedModel, tmp_path: Path) -> None:
    (plan,) = plan_exports(model, OPTIONS, "sglang")
    assert plan.form is None
    with pytest.raises(FormatError, match="bias"):
        export_model(model, tmp_path / "out", "sglang", OPTIONS)
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_stays(model: ConvertedModel, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    for overwrite in (False, True):
        with pytest.raises(OutputError):
            export_model(model, tmp_path / "out", "transformers", OPTIONS, overwrite=overwrite)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_what_cannot_look_through_a_window_is_asked_within_it(tmp_path: Path) -> None:
    model = open_converted(converted_folder(tiny_mistral(window=24), tmp_path))
    for target, positions in (("transformers", 256), ("vllm", 24)):
        export_model(model, tmp_path / target, target, replace(OPTIONS, form="custom"))
        asked = load_reference(tmp_path / target).probe
        assert len(asked.prompt) + asked.new_tokens <= positions
        assert len(asked.prompt) + asked.new_tokens >= min(positions, 128 + 64) - 1


def test_every_target_has_a_plan_for_every_model(model: ConvertedModel, tmp_path: Path) -> None:
    other = open_converted(converted_folder(tiny_llama(), tmp_path / "llama"))
    for one in (model, other):
        plans = plan_exports(one, OPTIONS)
        assert [plan.target for plan in plans] == ["transformers", "vllm", "sglang", "gguf"]
        for plan in plans:
            assert (plan.form is None) <= bool(plan.reasons)
            assert plan.form is None or plan.kv_rank >= max(shape.kv_rank for shape in one.shapes)


def test_differences_are_what_they_say() -> None:
    reference = Answers(torch.tensor([-1.0, -2.0]), (3, 4, 5), torch.log(torch.tensor([[0.5, 0.5], [0.25, 0.75]])))
    found = Answers(torch.tensor([-1.5, -2.0]), (3, 9, 5), torch.log(torch.tensor([[0.25, 0.75], [0.25, 0.75]])))
    difference = compare_answers(found, reference)
    assert difference.max_logprob_difference == pytest.approx(0.5)
    assert difference.mean_logprob_difference == pytest.approx(0.25)
    assert difference.kl == pytest.approx((0.5 * math.log(2) + 0.5 * math.log(2 / 3)) / 2)
    assert (difference.agreed, difference.continuation) == (1, 3)
    assert not passes(difference, 1.0, "float32")  # one token of the continuation differs
    assert passes(difference, 0.3, "bfloat16")
    assert not passes(difference, 0.2, "bfloat16")
    with pytest.raises(VerificationError, match="expected"):
        compare_answers(replace(found, logprobs=torch.zeros(3)), reference)
    with pytest.raises(VerificationError, match="not finite"):
        compare_answers(replace(found, logprobs=torch.tensor([-1.0, math.nan])), reference)


def test_rounding_is_as_coarse_as_the_dtype_is() -> None:
    weight = torch.randn(8, 70, generator=torch.Generator().manual_seed(0))
    for stored_as, largest in (("bfloat16", 2**-8), ("float16", 2**-11)):
        error = (rounded(weight, stored_as) / weight - 1).abs()
        assert largest / 8 < float(error.mean()) < float(error.max()) <= 1.01 * largest
    # one scale a block of 32: half a step of it, wherever the number lies
    error = (rounded(weight, "q8_0") - weight).abs()
    steps = torch.nn.functional.pad(weight, (0, 26)).unflatten(-1, (3, 32)).abs().amax(-1) / 127
    assert bool((error <= 0.51 * steps.repeat_interleave(32, 1)[:, :70]).all())
    assert float(error.mean()) > 0.2 * float(steps.mean())


def test_a_probe_keeps_within_the_positions() -> None:
    class Words:
        def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
            return {"input_ids": list(range(len(text)))}

    probe = exporting.make_probe(Words(), "x" * 10_000, positions=60)
    assert probe == Probe(tuple(range(40)), 20)
    assert len(exporting.make_probe(Words(), "x" * 10_000, positions=4096).prompt) == 128

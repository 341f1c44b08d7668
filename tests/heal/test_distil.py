"""Distillation of a converted tiny model: it learns, it touches what it may, and it stops when something is wrong."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_convert.errors import HealError, OutputError, TextError, UsageError
from mla_convert.heal import checkpoint
from mla_convert.heal.checkpoint import Checkpoints
from mla_convert.heal.data import HealingText
from mla_convert.heal.distil import DistilResult, DistilSettings, distil
from tests.heal.pair import TEACHER_SEED, healing_text_of, student_and_teacher
from tests.mla.native import VOCAB, native

FAST = DistilSettings(learning_rate=3e-3, batch_size=2, accumulate=2, evaluate_every=4, checkpoint_every=3)


def settings(**changes: Any) -> DistilSettings:
    return DistilSettings(**{**FAST.__dict__, **changes})


def run(text: HealingText | None = None, checkpoints: Checkpoints | None = None, **changes: Any) -> DistilResult:
    student, teacher = student_and_teacher()
    return distil(student, teacher, text or healing_text_of(), settings(**changes), checkpoints)


def snapshot(model: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def differing(model: Any, before: dict[str, Tensor]) -> set[str]:
    return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"parameters": "all"},
        {"hidden_weight": 0.5},
        {"temperature": 2.0},
        {"top_k": 8},
        {"bf16": True},
        {"gradient_checkpointing": True},
        {"weight_decay": 0.01, "warmup": 0.3},
    ],
    ids=str,
)
def test_the_student_comes_nearer_to_its_teacher_on_held_out_text(changes):
    result = run(**changes)
    held_out = result.held_out
    assert held_out[max(held_out)] < 0.97 * held_out[0]
    losses = [point.loss for point in result.curve if point.loss is not None]
    assert sum(losses[-4:]) < 0.97 * sum(losses[:4])
    assert result.tokens == len(losses) * 4 * 16


def test_nothing_is_lost_in_a_student_that_is_its_teacher():
    teacher = native(seed=TEACHER_SEED)
    result = distil(copy.deepcopy(teacher), teacher, healing_text_of(), FAST)
    # The minimum of the divergence: rounding of float32 log-probabilities is all that is there to follow.
    assert result.held_out[0] < 1e-6
    assert result.best_step == 0 or max(result.held_out.values()) < 1e-3


def test_the_first_loss_is_the_divergence_of_the_two_models():
    student, teacher = student_and_teacher()
    text = healing_text_of()
    result = distil(copy.deepcopy(student), teacher, text, FAST)
    with torch.no_grad():
        log_q, log_p = (m(text.train[text.order[:4]]).logits.log_softmax(-1).flatten(0, 1) for m in (student, teacher))
    expected = torch.nn.functional.kl_div(log_q, log_p, reduction="batchmean", log_target=True).item()
    assert result.curve[1].loss == pytest.approx(expected, rel=1e-5)


def test_accumulated_batches_are_one_large_batch():
    whole = run(batch_size=4, accumulate=1)
    parts = run(batch_size=1, accumulate=4)
    # float32 sums in another order, through a dozen AdamW steps: 1.2e-4 was seen
    assert [p.loss for p in parts.curve[1:]] == pytest.approx([p.loss for p in whole.curve[1:]], rel=5e-4)


def test_recomputed_activations_are_the_same():
    kept, recomputed = run(), run(gradient_checkpointing=True)
    assert [p.loss for p in recomputed.curve[1:]] == pytest.approx([p.loss for p in kept.curve[1:]], rel=1e-5)


def test_the_head_of_the_whole_vocabulary_on_disk_is_no_head(tmp_path):
    checkpoints = Checkpoints(tmp_path, {"teacher": "t"})
    cached, straight = run(checkpoints=checkpoints, top_k=VOCAB), run()
    assert [p.loss for p in cached.curve] == [p.loss for p in straight.curve]
    assert cached.held_out == straight.held_out
    assert len(list((tmp_path / "teacher").iterdir())) == 8 + 3  # every window once, however often it was read


@pytest.mark.parametrize("variant", ["plain", "biases", "tied"])
def test_mla_leaves_every_other_tensor_as_it_was(variant):
    student, teacher = student_and_teacher(variant)
    before = snapshot(student)
    result = distil(student, teacher, healing_text_of(), FAST)
    attention = {name for name in before if ".self_attn." in name}
    assert differing(student, before) == attention == set(result.weights)


@pytest.mark.parametrize("variant", ["plain", "tied"])
def test_all_trains_every_parameter(variant):
    student, teacher = student_and_teacher(variant)
    before = snapshot(student)
    result = distil(student, teacher, healing_text_of(), settings(parameters="all"))
    parameters = dict(student.named_parameters())
    assert differing(student, before) >= parameters.keys() == result.weights.keys()


def test_the_model_is_left_as_it_was_set_up():
    student, teacher = student_and_teacher()
    before = snapshot(teacher)
    state = torch.get_rng_state()
    distil(student, teacher, healing_text_of(), settings(gradient_checkpointing=True))
    assert all(p.requires_grad and p.grad is None for p in student.parameters())
    assert not student.training
    assert not any(getattr(module, "gradient_checkpointing", False) for module in student.modules())
    assert differing(teacher, before) == set()
    assert torch.equal(torch.get_rng_state(), state)


def test_the_weights_are_the_best_ones_and_a_run_that_gets_worse_stops():
    student, teacher = student_and_teacher()
    text = healing_text_of(passes=20)
    # A rate at which it overshoots; what it had at the start is better than anything after it.
    result = distil(student, teacher, text, settings(learning_rate=1.0, warmup=0.0, patience=2, clip=1e9))
    assert result.best_step == min(result.held_out, key=result.held_out.__getitem__)
    assert max(result.held_out) - result.best_step == 2 * 4
    assert max(result.held_out) < 40
    for name, parameter in student.named_parameters():
        if name in result.weights:
            assert torch.equal(parameter, result.weights[name])
    with torch.no_grad():
        log_q, log_p = (m(text.held_out).logits.log_softmax(-1).flatten(0, 1) for m in (student, teacher))
    kl = torch.nn.functional.kl_div(log_q, log_p, reduction="batchmean", log_target=True).item()
    assert kl == pytest.approx(result.held_out[result.best_step], rel=1e-5)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_checkpoint(tmp_path):
    student, teacher = student_and_teacher()
    checkpoints = Checkpoints(tmp_path, {})
    calls = {"n": 0}
    forward = teacher.forward

    def broken(*arguments: Any, **options: Any) -> Any:
        calls["n"] += 1
        outputs = forward(*arguments, **options)
        if calls["n"] > 2 + 2 * 5 + 2:  # two held-out batches at first and two after step 4, two a step
            outputs.logits = outputs.logits * float("nan")
        return outputs

    teacher.forward = broken
    with pytest.raises(HealError, match="step 6 has a loss of nan") as raised:
        distil(student, teacher, healing_text_of(), FAST, checkpoints)
    assert "learning rate" in raised.value.remedy
    found = checkpoints.load()
    assert found is not None
    assert found.step == 3
    assert all(value.isfinite().all() for value in found.tensors.values())
    assert all(p.isfinite().all() for p in student.parameters())


def test_a_full_disk_stops_and_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, {})
    save, saved = checkpoint.save_file, []

    def fill(tensors: Any, path: Any, metadata: Any) -> None:
        if saved:
            raise OSError(28, "No space left on device")
        saved.append(path)
        save(tensors, path, metadata)

    monkeypatch.setattr(checkpoint, "save_file", fill)
    with pytest.raises(OutputError, match="No space left"):
        run(checkpoints=checkpoints)
    assert checkpoints.load().step == 3


def test_refuses_a_teacher_of_another_vocabulary():
    student, teacher = student_and_teacher()[0], native(vocab_size=VOCAB + 3)
    with pytest.raises(HealError, match="56 tokens and the model's 53") as raised:
        distil(student, teacher, healing_text_of(), FAST)
    assert "source" in raised.value.remedy


def test_refuses_hidden_states_of_another_shape():
    student, teacher = student_and_teacher()[0], native(hidden_size=24)
    with pytest.raises(HealError, match="layers of width 24"):
        distil(student, teacher, healing_text_of(), settings(hidden_weight=1.0))


def test_refuses_weights_too_coarse_to_train():
    student, teacher = student_and_teacher()
    with pytest.raises(HealError, match="bfloat16"):
        distil(student.to(torch.bfloat16), teacher, healing_text_of(), FAST)


def test_refuses_text_that_fills_no_step():
    with pytest.raises(TextError, match="do not fill a step of 64"):
        run(batch_size=64, accumulate=1)


@pytest.mark.parametrize(
    "changes",
    [
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"temperature": -1.0},
        {"clip": 0.0},
        {"batch_size": 0},
        {"accumulate": 0},
        {"evaluate_every": 0},
        {"top_k": 0},
        {"patience": 0},
        {"warmup": 1.0},
        {"hidden_weight": -1.0},
        {"parameters": "mlp"},
        {"top_k": 4, "hidden_weight": 1.0},
    ],
    ids=str,
)
def test_refuses_settings_out_of_range(changes):
    with pytest.raises(UsageError) as raised:
        settings(**changes)
    assert raised.value.remedy


def test_progress_and_log(caplog):
    student, teacher = student_and_teacher()
    seen: list[tuple[str, int, int]] = []
    with caplog.at_level(logging.INFO):
        distil(student, teacher, healing_text_of(), FAST, progress=lambda *report: seen.append(report))
    assert seen == [("distil", step, 12) for step in range(13)]
    assert any("loss" in line and "tokens/s" in line for line in caplog.messages)


def test_the_rate_rises_and_falls_as_a_cosine():
    result = run(warmup=0.25)
    rates = [point.learning_rate for point in result.curve[1:]]
    assert rates[:4] == pytest.approx([0.0, 1e-3, 2e-3, 3e-3])
    expected = [1.5e-3 * (1 + torch.cos(torch.tensor(torch.pi * i / 9)).item()) for i in range(9)]
    assert rates[3:] == pytest.approx(expected, rel=1e-5)


def test_a_finished_run_that_is_repeated_has_nothing_left_to_do(tmp_path):
    checkpoints = Checkpoints(tmp_path, {})
    first, again = run(checkpoints=checkpoints), run(checkpoints=checkpoints)
    assert again.curve == first.curve
    assert all(torch.equal(again.weights[name], value) for name, value in first.weights.items())


def test_a_checkpoint_of_larger_steps_is_not_taken_up(tmp_path):
    checkpoints = Checkpoints(tmp_path, {})
    run(checkpoints=checkpoints)
    with pytest.raises(HealError, match="4 windows a step, not 2") as raised:
        run(checkpoints=checkpoints, accumulate=1)
    assert "processes" in raised.value.remedy


def test_the_teachers_kept_answers_are_read_and_not_computed(tmp_path):
    first = run(checkpoints=Checkpoints(tmp_path / "run", {"teacher": "t"}), top_k=8)
    for teacher_name, kept in (("t", True), ("u", False)):
        for path in (tmp_path / "run").glob("step-*"):
            path.unlink()
        student, teacher = student_and_teacher()
        teacher.forward = None
        checkpoints = Checkpoints(tmp_path / "run", {"teacher": teacher_name})
        if kept:
            assert distil(student, teacher, healing_text_of(), settings(top_k=8), checkpoints).curve == first.curve
        else:
            with pytest.raises(TypeError):
                distil(student, teacher, healing_text_of(), settings(top_k=8), checkpoints)

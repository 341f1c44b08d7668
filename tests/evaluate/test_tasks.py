"""Benchmark tasks: the harness's figures on local files against log-probabilities worked out here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_convert.errors import UsageError
from mla_convert.evaluate import tasks as module
from mla_convert.evaluate.tasks import evaluate_tasks
from tests.tiny import tiny_llama, tiny_tokenizer

pytest.importorskip("lm_eval")

QUESTIONS = [
    {"question": f"line {i} saw", "choices": [" the cat", " sat on", f" mat {i}", " dogs"], "answer": i % 4}
    for i in range(12)
]
TASK = """
task: which_word
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
doc_to_choice: choices
target_delimiter: ""
metric_list:
  - metric: acc
"""


@pytest.fixture
def task_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(json.dumps(question) for question in QUESTIONS))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "which_word.yaml").write_text(TASK.format(file=file))
    return tmp_path / "tasks"


@torch.no_grad()
def _score(model: Any, tokenizer: Any, question: str, choice: str) -> float:
    """log p(choice | question), token by token."""
    before, whole = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (question, question + choice))
    logprobs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    return sum(float(logprobs[i - 1, whole[i]]) for i in range(len(before), len(whole)))


def test_accuracy_is_the_share_of_questions_whose_answer_is_most_probable(task_folder: Path) -> None:
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    (found,) = evaluate_tasks(model, tokenizer, ["which_word"], include_path=task_folder, batch_size=2)
    right = 0
    for question in QUESTIONS:
        scores = [_score(model, tokenizer, question["question"], choice) for choice in question["choices"]]
        right += max(range(4), key=scores.__getitem__) == question["answer"]
    assert 0 < right < len(QUESTIONS)
    assert (found.task, found.metric, found.samples) == ("which_word", "acc", len(QUESTIONS))
    assert found.value == pytest.approx(right / len(QUESTIONS))
    assert found.error is not None


def test_a_limit_asks_the_first_documents_only(task_folder: Path) -> None:
    (found,) = evaluate_tasks(tiny_llama(), tiny_tokenizer(), ["which_word"], include_path=task_folder, limit=5)
    assert found.samples == 5


def test_an_unknown_task_is_named(task_folder: Path) -> None:
    with pytest.raises(UsageError, match="no task which_wort"):
        evaluate_tasks(tiny_llama(), tiny_tokenizer(), ["which_word", "which_wort"], include_path=task_folder)


def test_a_harness_that_is_missing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> str:
        raise module.metadata.PackageNotFoundError

    monkeypatch.setattr(module.metadata, "version", missing)
    with pytest.raises(UsageError, match="not installed") as caught:
        module.harness_version()
    assert "mla-convert[tasks]" in caught.value.remedy

"""transformers as the engine that verifies: a process of its own, whole folders, and the truth about both."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from mla_convert.errors import VerificationError
from mla_convert.export.verify.answers import Probe, compare_answers
from mla_convert.export.verify.transformers_engine import answer, version
from tests.mla.exported import written
from tests.mla.native import VOCAB, logits_by_hand, native, tokens

PROBE = Probe(tuple(tokens(batch=1, length=20)[0].tolist()), new_tokens=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(native("unequal"), tmp_path_factory.mktemp("written"), pad=4)


def test_it_answers_by_the_papers_equations_where_the_package_cannot_be_imported(folder: Path) -> None:
    found, model = answer(folder, PROBE), native("unequal")
    expected = logits_by_hand(model, torch.tensor(PROBE.prompt))[0].log_softmax(-1)[:-1]
    assert found.distributions is not None
    assert found.distributions.shape == (19, VOCAB)
    torch.testing.assert_close(found.distributions, expected, rtol=0, atol=1e-5)
    given = torch.tensor([expected[i, token] for i, token in enumerate(PROBE.prompt[1:])])
    torch.testing.assert_close(found.logprobs, given.double(), rtol=0, atol=1e-5)
    ids = list(PROBE.prompt)
    for _ in range(64):  # greedy and without a cache
        ids.append(int(logits_by_hand(model, torch.tensor(ids))[0][-1].argmax()))
    assert found.continuation == tuple(ids[20:])
    assert compare_answers(found, found).agreed == 64


def test_a_folder_that_is_not_whole_is_refused(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "configuration_deepseek_mla.py", "modeling_deepseek_mla.py"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_proj.bias"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(VerificationError, match=r"missing keys: model\.layers\.1\.self_attn\.q_proj\.bias"):
        answer(tmp_path, PROBE)


def test_what_does_not_load_says_its_last_words(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match=r"no readable config\.json"):
        answer(tmp_path, PROBE)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoConfig": "missing.Config"}}))
    with pytest.raises(VerificationError, match=r"does not run .*: .*missing"):
        answer(tmp_path, PROBE)


def test_versions_are_those_of_the_interpreter_that_is_named(tmp_path: Path) -> None:
    assert version() == version(Path(sys.executable)) == transformers.__version__
    assert version(tmp_path / "python") is None

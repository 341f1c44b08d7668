"""The reference of an export: read back as it was written, and refused where it was changed into nonsense."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_convert.errors import VerificationError
from mla_convert.export.verify.answers import Answers, Probe
from mla_convert.export.verify.checking import PROBE_FILE, Reference, load_reference, save_reference

REFERENCE = Reference(Probe((5, 3, 9), 2), Answers(torch.tensor([-0.1, -2.5]).double(), (7, 0)), 1e-4, "bfloat16")


def test_what_was_saved_is_read_back(tmp_path: Path) -> None:
    save_reference(tmp_path, REFERENCE)
    found = load_reference(tmp_path)
    assert (found.probe, found.tolerance, found.stored_as) == (REFERENCE.probe, 1e-4, "bfloat16")
    assert found.answers.continuation == (7, 0)
    torch.testing.assert_close(found.answers.logprobs, REFERENCE.answers.logprobs, rtol=0, atol=0)


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": [5]},
        {"prompt": [5, 3]},
        {"prompt": [5, 3, -1]},
        {"prompt": "abc"},
        {"prompt": None},
        {"new_tokens": 3},
        {"new_tokens": "2"},
        {"logprobs": [-0.1, math.nan]},
        {"logprobs": [[-0.1, -2.5]]},
        {"logprobs": ["a", "b"]},
        {"continuation": [7, 0.5]},
        {"tolerance": math.inf},
        {"tolerance": "1"},
        {"stored_as": "float64"},
    ],
    ids=str,
)
def test_what_was_changed_into_nonsense_is_damaged(tmp_path: Path, change: dict[str, Any]) -> None:
    save_reference(tmp_path, REFERENCE)
    file = tmp_path / PROBE_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(VerificationError, match="is damaged"):
        load_reference(tmp_path)

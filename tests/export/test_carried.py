"""What is carried over in another dtype: rounded, and refused where it would become infinite."""

from __future__ import annotations

import math

import pytest
import torch

from mla_convert.errors import FormatError
from mla_convert.export.carried import stored


def test_float16_is_refused_a_number_beyond_its_largest() -> None:
    assert stored("down_proj.weight", torch.tensor([65504.0, -1.0]), torch.float16).tolist() == [65504.0, -1.0]
    for number in (65536.0, -1e6):
        with pytest.raises(FormatError, match=r"weight of down_proj\.weight"):
            stored("down_proj.weight", torch.tensor([1.0, number]), torch.float16)
        assert stored("down_proj.weight", torch.tensor([number]), torch.bfloat16).isfinite().all()
    # what is infinite already is not float16's doing
    assert stored("down_proj.weight", torch.tensor([math.inf]), torch.float16).isinf().all()

"""The custom operator: what torch.compile and torch.export see of the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_kernels import mla_decode
from mla_kernels.ops import decode_op
from tests.kernels.cases import DEVICE, make_case

BACKEND = "triton" if DEVICE.type == "cuda" else "torch"


def test_the_operator_and_its_fake_agree() -> None:
    for case, extra in (
        (make_case(96, 16, 3, (20, 70), queries=2), ()),
        (make_case(96, 16, 3, (20, 0), page=None), ()),
        (make_case(96, 16, 3, (20, 70), fp8=True, dtype=torch.float16), ()),
    ):
        arguments = (case.q, case.kv_cache, case.block_table, case.lengths, case.rank, case.scale)
        torch.library.opcheck(decode_op, (*arguments, True, None, None, None, BACKEND, *extra))


def test_a_compiled_model_keeps_one_graph() -> None:
    """fullgraph=True fails at a graph break; the backend that does nothing keeps the test to what is traced."""
    case = make_case(96, 16, 3, (20, 70))

    def attend(q: Tensor) -> Tensor:
        out, lse = mla_decode(
            2 * q, case.kv_cache, case.block_table, case.lengths, case.rank, case.scale, backend=BACKEND
        )
        return out * lse.transpose(1, 2)[..., None]

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(case.q), attend(case.q))

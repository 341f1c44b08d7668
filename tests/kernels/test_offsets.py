"""Offsets beyond 2^31, which a cache of a few gigabytes has (in vLLM pull request 47671 they were negative)."""

import subprocess
import sys
from pathlib import Path

import pytest

# Memory that is never touched is never there: of the four gigabytes and more only the pages in use are.
SCRIPT = """
import os
import resource
os.environ["TRITON_INTERPRET"] = "1"
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"
import torch
from mla_kernels import mla_decode, reference_decode

generator = torch.Generator().manual_seed(0)
rank, rope, page = 96, 16, 64
width = rank + rope
q = torch.randn(1, 1, 2, width, generator=generator)
rows = torch.randn(page, width, generator=generator)
paged = layout == "paged"
pages = (2**31 + 2**27) // (page * width)
storage = torch.empty(pages, page, width, dtype=torch.float16)
last = pages - 1
assert storage[last].storage_offset() > 2**31
storage[last] = rows.half()
if paged:
    cache, table = storage, torch.tensor([[last]], dtype=torch.int32)
    lengths = torch.tensor([page], dtype=torch.int32)
    query = q.half()
    want = reference_decode(query, rows.half()[None], None, lengths, rank, 0.1)
else:
    # The second sequence of a contiguous cache starts beyond 2^31.
    cache, table = torch.as_strided(storage, (2, page, width), (last * page * width, width, 1)), None
    cache[0] = rows.half()
    lengths = torch.tensor([page, page], dtype=torch.int32)
    query = q.half().expand(2, -1, -1, -1).contiguous()
    want = reference_decode(query, torch.stack([rows, rows]).half(), None, lengths, rank, 0.1)
got = mla_decode(query, cache, table, lengths, rank, 0.1)
assert (got[0].double() - want[0]).norm() <= 1e-3 * want[0].norm()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts on memory that is given when it is touched")
@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_offsets_are_64_bits_wide(layout: str) -> None:
    overcommit = Path("/proc/sys/vm/overcommit_memory")
    if overcommit.is_file() and overcommit.read_text().strip() == "2":
        pytest.skip("this system gives no memory before it is there")
    script = f"layout = {layout!r}\n{SCRIPT}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2000

import subprocess
import sys

import pytest

from mla_convert import memory


def test_a_platform_without_mallopt_is_left_alone(monkeypatch):
    def load(*_):
        raise AssertionError("no library is to be opened")

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(memory.ctypes, "CDLL", load)
    memory.keep_freed_memory()
    memory.release_freed_memory()


def test_a_model_fills_a_memory_of_which_it_takes_more_than_its_share(monkeypatch):
    class Machine:
        total = 10**10

    monkeypatch.setattr(memory.psutil, "virtual_memory", Machine)
    assert not memory.fills_memory(10**9)  # 4 GB in float32 of 10
    assert memory.fills_memory(10**9 + 1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_the_options_are_those_of_malloc_h(monkeypatch):
    class Library:
        def __init__(self):
            self.calls = []

        def mallopt(self, option, value):
            self.calls.append((option, value))
            return 1

    library = Library()
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: library)
    memory.keep_freed_memory()
    # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
    assert library.calls == [(-3, 2**30), (-1, -1)]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="malloc_trim is glibc's")
def test_what_was_kept_goes_back_to_the_system() -> None:
    """In a process of its own: the options stay for good."""
    grown = subprocess.run([sys.executable, "-c", _GROWN], capture_output=True, text=True, check=True)
    kept, released = map(int, grown.stdout.split())
    assert kept > 100
    assert released < 10


_GROWN = """
from pathlib import Path
import torch
from mla_convert import memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

memory.keep_freed_memory()
before = resident()
tensors = [torch.ones(2**20) for _ in range(64)]
fence = torch.ones(2**10)  # so that what is freed does not lie at the end of the heap
del tensors
kept = resident() - before
memory.release_freed_memory()
print(round(kept), round(resident() - before))
"""

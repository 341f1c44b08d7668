import sys

import pytest

from mla_convert import memory


def test_a_platform_without_mallopt_is_left_alone(monkeypatch):
    def load(*_):
        raise AssertionError("no library is to be opened")

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(memory.ctypes, "CDLL", load)
    memory.keep_freed_memory()


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

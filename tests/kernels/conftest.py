"""A faster interpreter for the kernels' tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def patch_the_language_once_a_launch() -> Iterator[None]:
    """Keep the interpreter from patching triton.language anew at every call of a function inside a kernel.

    It does so each time, with the same outcome, and spends nine tenths of its time there. Only the time depends on
    this: without these names in another version of Triton, the tests are slow and just as right.
    """
    if not os.environ.get("TRITON_INTERPRET"):
        yield
        return
    interpreter: Any = pytest.importorskip("triton.runtime.interpreter")
    patch: Callable[[Any], Any] | None = getattr(interpreter, "_patch_lang", None)
    scope_type: Any = getattr(interpreter, "_LangPatchScope", None)
    if patch is None or scope_type is None:
        yield
        return
    patched: set[int] = set()

    class Launch:
        """The patches of a launch, whose end takes them back."""

        def __init__(self, scope: Any) -> None:
            self.scope = scope

        def restore(self) -> None:
            patched.clear()
            self.scope.restore()

    def patch_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module in patched:
            return scope_type()
        patched.add(module)
        return Launch(patch(function))

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
        yield

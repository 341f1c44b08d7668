"""Every engine that can verify an export, by name."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from mla_convert.errors import UsageError, VerificationError
from mla_convert.export.verify.answers import Answers, Probe

ENGINES = ("transformers", "vllm", "llamacpp")

_INSTALL = {
    "transformers": "pip install transformers",
    "vllm": "pip install vllm into an environment of its own, and name its interpreter with --python",
    "llamacpp": "pip install 'mla-convert[llamacpp]'",
}


class EngineModule(Protocol):
    """What a module ``verify/NAME_engine.py`` offers."""

    def answer(self, folder: Path, probe: Probe, *, python: Path | None = None) -> Answers:
        """Load the folder in a fresh process of the interpreter (by default this one's) and ask it.

        Raises:
            VerificationError: it does not load, or does not answer.
        """
        ...

    def version(self, python: Path | None = None) -> str | None:
        """The engine's version in that interpreter; None where it is not installed."""
        ...


def engine_named(name: str) -> EngineModule:
    """Return an engine.

    Raises:
        UsageError: there is none of that name.
    """
    if name not in ENGINES:
        raise UsageError(f"there is no engine {name!r}", f"one of {', '.join(ENGINES)}")
    return cast(EngineModule, import_module(f"mla_convert.export.verify.{name}_engine"))


def installed_version(name: str, python: Path | None) -> str:
    """Return the engine's version.

    Raises:
        VerificationError: it is not installed.
    """
    found = engine_named(name).version(python)
    if found is None:
        where = "this environment" if python is None else str(python)
        raise VerificationError(f"{name} is not installed in {where}", _INSTALL[name])
    return found

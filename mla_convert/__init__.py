"""Convert grouped-query attention checkpoints to multi-head latent attention, and measure what it cost.

Each command of the command line is a function here, with the same parameters and results::

    from mla_convert import convert, evaluate

    convert("builtin:smollm2-135m", "out/mla", cache=0.5)
    evaluate("out/mla", text="notes.txt", against="builtin:smollm2-135m")["log_ratio"]

Nothing is loaded before it is asked for; ``docs/python.md`` has all of them.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_FUNCTIONS = ("absorb", "compare", "convert", "generate", "inspect", "push", "recipes", "verify")
# These are modules of this package besides, which can be called.
_MODULES = ("evaluate", "export", "heal", "plan", "report")


class _CallableModule(ModuleType):
    """A module that is also the function of its name in `mla_convert.api`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(import_module("mla_convert.api"), self.__name__.rpartition(".")[2])(*args, **kwargs)

    @property
    def __signature__(self) -> Any:
        return getattr(import_module("mla_convert.api"), self.__name__.rpartition(".")[2]).__signature__


class _Package(ModuleType):
    """This package, which makes callable what the import system puts into it under a function's name."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _MODULES and isinstance(value, ModuleType):
            value.__class__ = _CallableModule
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"mla_convert.{name}")
    if name in _FUNCTIONS:
        return getattr(import_module("mla_convert.api"), name)
    if name == "open_source":
        return import_module("mla_convert.sources").open_source
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "open_source", *_FUNCTIONS, *_MODULES})

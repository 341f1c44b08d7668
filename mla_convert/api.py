"""The commands as Python functions: the same names, parameters, checks and results, and nothing printed.

A function returns the object that ``--json`` prints, and raises the error that the command line would end with.
"""

from __future__ import annotations

import inspect as _inspect
import textwrap
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from typer.models import ArgumentInfo, OptionInfo

from mla_convert.cli import COMMANDS
from mla_convert.cli._console import called_from_python
from mla_convert.errors import UsageError
from mla_convert.progress import Progress

# What only a terminal has use for.
CONSOLE_ONLY = ("json", "quiet", "verbose")
_POSITIONAL, _KEYWORD = _inspect.Parameter.POSITIONAL_OR_KEYWORD, _inspect.Parameter.KEYWORD_ONLY


def _function(command: Callable[..., None]) -> Callable[..., dict[str, Any]]:
    """Return the command as a function; arguments are positional, options are keywords."""
    given = {
        name: (get_args(hint)[0], get_args(hint)[1]) if get_origin(hint) is Annotated else (hint, None)
        for name, hint in get_type_hints(command, include_extras=True).items()
        if name not in (*CONSOLE_ONLY, "return")
    }
    defaults = _inspect.signature(command).parameters
    parameters = [
        _inspect.Parameter(
            name,
            _POSITIONAL if isinstance(info, ArgumentInfo) else _KEYWORD,
            default=defaults[name].default,
            annotation=str | PathLike[str] if isinstance(info, ArgumentInfo) and kind is str else _accepted(kind),
        )
        for name, (kind, info) in given.items()
    ]
    progress = _inspect.Parameter("progress", _KEYWORD, default=None, annotation=Progress | None)
    parameters = sorted([*parameters, progress], key=lambda parameter: parameter.kind)
    signature = _inspect.Signature(parameters, return_annotation=dict[str, Any])

    def call(*args: Any, **kwargs: Any) -> dict[str, Any]:
        bound = signature.bind(*args, **kwargs)
        watcher = bound.arguments.pop("progress", None)
        checked = {name: _checked(name, value, *given[name]) for name, value in bound.arguments.items()}
        with called_from_python(watcher) as console:
            command(**checked, json=True)
        return dict(console.returned)

    call.__name__ = call.__qualname__ = command.__name__
    call.__doc__ = _documentation(command, given)
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _documentation(command: Callable[..., None], given: dict[str, tuple[Any, Any]]) -> str:
    """The command's help, that of every parameter, and what all functions have in common."""
    lines = [_inspect.getdoc(command) or "", "", "Args:"]
    helps = {name: info.help for name, (_, info) in given.items() if info is not None and info.help}
    for name, said in {**helps, "progress": "Called as progress(stage, done, total) while it works."}.items():
        lines += textwrap.wrap(f"{name}: {said}", 100, initial_indent="    ", subsequent_indent="        ")
    lines += ["", "Returns:", "    The object that --json prints."]
    lines += ["", "Raises:", "    MLAConvertError: with what is wrong, and what to do about it."]
    return "\n".join(lines)


def _accepted(kind: Any) -> Any:
    """The type that a parameter takes: for a path also text, for a list any sequence or one item."""
    if kind is Path:
        return str | PathLike[str]
    if get_origin(kind) is list:
        item = _accepted(get_args(kind)[0])
        return item | Sequence[item]
    if get_origin(kind) in (Union, UnionType):
        found = _accepted(get_args(kind)[0])
        for part in get_args(kind)[1:]:
            found = found | _accepted(part)
        return found
    return kind


def _checked(name: str, value: Any, hint: Any, info: Any) -> Any:
    """Return a value as the command takes it.

    Raises:
        UsageError: the command line would not take it.
    """
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None:
        if NoneType in kinds:
            return None
        raise UsageError(f"{name}=None, and there must be a value", "give one, or leave it out")
    kind: Any = next(found for found in kinds if found is not NoneType)
    if get_origin(kind) is Literal and value not in get_args(kind):
        raise UsageError(f"{name}={value!r} is none of {', '.join(map(repr, get_args(kind)))}", "take one of them")
    if get_origin(kind) is list:
        items = [value] if isinstance(value, (str, PathLike)) else list(value)
        return [_checked(name, item, get_args(kind)[0], None) for item in items]
    if kind is Path:
        return Path(value)
    if kind is str and isinstance(value, PathLike):
        return str(value)
    if isinstance(info, OptionInfo):
        _check_range(name, value, info)
    return value


def _check_range(name: str, value: Any, info: OptionInfo) -> None:
    """Raise UsageError for a number outside an option's range."""
    low, high = info.min, info.max
    if (low is not None and value < low) or (high is not None and value > high):
        limits = " and ".join(
            f"at {end} {limit}" for end, limit in (("least", low), ("most", high)) if limit is not None
        )
        raise UsageError(f"{name}={value!r} is not {limits}", "give such a number")


# `serve` becomes another program, which a Python function cannot.
FUNCTIONS = {command.__name__: _function(command) for command, _ in COMMANDS if command.__name__ != "serve"}


def __getattr__(name: str) -> Callable[..., dict[str, Any]]:
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""What is said of a command line that cannot be read: which part is wrong, and what was probably meant."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

# What other programs call what is an argument here.
_ALSO = {
    "o": "out",
    "output": "out",
    "outfile": "out",
    "out-dir": "out",
    "output-dir": "out",
    "m": "model",
    "model": "source",
    "source": "model",
}


def explain(complaint: Any, arguments: Sequence[str], commands: Sequence[str]) -> tuple[str, str]:
    """Return what is wrong and what to try, of an error that typer raised for ``arguments``.

    Its classes are not public, so what they hold is looked for by name.
    """
    context = getattr(complaint, "ctx", None)
    option = getattr(complaint, "option_name", None)
    place = _place(context, arguments, commands)
    if option is None or context is None or "requires an argument" in complaint.format_message():
        return complaint.format_message().rstrip("."), f"{place} --help"
    word = option.lstrip("-")
    parameters = context.command.params
    known = [name for p in parameters if p.param_type_name == "option" for name in p.opts + p.secondary_opts]
    positional = [p for p in parameters if p.param_type_name == "argument"]
    meant = next((p for name in (word, _ALSO.get(word)) for p in positional if p.name == name), None)
    if meant is not None:
        usage = " ".join(_shown(p) for p in positional)
        return f"there is no option {option}: {_shown(meant)} is an argument", f"{place} {usage}"
    close = _close(word, known)
    if close:
        return f"there is no option {option}: did you mean {' or '.join(close)}?", f"{place} --help"
    return f"there is no option {option}", f"{place} --help"


def _place(context: Any, arguments: Sequence[str], commands: Sequence[str]) -> str:
    """The command as it is called; typer does not always say, but it is the first argument."""
    if context is not None:
        return str(context.command_path)
    return " ".join(("mla-convert", *(name for name in arguments[:1] if name in commands)))


def _shown(argument: Any) -> str:
    """An argument as the usage line shows it, without brackets."""
    return str(argument.metavar or argument.name.upper()).strip("[]")


def _close(word: str, known: Sequence[str]) -> list[str]:
    """The options most like a word: of nearly its spelling, or with it as one of their parts."""
    names = {name.lstrip("-"): name for name in known if name.startswith("--")}
    close = get_close_matches(word, names, n=1, cutoff=0.7)
    close += [name for name in names if word in name.split("-") and name not in close]
    return [names[name] for name in close[:3]]

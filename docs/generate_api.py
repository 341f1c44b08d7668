"""Write mla_convert/__init__.pyi, the types of the Python functions, from the command line that they mirror.

python docs/generate_api.py            write it
python docs/generate_api.py --check    exit with 1 if the file is not what would be written
"""

import inspect
import json
import sys
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from mla_convert.api import FUNCTIONS
from mla_convert.progress import Progress

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "mla_convert" / "__init__.pyi"

HEAD = '''\
"""Written by `python docs/generate_api.py`: what type checkers and editors see of the commands as functions."""

from collections.abc import Sequence
from os import PathLike
from typing import Any, Literal

from mla_convert.progress import Progress
from mla_convert.sources import open_source as open_source

__version__: str
'''


def shown(kind: Any) -> str:
    """Return a type as it is written in a stub."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is NoneType or kind is None:
        return "None"
    if origin in (Union, UnionType):
        return " | ".join(shown(part) for part in parts)
    if origin is Literal:
        return f"Literal[{', '.join(json.dumps(part) for part in parts)}]"
    if origin is Sequence:
        return f"Sequence[{shown(parts[0])}]"
    if origin is PathLike:
        return "PathLike[str]"
    if kind in (str, int, float, bool, Progress):
        return kind.__name__
    if origin is dict:
        return "dict[str, Any]"
    raise SystemExit(f"docs/generate_api.py cannot write the type {kind}")


def declaration(name: str) -> str:
    """Return one function of the stub."""
    signature = inspect.signature(FUNCTIONS[name])
    lines, keywords = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not keywords:
            lines.append("    *,")
            keywords = True
        default = parameter.default
        value = json.dumps(default) if isinstance(default, str) else repr(default)
        tail = "" if default is inspect.Parameter.empty else f" = {value}"
        lines.append(f"    {parameter.name}: {shown(parameter.annotation)}{tail},")
    documentation = "\n".join(f"    {line}".rstrip() for line in (FUNCTIONS[name].__doc__ or "").splitlines())
    head = [f"def {name}(", *lines, f") -> {shown(signature.return_annotation)}:"]
    return "\n".join([*head, f'    """{documentation.lstrip()}', '    """'])


def stub() -> str:
    """Return mla_convert/__init__.pyi."""
    return "\n".join([HEAD, "\n\n".join(declaration(name) for name in sorted(FUNCTIONS))]) + "\n"


def main(arguments: list[str]) -> int:
    """Write or check; return the exit code."""
    if arguments != ["--check"]:
        STUB.write_text(stub(), encoding="utf-8")
        return 0
    if not STUB.is_file() or STUB.read_text(encoding="utf-8") != stub():
        print("mla_convert/__init__.pyi is not what the command line says: run `make docs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

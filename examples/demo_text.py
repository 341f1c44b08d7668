"""Write a text for ``make demo`` to evaluate on: docstrings of the standard library, in a fixed order.

The demo calibrates on ``builtin:pydoc``, the language reference. Docstrings are other text, of another kind, and every
Python carries them; their exact words differ a little from one Python version to the next.

    python examples/demo_text.py OUT
"""

import importlib
import inspect
import sys
from pathlib import Path

MODULES = (
    "argparse", "asyncio.streams", "calendar", "collections", "configparser", "csv", "datetime", "decimal", "difflib",
    "doctest", "email.message", "enum", "fractions", "functools", "gettext", "heapq", "http.cookiejar", "inspect",
    "json", "locale", "logging", "mailbox", "optparse", "pathlib", "pdb", "pickletools", "random", "sched", "shutil",
    "smtplib", "socket", "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading",
    "tokenize", "unittest.mock", "urllib.parse", "urllib.request", "uuid", "weakref", "zipfile",
)  # fmt: skip


def docstrings(module_name: str) -> list[str]:
    """Return the docstring of a module and those of the public functions and classes it defines, by name."""
    module = importlib.import_module(module_name)
    members = [module] + [
        member
        for name, member in sorted(vars(module).items())
        if not name.startswith("_")
        and (inspect.isfunction(member) or inspect.isclass(member))
        and member.__module__ == module_name
    ]
    return [inspect.cleandoc(member.__doc__) for member in members if member.__doc__]


def main(out: Path) -> None:
    """Write the text to ``out``."""
    texts = [text for name in MODULES for text in docstrings(name)]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n\n".join(texts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

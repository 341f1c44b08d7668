"""A recipe's file as it is shown: its own text, and above each key what it means."""

from __future__ import annotations

import textwrap

from mla_convert.recipe.reading import Key, RecipeText
from mla_convert.recipe.schema import fields_at

WIDTH = 100


def commented(read: RecipeText) -> str:
    """Return the YAML of a file with a comment above each key that begins a line and has none; it loads as before."""
    lines = read.text.splitlines()
    comments: dict[int, str] = {}
    for key, comment in _comments(read.content, ()):
        number = read.line(key) - 1
        line = lines[number]
        indent = line[: len(line) - len(line.lstrip())]
        own = number > 0 and lines[number - 1].lstrip().startswith("#")
        if line.lstrip().startswith(f"{key[-1]}:") and not own:
            comments[number] = textwrap.fill(
                comment, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
            )
    shown = [f"{comments[i]}\n{line}" if i in comments else line for i, line in enumerate(lines)]
    return "\n".join(shown) + "\n"


def _comments(content: object, section: Key) -> list[tuple[Key, str]]:
    """The keys of a section and of those in it, in order, each with what the schema says of it."""
    found: list[tuple[Key, str]] = []
    fields = fields_at(section)
    for name, value in content.items() if isinstance(content, dict) else ():
        key = (*section, name)
        if name in fields and key not in (("name",), ("description",)):
            found.append((key, fields[name].description or ""))
            found += _comments(value, key)
    return found

"""A recipe's YAML with the line of every key, and with what the command line sets in it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mla_convert.errors import RecipeError
from mla_convert.recipe.schema import fields_at, known_keys

Key = tuple[str | int, ...]


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, and numbers as 1e-3, which YAML 1.2 reads and PyYAML takes for text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


@dataclass
class RecipeText:
    """What a recipe's file holds, and where.

    Attributes:
        content: the values, with overrides put in.
        overridden: the keys that overrides set, and how each was written.
    """

    path: Path
    text: str
    content: Any
    _root: yaml.Node | None
    overridden: dict[Key, str] = field(default_factory=dict)

    def where(self, key: Key = ()) -> str:
        """Return the file and line of a key, or of the section that lacks it; the override that set it, if one did."""
        for length in range(len(key), 0, -1):
            if key[:length] in self.overridden:
                return f"--set {self.overridden[key[:length]]}"
        return f"{self.path}:{self.line(key)}"

    def line(self, key: Key) -> int:
        """The line of a key, counted from 1; of its closest section where it is absent."""
        node, line = self._root, 1
        for part in key:
            if isinstance(node, yaml.MappingNode):
                pair = next(((k, v) for k, v in node.value if getattr(k, "value", None) == str(part)), None)
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                pair = (node.value[part], node.value[part])
            else:
                pair = None
            if pair is None:
                break
            line, node = pair[0].start_mark.line + 1, pair[1]
        return line

    def set(self, overrides: Sequence[str]) -> None:
        """Put overrides in, each as ``section.key=value`` with a YAML value; absent sections are made.

        Raises:
            RecipeError: one has no value, is not YAML, or names a key that recipes do not have.
        """
        for override in overrides:
            name, equals, value = override.partition("=")
            key = tuple(part.strip() for part in name.split("."))
            if not equals or not name.strip():
                raise RecipeError(
                    f"--set {override} names no value",
                    "write it as --set KEY=VALUE, such as --set factorise.damping=0.2",
                )
            if key in (("name",), ("description",)):
                raise RecipeError(
                    f"--set {override} renames a recipe",
                    "save what `mla-convert recipes show` prints, and change it there",
                )
            if key[-1] not in fields_at(key[:-1]):
                raise RecipeError(f"--set {override}: recipes have no key {name.strip()}", suggestion(key))
            try:
                parsed = yaml.load(value, _Loader)
            except (yaml.YAMLError, RecursionError) as error:
                raise RecipeError(
                    f"--set {override}: the value is not YAML: {fault(error)}", "quote it for the shell"
                ) from error
            self._put(key, parsed)
            self.overridden[key] = override

    def _put(self, key: tuple[str, ...], value: Any) -> None:
        if not isinstance(self.content, dict):
            return  # validation says what is wrong with it
        section = self.content
        for part in key[:-1]:
            if not isinstance(section.get(part), dict):
                section[part] = {}
            section = section[part]
        section[key[-1]] = value


def read_recipe(path: Path) -> RecipeText:
    """Return what a recipe's file holds.

    Raises:
        RecipeError: it cannot be read, is not YAML, or says a key twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
        loader = _Loader(text)
        root = loader.get_single_node()
        twice = next(_twice(root), None)
        if twice is not None:
            key, first, line = twice
            raise RecipeError(f"{path}:{line}: {key} stands in line {first} already", "take one of them out")
        content = None if root is None else loader.construct_document(root)
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"the recipe {path} cannot be read: {error}", "check the path") from error
    except (yaml.YAMLError, RecursionError) as error:
        line = _line(error)
        place = f"{path}:{line}" if line else str(path)
        raise RecipeError(f"{place}: the recipe is not YAML: {fault(error)}", "mend the line that is named") from error
    return RecipeText(path, text, content, root)


def fault(error: Exception) -> str:
    """A parser's message in one line, with the line and column."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())


def suggestion(key: Key) -> str:
    """What to do about an unknown key: the closest ones there are, or all that its section has."""
    section, name = key[:-1], str(key[-1])
    everywhere = [".".join(known) for known in known_keys() if len(known) > 1]
    here = {".".join(map(str, (*section, known))): known for known in fields_at(section)}
    close = [path for path, known in here.items() if difflib.get_close_matches(name, [known], cutoff=0.7)]
    close = close or [path for path in everywhere if path.rpartition(".")[2] == name]
    if not here:
        close = close or difflib.get_close_matches(".".join(map(str, key)), everywhere, n=1, cutoff=0.8)
    if close:
        return f"did you mean {' or '.join(close)}?"
    shown = list(here) if here and section else everywhere
    return f"one of {', '.join(shown)}"


def _line(error: Exception) -> int | None:
    mark = getattr(error, "problem_mark", None)
    return mark.line + 1 if mark is not None else None


def _twice(root: yaml.Node | None) -> Iterator[tuple[str, int, int]]:
    """Keys that a mapping holds twice, each with both lines; of which YAML would keep the last without a word."""
    nodes: list[tuple[str, yaml.Node]] = [("", root)] if root is not None else []
    seen: set[int] = set()
    while nodes:
        place, node = nodes.pop()
        if id(node) in seen or not isinstance(node, yaml.MappingNode):
            continue
        seen.add(id(node))
        lines: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            name, line = f"{place}{key.value}", key.start_mark.line + 1
            if name in lines:
                yield name, lines[name], line
            lines[name] = line
            nodes.append((f"{name}.", value))

"""The licence that a source states, carried over to what is made of it and never guessed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from gguf import GGUFReader

_FIELDS = ("license", "license_name", "license_link")
_FILES = ("LICENSE*", "LICENCE*", "COPYING*")


def licence_of_folder(folder: Path) -> dict[str, Any]:
    """Return ``license``, ``license_name`` and ``license_link`` as the metadata of a folder's model card states them.

    Where the card states none but there is a licence file, it is ``other`` with a link to that file, for the hub's name
    of a licence cannot be told from its text. Empty where there is neither, or the metadata cannot be read.
    """
    stated = _card_metadata(folder / "README.md")
    found = {field: stated[field] for field in _FIELDS if isinstance(stated.get(field), str | list)}
    if "license" in found:
        return found
    files = sorted(file.name for pattern in _FILES for file in folder.glob(pattern) if file.is_file())
    if not files:
        return {}
    return {"license": "other", "license_name": "licence-of-the-source", "license_link": files[0]}


def licence_of_gguf(reader: GGUFReader) -> dict[str, Any]:
    """Return the same of a GGUF file, from ``general.license`` and the keys under it."""
    keys = zip(_FIELDS, ("general.license", "general.license.name", "general.license.link"), strict=True)
    found = {field: str(value.contents()) for field, key in keys if (value := reader.get_field(key)) is not None}
    return found if "license" in found else {}


def _card_metadata(file: Path) -> Mapping[str, Any]:
    """The YAML between the two lines of dashes that a model card begins with."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
        if not lines or lines[0].rstrip() != "---":
            return {}
        end = next(i for i, line in enumerate(lines[1:], 1) if line.rstrip() == "---")
        found = yaml.safe_load("\n".join(lines[1:end]))
    except (OSError, UnicodeDecodeError, StopIteration, yaml.YAMLError):
        return {}
    return found if isinstance(found, Mapping) else {}

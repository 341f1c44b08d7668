"""Where recipes are: those that come with the package, and files of one's own."""

from __future__ import annotations

import difflib
from pathlib import Path

from mla_convert.errors import RecipeError

_PACKAGE = Path(__file__).resolve().parent.parent


def available_recipes() -> tuple[str, ...]:
    """The names of the recipes that come with the package."""
    return tuple(sorted(path.stem for path in _folder().glob("*.yaml")))


def recipe_file(name_or_path: str | Path) -> Path:
    """Return the file of the recipe of that name, or the path itself where it is one of a YAML file.

    Raises:
        RecipeError: there is no recipe of that name.
    """
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml"):
        return path
    name, known = str(name_or_path), available_recipes()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}? there are" if close else "one of"
        raise RecipeError(f"there is no recipe {name!r}", f"{hint} {', '.join(known)}, or a .yaml file")
    return _folder() / f"{name}.yaml"


def _folder() -> Path:
    """The recipes inside an installed wheel, or those of the source tree."""
    source_tree = _PACKAGE.parent / "recipes"
    packaged = _PACKAGE / "_recipes"
    return packaged if packaged.is_dir() else source_tree

"""The recipes that come with the package, in a line each."""

from __future__ import annotations

from typing import Any

from mla_convert.recipe.folder import available_recipes, recipe_file
from mla_convert.recipe.loading import load_recipe


def summaries() -> tuple[dict[str, Any], ...]:
    """Return each recipe's name, description, file, calibration tokens (None without any) and stages of healing."""
    found = []
    for name in available_recipes():
        recipe = load_recipe(name)
        heal = recipe.to_dict().get("heal", {})
        found.append(
            {
                "name": name,
                "description": recipe.description,
                "file": str(recipe_file(name)),
                "calibration_tokens": recipe.calibration.tokens if recipe.calibration else None,
                "heals": [stage for stage in ("layers", "global") if stage in heal],
            }
        )
    return tuple(found)

"""A recipe's file, validated, as a `Recipe`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mla_convert.errors import RecipeError
from mla_convert.recipe.folder import recipe_file
from mla_convert.recipe.methods import (
    AllocationRecipe,
    CalibrationRecipe,
    DecoupleRecipe,
    FactoriseRecipe,
    HealGlobalRecipe,
    HealLayersRecipe,
    HealRecipe,
    Recipe,
    RefitRecipe,
)
from mla_convert.recipe.reading import RecipeText, read_recipe, suggestion
from mla_convert.recipe.schema import HealSection, RecipeSection


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe of that name, or the one in that YAML file.

    Args:
        overrides: what takes the place of single values, each as ``section.key=value``. The recipe's name says so.

    Raises:
        RecipeError: there is none, or it does not validate; with the file and the line, or the override.
    """
    read = read_recipe(recipe_file(name_or_path))
    read.set(overrides)
    try:
        parsed = RecipeSection.model_validate(read.content)
    except ValidationError as error:
        faults = [_fault(read, one) for one in error.errors()]
        said = "; ".join(message for message, _ in faults)
        remedies = dict.fromkeys(remedy for _, remedy in faults if remedy)
        raise RecipeError(f"the recipe does not validate: {said}", " ".join(remedies) or "mend these keys") from error
    recipe = Recipe(
        name=" ".join((parsed.name, "with", ", ".join(overrides))) if overrides else parsed.name,
        description=parsed.description,
        calibration=CalibrationRecipe(**parsed.calibration.model_dump()) if parsed.calibration else None,
        decouple=DecoupleRecipe(**parsed.decouple.model_dump()),
        factorise=FactoriseRecipe(**parsed.factorise.model_dump()),
        allocation=AllocationRecipe(**parsed.allocation.model_dump()) if parsed.allocation else None,
        refit=RefitRecipe(**parsed.refit.model_dump()) if parsed.refit else None,
        heal=_heal(parsed.heal) if parsed.heal else None,
    )
    _check_allocation(recipe, read)
    if recipe.calibration is None and not _weights_suffice(recipe):
        raise RecipeError(
            f"{read.where(('calibration',))}: the recipe uses calibration text but has no calibration section",
            "add calibration: {tokens: ..., context: ...}",
        )
    return recipe


def _fault(read: RecipeText, error: Any) -> tuple[str, str | None]:
    """One of pydantic's complaints with its place, and what to do about it where that is known."""
    key = tuple(error["loc"])
    name, message, remedy = ".".join(map(str, key)) or "recipe", error["msg"], None
    if error["type"] == "extra_forbidden":
        message, remedy = "there is no such key", suggestion(key)
    elif error["type"] == "model_type":
        message = "not a section of keys and values"
    elif error["type"] == "missing":
        message = "missing"
    elif error["type"] == "value_error":
        message = message.removeprefix("Value error, ")
    return f"{read.where(key)}: {name}: {message}", remedy


def _heal(parsed: HealSection) -> HealRecipe:
    return HealRecipe(
        context=parsed.context,
        layers=HealLayersRecipe(**parsed.layers.model_dump()) if parsed.layers else None,
        whole=HealGlobalRecipe(**parsed.whole.model_dump()) if parsed.whole else None,
    )


def _check_allocation(recipe: Recipe, read: RecipeText) -> None:
    if not recipe.allocates:
        return
    place = read.where(("allocation",))
    if not recipe.needs_gradients:
        raise RecipeError(
            f"{place}: the recipe allocates sizes by predicted loss, which needs the loss's gradients",
            "take decouple.constants or factorise.metric fisher, or leave allocation out",
        )
    if recipe.decouple.slots == "all":
        raise RecipeError(
            f"{place}: the recipe keeps all slots, which leaves no sizes to allocate",
            "take decouple.slots cost, or leave allocation out",
        )


def _weights_suffice(recipe: Recipe) -> bool:
    decouple, factorise = recipe.decouple, recipe.factorise
    return (
        decouple.slots == "all"
        and decouple.constants == "one"
        and factorise.moment == "weights"
        and factorise.metric == "identity"
        and not recipe.needs_held_out
        and not recipe.refits
    )

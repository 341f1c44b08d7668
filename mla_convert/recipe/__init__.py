"""Recipes: which variant of each step a conversion takes. YAML at the edge, validated, into frozen dataclasses."""

from mla_convert.recipe.commented import commented
from mla_convert.recipe.folder import available_recipes, recipe_file
from mla_convert.recipe.loading import load_recipe
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
from mla_convert.recipe.reading import read_recipe
from mla_convert.recipe.summaries import summaries

__all__ = [
    "AllocationRecipe",
    "CalibrationRecipe",
    "DecoupleRecipe",
    "FactoriseRecipe",
    "HealGlobalRecipe",
    "HealLayersRecipe",
    "HealRecipe",
    "Recipe",
    "RefitRecipe",
    "available_recipes",
    "commented",
    "load_recipe",
    "read_recipe",
    "recipe_file",
    "summaries",
]

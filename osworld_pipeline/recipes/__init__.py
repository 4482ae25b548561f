"""Recipes: a run is described by one TOML file, validated by schema.py."""

from osworld_pipeline.recipes.load import load_recipe, parse_recipe, recipe_names, recipe_text
from osworld_pipeline.recipes.schema import Recipe

__all__ = ["Recipe", "load_recipe", "parse_recipe", "recipe_names", "recipe_text"]

"""A run is one recipe: a whole run in one named TOML file, validated by schema.py."""

from osworld_pipeline.recipes.schema import Recipe, load_recipe, recipe_names

__all__ = ["Recipe", "load_recipe", "recipe_names"]

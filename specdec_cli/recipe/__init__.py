"""Recipes: one loader, typed and strict, with positions in its errors and an origin for every value."""

from specdec_cli.recipe.draft import DraftMethods
from specdec_cli.recipe.drafts import resolve_drafts
from specdec_cli.recipe.problems import Problem, RecipeError
from specdec_cli.recipe.resolve import Resolved, resolve
from specdec_cli.recipe.schema import Recipe

__all__ = ["DraftMethods", "Problem", "Recipe", "RecipeError", "Resolved", "resolve", "resolve_drafts"]

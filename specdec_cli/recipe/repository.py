"""A model repository: a YAML file that names several models and the recipe of each."""

from __future__ import annotations

import os

from specdec_cli.files import given_path
from specdec_cli.recipe import shipped
from specdec_cli.recipe.document import read_document
from specdec_cli.recipe.problems import Problem, RecipeError


def read_repository(path: str | os.PathLike[str]) -> dict[str, str]:
    """The recipe of every model by the model's name; a recipe is a shipped one's name or a file beside this one.

    Raises:
        UsageError: no such file, or one that cannot be read.
        RecipeError: everything that is wrong in it.
    """
    file = given_path(path)
    document = read_document(shipped.read_bytes(file), str(path))
    problems: list[Problem] = list(document.problems)
    recipes: dict[str, str] = {}
    for name, recipe in (document.value or {}).items():
        if not isinstance(recipe, str) or not recipe:
            mark = document.values[(name,)]
            problems.append(document.problem(mark, f"`{name}` names no recipe", "give a recipe's name or file"))
        else:
            beside = file.parent / recipe
            recipes[str(name)] = str(beside) if beside.is_file() else recipe
    if not problems and not recipes:
        problems.append(Problem("the model repository names no model", "for example `small: builtin`", str(path)))
    if problems:
        raise RecipeError(problems)
    return recipes

"""`specdec recipe`: list, show, copy, validate, schema."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from specdec_cli.cli.completion import recipes
from specdec_cli.cli.help import Command, CommandGroup
from specdec_cli.cli.names import gate_problems, name_problems
from specdec_cli.cli.options import STRUCTURED_OPTIONS
from specdec_cli.cli.output import show_plan, write_file
from specdec_cli.cli.shared import Shared, draft_methods, with_shared_options
from specdec_cli.errors import ExitCode, UsageError
from specdec_cli.files import given_path
from specdec_cli.measure.documents.recipes import RecipeListDocument, RecipeValidationDocument
from specdec_cli.recipe import resolve_drafts, shipped
from specdec_cli.recipe.document import MAX_BYTES
from specdec_cli.recipe.present import json_schema, to_yaml
from specdec_cli.recipe.problems import SEVERAL_HINTS, RecipeError

_HELP = """List, show, copy and check recipes.

Examples:
    # List the shipped recipes.
    specdec recipe list
    # Start a recipe of your own.
    specdec recipe copy builtin mine.yaml
    # Check it.
    specdec recipe validate mine.yaml
"""
app = typer.Typer(
    cls=CommandGroup,
    help=_HELP,
    no_args_is_help=True,
    add_completion=False,
    suggest_commands=False,
)

_WRITES = ("json", "output", "force")
"""Paths of the options of commands that only write a document."""
Force = Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")]


@app.command("list", cls=Command)
@with_shared_options(only=_WRITES)
def list_(*, shared: Shared) -> None:
    """List the shipped recipes.

    Examples:
        # List the shipped recipes.
        specdec recipe list
        # List them as JSON.
        specdec recipe list --json
        # Write the list to a file.
        specdec recipe list --output recipes.json
    """
    recipes = shipped.list_recipes()
    rows = [{"name": recipe.name, "title": recipe.title, "path": str(recipe.path)} for recipe in recipes]
    width = max((len(recipe.name) for recipe in recipes), default=0)
    text = "".join(f"{recipe.name:<{width}}  {recipe.title}\n" for recipe in recipes)
    show_plan(None, {"recipes": rows}, shared, text, RecipeListDocument)


@app.command(cls=Command)
@with_shared_options(
    common="recipe origin set target draft num-speculative-tokens json output",
    aliases=True,
    without=["trust_remote_code"],
    beside=STRUCTURED_OPTIONS,
)
def show(
    name: Annotated[
        str | None,
        typer.Argument(help="A shipped recipe's name or a YAML file.", metavar="NAME|FILE", autocompletion=recipes),
    ] = None,
    origin: Annotated[bool, typer.Option("--origin", help="Show where each value comes from.")] = False,
    *,
    shared: Shared,
) -> None:
    """Print a recipe as it would run, with flags, --set, environment and defaults.

    Examples:
        # Show a shipped recipe.
        specdec recipe show builtin
        # Show where each value comes from.
        specdec recipe show mine.yaml --origin
        # Show what a flag changes.
        specdec recipe show builtin -k 6 --set sampling.temperature=0.7
    """
    if name is not None and shared.recipe not in (None, name):
        raise UsageError(f"two recipes are named: `{name}` and `--recipe {shared.recipe}`", "name one of them")
    shared.recipe = name or shared.recipe
    shared.takes_parallel = shared.takes_engine = True
    shared.loads_models = False
    resolved = shared.resolve(draws_seed=False)
    body: dict[str, Any] = {"origins": resolved.origins} if origin else {}
    show_plan(resolved.recipe.as_dict(), body, shared, to_yaml(resolved, origins=origin))


@app.command(cls=Command)
def copy(
    name: Annotated[str, typer.Argument(help="A shipped recipe's name.", metavar="NAME", autocompletion=recipes)],
    destination: Annotated[
        Path | None,
        typer.Argument(help="File or folder to write to; NAME.yaml in this folder by default.", metavar="FILE|DIR"),
    ] = None,
    force: Force = False,
) -> None:
    """Copy a shipped recipe so that you can change it.

    Examples:
        # Copy a recipe into this folder.
        specdec recipe copy builtin
        # Copy it under another name.
        specdec recipe copy builtin-ngram mine.yaml
        # Overwrite a file.
        specdec recipe copy builtin mine.yaml --force
    """
    source = shipped.find(name)
    path = given_path(destination) if destination is not None else Path(f"{source.stem}.yaml")
    path = path / f"{source.stem}.yaml" if path.is_dir() else path
    if path.exists() and not force:
        raise UsageError(f"`{path}` already exists", "name another file, or overwrite it with --force")
    if path.exists() and path.samefile(source):
        raise UsageError(f"`{path}` is the recipe itself", "name another file")
    if not path.resolve().parent.is_dir():
        raise UsageError(f"the folder of `{path}` does not exist", "make it first")
    content = shipped.read_bytes(source)
    if len(content) > MAX_BYTES:
        raise UsageError(f"the recipe `{source}` is larger than 1 MiB", "a recipe is a small YAML file")
    write_file(path, content, force)
    sys.stdout.write(f"{path}\n")


@app.command(cls=Command)
@with_shared_options(only=_WRITES)
def validate(
    files: Annotated[
        list[str], typer.Argument(help="Recipes: files or shipped names.", metavar="FILE...", autocompletion=recipes)
    ],
    *,
    shared: Shared,
) -> ExitCode:
    """Check recipes and report all errors with line and column. Exits with 2 if there are any.

    Examples:
        # Check a recipe.
        specdec recipe validate mine.yaml
        # Check several recipes.
        specdec recipe validate a.yaml b.yaml builtin
        # List the errors as JSON.
        specdec recipe validate mine.yaml --json
    """
    results = [_checked(file) for file in files]
    text = "".join(f"{result['file']}: valid\n" for result in results if result["valid"])
    show_plan(None, {"files": results}, shared, text, RecipeValidationDocument)
    problems = [error for result in results for error in result["errors"]]
    if problems:
        hints = {error["hint"] for error in problems if error["hint"]}
        message = "\n".join(error["message"] for error in problems)
        raise UsageError(message, hints.pop() if len(hints) == 1 else SEVERAL_HINTS)
    return ExitCode.DONE


def _checked(file: str) -> dict[str, Any]:
    errors: list[dict[str, Any]] = []
    try:
        resolved = resolve_drafts(file, methods=draft_methods())
        problems = [wrong for draft in resolved for wrong in name_problems(draft, is_here=False)]
        if problems := list(dict.fromkeys([*problems, *gate_problems(resolved[0])])):
            raise RecipeError(problems)
    except RecipeError as error:
        for problem in error.problems:
            line, column = problem.order if problem.where else (None, None)
            errors.append({"line": line, "column": column, "message": str(problem), "hint": problem.hint})
    except UsageError as error:
        errors.append({"line": None, "column": None, "message": error.message, "hint": error.hint})
    return {"file": file, "valid": not errors, "errors": errors}


@app.command(cls=Command)
def schema() -> None:
    """Print the JSON Schema of recipes, for editors.

    Examples:
        # Print the JSON Schema.
        specdec recipe schema
        # Write it for an editor.
        specdec recipe schema > recipe.schema.json
        # Print one section.
        specdec recipe schema | jq '.["$defs"].Sampling'
    """
    sys.stdout.write(json.dumps(json_schema(draft_methods()), indent=2, ensure_ascii=False) + "\n")

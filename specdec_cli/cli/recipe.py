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
from specdec_cli.cli.options import STRUCTURED_OPTIONS, Shared, draft_methods, expanded, with_shared_options
from specdec_cli.cli.output import check_destination, deliver, envelope, write_file
from specdec_cli.errors import ExitCode, UsageError
from specdec_cli.files import given_path
from specdec_cli.recipe import resolve_drafts, shipped
from specdec_cli.recipe.document import MAX_BYTES
from specdec_cli.recipe.present import json_schema, to_yaml
from specdec_cli.recipe.problems import RecipeError

app = typer.Typer(
    cls=CommandGroup,
    help="List, show, copy and check recipes.",
    no_args_is_help=True,
    add_completion=False,
    suggest_commands=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", help="Write the JSON document to this file.", metavar="FILE", callback=expanded),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")]


@app.command("list", cls=Command)
def list_(json: Json = False, output: Output = None, force: Force = False) -> None:
    """List the shipped recipes."""
    _check_output(output, force)
    recipes = shipped.list_recipes()
    rows = [{"name": recipe.name, "title": recipe.title, "path": str(recipe.path)} for recipe in recipes]
    _deliver("specdec.recipe-list/1", None, {"recipes": rows}, json, output, force)
    if not json:
        width = max((len(recipe.name) for recipe in recipes), default=0)
        sys.stdout.write("".join(f"{recipe.name:<{width}}  {recipe.title}\n" for recipe in recipes))


@app.command(cls=Command)
@with_shared_options(aliases=True, without=["trust_remote_code"], beside=STRUCTURED_OPTIONS)
def show(
    name: Annotated[
        str | None,
        typer.Argument(help="A shipped recipe's name or a YAML file.", metavar="NAME|FILE", autocompletion=recipes),
    ] = None,
    origin: Annotated[bool, typer.Option("--origin", help="Show where each value comes from.")] = False,
    *,
    shared: Shared,
) -> None:
    """Print a recipe as it would run, with flags, --set, environment and defaults."""
    if name is not None and shared.recipe not in (None, name):
        raise UsageError(f"two recipes are named: `{name}` and `--recipe {shared.recipe}`", "name one of them")
    shared.recipe = name or shared.recipe
    shared.takes_parallel = shared.takes_engine = True
    shared.loads_models = False
    resolved = shared.resolve(draws_seed=False)
    body: dict[str, Any] = {"origins": resolved.origins} if origin else {}
    document = resolved.recipe.as_dict()
    _deliver("specdec.recipe/1", document, body, shared.json, shared.output, shared.force)
    if not shared.json:
        sys.stdout.write(to_yaml(resolved, origins=origin))


@app.command(cls=Command)
def copy(
    name: Annotated[str, typer.Argument(help="A shipped recipe's name.", metavar="NAME", autocompletion=recipes)],
    destination: Annotated[
        Path | None,
        typer.Argument(help="File or folder to write to; NAME.yaml in this folder by default.", metavar="FILE|DIR"),
    ] = None,
    force: Force = False,
) -> None:
    """Copy a shipped recipe so that you can change it."""
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
def validate(
    files: Annotated[
        list[str], typer.Argument(help="Recipes: files or shipped names.", metavar="FILE...", autocompletion=recipes)
    ],
    json: Json = False,
    output: Output = None,
    force: Force = False,
) -> ExitCode:
    """Check recipes and report all errors with line and column. Exits with 2 if there are any."""
    _check_output(output, force)
    results = [_checked(file) for file in files]
    _deliver("specdec.recipe-validate/1", None, {"files": results}, json, output, force)
    problems = [error for result in results for error in result["errors"]]
    if not json:
        sys.stdout.write("".join(f"{result['file']}: valid\n" for result in results if result["valid"]))
    if problems:
        hint = "`specdec recipe schema` lists every key; `specdec recipe show NAME` prints a recipe that works"
        hints = {error["hint"] for error in problems if error["hint"]}
        message = "\n".join(error["message"] for error in problems)
        raise UsageError(message, hints.pop() if len(hints) == 1 else hint)
    return ExitCode.DONE


def _checked(file: str) -> dict[str, Any]:
    errors: list[dict[str, Any]] = []
    try:
        resolved = resolve_drafts(file, methods=draft_methods())
        problems = [wrong for one in resolved for wrong in name_problems(one, is_here=False)]
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
    """Print the JSON Schema of recipes, for editors."""
    sys.stdout.write(json.dumps(json_schema(draft_methods()), indent=2, ensure_ascii=False) + "\n")


def _check_output(output: Path | None, force: bool) -> None:
    """Refuse a file that could not be written, and `--force` without one."""
    if force and output is None:
        raise UsageError("`--force` has no effect without --output", "name the file: --output FILE --force")
    check_destination(output, force)


def _deliver(
    schema_name: str,
    recipe: dict[str, Any] | None,
    body: dict[str, Any],
    to_stdout: bool,
    path: Path | None,
    force: bool,
) -> None:
    if to_stdout or path is not None:
        deliver(envelope(schema_name, recipe, body), to_stdout=to_stdout, path=path, force=force)

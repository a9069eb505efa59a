"""Names in a recipe that lead nowhere, found before torch is imported: models, drafts, data sets, fields of gates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specdec_cli import drafters
from specdec_cli.errors import UsageError
from specdec_cli.files import given_path, read_text
from specdec_cli.lm.files.names import BUILTIN, check_generation_config, check_name, check_own_name, check_word
from specdec_cli.recipe.problems import Path, Problem

if TYPE_CHECKING:
    from specdec_cli.recipe import Recipe, Resolved

PROMPT_FILE = "--prompt-file"


def name_problems(resolved: Resolved, *, is_here: bool) -> list[Problem]:
    """Faults of a recipe's names.

    Args:
        resolved: the recipe.
        is_here: its models are loaded on this machine; else only names of this package are checked.
    """
    found = []
    for path, check in _checks(resolved, is_here):
        try:
            check()
        except UsageError as error:
            found.append(resolved.problem(path, error))
    return found


def _checks(resolved: Resolved, is_here: bool) -> Iterator[tuple[Path, Callable[[], None]]]:
    from specdec_cli.measure.workload.dataset import check_dataset_name, check_prompt_file

    recipe = resolved.recipe
    for path, name, words in (
        (("target", "model"), recipe.target.model, BUILTIN),
        (("draft", "model"), recipe.draft.model, [*drafters.methods(), *BUILTIN]),
        (("train", "start_from"), recipe.train.start_from, ()),
    ):
        if name is not None:
            yield path, lambda name=name, words=words: _check_model(name, words, is_here)  # type: ignore[misc]
    if is_here:
        yield from _checks_of_files(recipe)
    for path, name in ((("workload", "dataset"), recipe.workload.dataset), (("train", "data"), recipe.train.data)):
        if name is not None:
            is_file = resolved.origins.get(".".join(path)) == f"flag {PROMPT_FILE}"
            check = check_prompt_file if is_file else check_dataset_name
            yield path, lambda name=name, check=check: check(name)  # type: ignore[misc]


def _checks_of_files(recipe: Recipe) -> Iterator[tuple[Path, Callable[[], None]]]:
    """Files that the target is loaded with; for another engine they lie where that engine runs."""
    from specdec_cli.text.chat_template import check_template

    target, schema = recipe.target, recipe.structured.json_schema
    yield ("target", "generation_config"), lambda: check_generation_config(target.generation_config)
    if target.chat_template is not None:
        template = target.chat_template
        yield ("target", "chat_template"), lambda: check_template(template)
    if isinstance(schema, str):
        yield ("structured", "json_schema"), lambda: _check_file(schema, f"the JSON Schema `{schema}`")


def _check_file(name: str, what: str) -> None:
    read_text(given_path(name), what)


def _check_model(name: str, words: Sequence[str], is_here: bool) -> None:
    if not is_here:
        check_own_name(name)
        return
    check_name(name)
    check_word(name, words, "there are")


def gate_problems(resolved: Resolved) -> list[Problem]:
    """Gates on fields that no command's document has."""
    from specdec_cli.measure.gates import parse_all, path_problem

    found, schemas = [], _schemas()
    for place, gate in enumerate(parse_all(resolved.recipe.gates.fail_if)):
        problems = [path_problem(gate, schema, None) for schema in schemas]
        if None not in problems:
            said = next((one for one in problems if one and "did you mean" in one), problems[0])
            found.append(resolved.problem(("gates", "fail_if", place), UsageError(f"`{gate}`: {said}")))
    return found


def _schemas() -> list[Mapping[str, Any]]:
    """The documents that gates judge, `bench`'s first."""
    from specdec_cli.report import bench, bench_endpoint, compare_drafts, imported, sweep_k

    return [module.json_schema() for module in (bench, sweep_k, compare_drafts, bench_endpoint, imported)]

"""Names in a recipe that lead nowhere, found before torch is imported: models, drafts, data sets, fields of gates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from specdec_cli import drafters
from specdec_cli.cli.structured import schema_text
from specdec_cli.errors import UsageError
from specdec_cli.lm.files.names import (
    BUILTIN,
    check_generation_config,
    check_name,
    check_native,
    check_own_name,
    check_word,
)
from specdec_cli.recipe.problems import Path, Problem

if TYPE_CHECKING:
    from specdec_cli.recipe import Recipe, Resolved
    from specdec_cli.recipe.schema import Target

PROMPT_FILE = "--prompt-file"


def name_problems(resolved: Resolved, *, is_here: bool) -> list[Problem]:
    """Faults of a recipe's names.

    Args:
        resolved: the recipe.
        is_here: its models are loaded on this machine; else only names of this package are checked.
    """
    problems = []
    for path, check in _checks(resolved, is_here):
        try:
            check()
        except UsageError as error:
            problems.append(resolved.problem(path, error))
    return problems


def _checks(resolved: Resolved, is_here: bool) -> Iterator[tuple[Path, Callable[[], object]]]:
    from specdec_cli.measure.workload.dataset import check_dataset_name, check_prompt_file

    recipe = resolved.recipe
    for path, name, words in (
        (("target", "model"), recipe.target.model, BUILTIN),
        (("draft", "model"), recipe.draft.model, [*drafters.methods(), *BUILTIN]),
        (("train", "start_from"), recipe.train.start_from, ()),
    ):
        if name is not None:
            yield path, partial(_check_model, name, words, is_here, path[0] == "target")
    if is_here:
        yield from _checks_of_files(recipe)
    for path, name in ((("workload", "dataset"), recipe.workload.dataset), (("train", "data"), recipe.train.data)):
        if name is not None:
            is_file = resolved.origins.get(".".join(path)) == f"flag {PROMPT_FILE}"
            check = check_prompt_file if is_file else check_dataset_name
            yield path, lambda name=name, check=check: check(name)  # type: ignore[misc]


def _checks_of_files(recipe: Recipe) -> Iterator[tuple[Path, Callable[[], object]]]:
    """Files that the target is loaded with; for another engine they lie where that engine runs."""
    from specdec_cli.text.chat_template import check_template

    target, schema = recipe.target, recipe.structured.json_schema
    for role, model in (("target", target), ("draft", recipe.draft)):
        if model.compute == "native" and model.model is not None:
            name, decoder = model.model, recipe.engine.decoder
            yield (role, "compute"), partial(check_native, name, model, decoder)
    yield ("target", "generation_config"), lambda: check_generation_config(target.generation_config)
    if target.chat_template is not None:
        template = target.chat_template
        yield ("target", "chat_template"), lambda: check_template(template)
    if target.default_chat_template_kwargs:
        yield ("target", "default_chat_template_kwargs"), lambda: _check_variables(target)
    if isinstance(schema, str):
        yield ("structured", "json_schema"), lambda: schema_text(schema)


def _check_variables(target: Target) -> None:
    """Variables for every conversation, by the target's chat template if that is here."""
    from specdec_cli.lm.files.chat_templates import chat_templates
    from specdec_cli.text.chat_template import check_variables, named_template

    template, name = target.chat_template, str(target.model)
    templates = chat_templates(name) if template is None else [named_template(template)]
    if templates is not None and target.load_format == "auto":
        check_variables(target.default_chat_template_kwargs or (), templates, name)


def _check_model(name: str, words: Sequence[str], is_here: bool, is_target: bool) -> None:
    from specdec_cli.lm.files.model_folder import check_local_files

    if not is_here:
        check_own_name(name, words)
        return
    check_name(name, words)
    check_word(name, words, "there are")
    check_local_files(name, is_target)


def gate_problems(resolved: Resolved) -> list[Problem]:
    """Gates on fields that no command's document has."""
    from specdec_cli.measure.gates import parse_all, path_problem

    problems, schemas = [], _schemas()
    for place, gate in enumerate(parse_all(resolved.recipe.gates.fail_if)):
        messages = [path_problem(gate, schema, None) for schema in schemas]
        if None not in messages:
            message = next((problem for problem in messages if problem and "did you mean" in problem), messages[0])
            problems.append(resolved.problem(("gates", "fail_if", place), UsageError(f"`{gate}`: {message}")))
    return problems


def _schemas() -> list[Mapping[str, Any]]:
    """The documents that gates judge, `bench`'s first."""
    from specdec_cli.measure.documents.bench import BenchDocument
    from specdec_cli.measure.documents.compare_drafts import CompareDocument
    from specdec_cli.measure.documents.endpoint import EndpointDocument
    from specdec_cli.measure.documents.sweep_k import SweepDocument
    from specdec_cli.measure.imported.record import ImportDocument

    judged = (BenchDocument, SweepDocument, CompareDocument, EndpointDocument, ImportDocument)
    return [document.json_schema() for document in judged]

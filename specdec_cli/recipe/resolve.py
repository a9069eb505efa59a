"""From a recipe's name or file, `--set`, environment and flags to one checked recipe that knows its origins."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from specdec_cli.errors import UsageError
from specdec_cli.recipe import layers, shipped
from specdec_cli.recipe.aliases import meant_key
from specdec_cli.recipe.document import Document, read_document
from specdec_cli.recipe.draft import DraftMethods, draft_problems, fill_draft
from specdec_cli.recipe.implied import fill_implied, implied_problems
from specdec_cli.recipe.keys import section_class
from specdec_cli.recipe.layers import Assignment, Tree, problem_at
from specdec_cli.recipe.problems import Path, Problem, RecipeError, sentence
from specdec_cli.recipe.schema import Recipe, Section


@dataclass(frozen=True, slots=True)
class Resolved:
    """A checked recipe.

    Args:
        recipe: its values.
        origins: `section.key` to `flag --k`, `environment NAME`, `recipe FILE:LINE` or `default`.
        source: the recipe's file in messages, or None without one.
        built_in_pair: whether no target is named.
        tree: where each value was given.
    """

    recipe: Recipe
    origins: dict[str, str] = field(default_factory=dict)
    source: str | None = None
    built_in_pair: bool = False
    tree: Tree = field(default_factory=Tree, repr=False, compare=False)

    def problem(self, path: Path, error: UsageError) -> Problem:
        """The fault of a value, which stands where it was given."""
        return problem_at(self.tree.origin(path), error.message, error.hint)


def resolve(
    name: str | os.PathLike[str] | None = None,
    sets: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, tuple[Any, str]] | None = None,
    methods: DraftMethods | None = None,
) -> Resolved:
    """Read, lay over each other and check: flag > `--set` > environment > recipe > default.

    Args:
        name: a shipped recipe's name or a file; None starts from the defaults.
        sets: `key.path=value`, the last of equal ones wins.
        environment: variables; None reads none.
        flags: path to (value, option's name); `draft` takes what `--draft` means as a mapping.
        methods: drafting methods; without them a draft's method and options are taken as they are.

    Raises:
        RecipeError: everything that is wrong, in order of position.
    """
    return resolve_document(read_recipe(name), sets, environment, flags, methods)


def resolve_document(
    document: Document | None,
    sets: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, tuple[Any, str]] | None = None,
    methods: DraftMethods | None = None,
) -> Resolved:
    """As `resolve`, of a recipe that was read already.

    Raises:
        RecipeError: everything that is wrong, in order of position.
    """
    tree = layers.from_document(document) if document else Tree()
    problems = list(document.problems) if document else []
    problems += _problems_of_file(document, tree, methods) if document else []
    variables, wrong_variables = layers.from_environment(environment or {}, _option_names(methods))
    overrides, wrong = layers.from_sets(sets)
    overrides += layers.from_flags(flags or {})
    problems += wrong_variables + wrong
    for assignments in (variables, overrides):
        problems += _problems_of_layer(assignments)
    if problems:
        raise RecipeError(problems)
    layers.lay_over(tree, variables)
    layers.lay_over(tree, overrides)
    return _finish(tree, document.source if document else None, methods)


def read_recipe(name: str | os.PathLike[str] | None) -> Document | None:
    """A recipe's text with its positions; None without a name.

    Raises:
        UsageError: no such recipe, or a file that cannot be read.
        RecipeError: it is no YAML.
    """
    if name is None:
        return None
    path = shipped.find(name)
    return read_document(shipped.read_bytes(path), str(name) if str(path) == str(name) else path.name)


def _option_names(methods: DraftMethods | None) -> list[str]:
    return [name for method in methods.names for name in methods.options(method)] if methods else []


def _problems_of_layer(assignments: Sequence[Assignment]) -> list[Problem]:
    """Problems of the overrides alone; whole sections separately, so that their keys hide nothing."""
    problems = []
    for is_section in (True, False):
        alone = Tree()
        for assignment in assignments:
            if (len(assignment.path) == 1) is is_section:
                alone.assign(assignment)
        problems += check(alone)[1]
    return problems


def _problems_of_file(document: Document, tree: Tree, methods: DraftMethods | None) -> list[Problem]:
    """Problems of the file alone, so that an override never hides them."""
    recipe, problems = check(tree, document.refused)
    if recipe is not None and not problems:
        complete = Tree(copy.deepcopy(tree.values), dict(tree.origins), dict(tree.keys))
        problems = _finish_problems(complete, recipe, methods)
    return problems


def _finish(tree: Tree, source: str | None, methods: DraftMethods | None) -> Resolved:
    built_in = "model" not in (tree.values.get("target") or {})
    fill_draft(tree, built_in, methods)
    fill_implied(tree)
    recipe, problems = check(tree)
    if recipe is not None and not problems:
        problems = draft_problems(recipe.draft, tree, methods) + _cross_problems(recipe, tree)
    if problems or recipe is None:
        raise RecipeError(problems)
    return Resolved(recipe, _origins(recipe, tree), source, built_in, tree)


def _finish_problems(tree: Tree, recipe: Recipe, methods: DraftMethods | None) -> list[Problem]:
    try:
        _finish(tree, None, methods)
    except RecipeError as error:
        return error.problems
    return []


def check(tree: Tree, refused: set[Path] | None = None) -> tuple[Recipe | None, list[Problem]]:
    """The recipe of a tree, or what is wrong with types, ranges and names.

    Args:
        tree: raw values.
        refused: paths that were complained about already.
    """
    values = dict(tree.values)
    problems = [layers.never_trusted(tree.subject(path), tree.key_origin(path)) for path in _trust_paths(values)]
    if isinstance(values.get("draft"), list):
        hint = "give one mapping with `model` or `method`; `specdec compare-drafts` compares several"
        problems.append(tree.problem(("draft",), "is a list of drafts, which only `compare-drafts` takes", hint))
        values.pop("draft")
    try:
        return Recipe.model_validate(values), problems
    except ValidationError as error:
        for fault in error.errors(include_url=False):
            path = tuple(key for key in fault["loc"] if key != "[key]")
            hidden = refused is not None and any(path[: len(above)] == above for above in refused)
            if not hidden and path[-1] != "trust_remote_code":
                problems.append(_described(tree, path, fault))
        return None, problems


def _trust_paths(values: Mapping[Any, Any]) -> list[Path]:
    word = "trust_remote_code"
    inner = [(name, word) for name, section in values.items() if isinstance(section, dict) and word in section]
    return [*([(word,)] if word in values else []), *inner]


def _described(tree: Tree, path: Path, fault: Any) -> Problem:
    unknown = fault["type"] == "extra_forbidden"
    origin = tree.key_origin(path) if unknown else tree.origin(path)
    subject = tree.subject(path)
    if unknown and (origin is None or origin.subject is None):
        subject = f"`{path[0]}`" if len(path) > 1 else "the recipe"
    known = _known_keys(path)
    message = sentence(fault, subject, known)
    if unknown:
        section = str(path[0]) if len(path) > 1 else None
        message = f"unknown key `{path[-1]}` in {subject}{meant_key(section, path[-1], known)}"
    return problem_at(origin, message)


def _known_keys(path: Path) -> list[str]:
    owner: type[Section] | None = section_class(str(path[0])) if len(path) > 1 else Recipe
    return list(owner.model_fields) if owner else []


def _cross_problems(recipe: Recipe, tree: Tree) -> list[Problem]:
    """Keys that contradict each other."""
    return [
        *_unused_p_min(recipe, tree),
        *_no_draft_but_a_table(recipe, tree),
        *_greedy_that_samples(recipe, tree),
        *_more_than_all(recipe, tree),
        *_sure_of_everything(recipe, tree),
        *_several_structures(recipe, tree),
        *implied_problems(recipe, tree),
    ]


def _unused_p_min(recipe: Recipe, tree: Tree) -> list[Problem]:
    p_min, policy = ("speculation", "p_min"), ("speculation", "depth_policy")
    message = recipe.speculation.depth_policy
    if message != "confidence" and tree.layer(p_min) and tree.layer(p_min) >= tree.layer(policy):
        hint = "set depth_policy to confidence (--depth-policy confidence), or leave p_min out"
        return [tree.problem(p_min, f"has no effect with depth_policy `{message}`", hint)]
    return []


def _no_draft_but_a_table(recipe: Recipe, tree: Tree) -> list[Problem]:
    problems = []
    for key in ("k_by_batch", "k_by_context"):
        drafting = next((k for _, k in getattr(recipe.speculation, key) or () if k), 0)
        if drafting and not recipe.speculation.num_speculative_tokens:
            k = tree.subject(("speculation", "num_speculative_tokens"))
            message = f"drafts `{drafting}` tokens, and {k} `0` decodes without a draft"
            problems.append(tree.problem(("speculation", key), message, "leave one of them out"))
    return problems


def _greedy_that_samples(recipe: Recipe, tree: Tree) -> list[Problem]:
    """The engine refuses this too; here it is known before a model is loaded."""
    mode, temperature_path = ("speculation", "verify"), ("sampling", "temperature")
    temperature = recipe.sampling.temperature
    if recipe.speculation.verify != "greedy" or temperature == 0:
        return []
    hint = "use verify `auto`, or temperature 0"
    if tree.layer(temperature_path) > tree.layer(mode):
        return [tree.problem(temperature_path, f"`{temperature:g}` does not fit verification mode `greedy`", hint)]
    return [tree.problem(mode, f"`greedy` does not fit temperature `{temperature:g}`", hint)]


def _sure_of_everything(recipe: Recipe, tree: Tree) -> list[Problem]:
    """Only a draft model has probabilities to be unsure by."""
    if recipe.speculation.depth_policy != "confidence" or recipe.draft.model is not None:
        return []
    message = (
        f"`{recipe.speculation.depth_policy}` needs a draft model, and draft method `{recipe.draft.method}` is not one"
    )
    return [tree.problem(("speculation", "depth_policy"), message, "use depth_policy `fixed`, or name a draft model")]


def _several_structures(recipe: Recipe, tree: Tree) -> list[Problem]:
    keys = list(recipe.structured.given)
    if len(keys) < 2:
        return []
    first, second = (tree.subject(("structured", key)) for key in keys[:2])
    message = f"and {f'`structured.{keys[0]}`' if first == second else first} exclude each other"
    return [tree.problem(("structured", keys[1]), message, "an output follows one of them: leave the other out")]


def _more_than_all(recipe: Recipe, tree: Tree) -> list[Problem]:
    sampling, least, most = recipe.sampling, ("sampling", "min_tokens"), ("sampling", "max_new_tokens")
    if sampling.min_tokens <= sampling.max_new_tokens:
        return []
    hint = "lower min_tokens, or raise max_new_tokens"
    if tree.layer(most) > tree.layer(least):
        message = f"`{sampling.max_new_tokens}` is below min_tokens `{sampling.min_tokens}`"
        return [tree.problem(most, message, hint)]
    return [tree.problem(least, f"`{sampling.min_tokens}` is above max_new_tokens `{sampling.max_new_tokens}`", hint)]


def _origins(recipe: Recipe, tree: Tree) -> dict[str, str]:
    origins = {}
    for section, keys in recipe.as_dict().items():
        for key in keys:
            origin = tree.origins.get((section, key))
            origins[f"{section}.{key}"] = origin.label if origin else "default"
    return origins

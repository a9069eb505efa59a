"""Where values come from: the recipe's file, the environment, `--set` and flags, laid over each other with origins."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec_cli.errors import did_you_mean
from specdec_cli.recipe.aliases import why_removed
from specdec_cli.recipe.document import Document, plain_value, read_document
from specdec_cli.recipe.keys import kinds_of, section_class
from specdec_cli.recipe.problems import OPTION, Path, Problem, RecipeError
from specdec_cli.recipe.schema import MODEL_KEYS, OF_ONE_TARGET, Draft, Recipe, Structured

PREFIX = "SPECDEC_"
_OTHERS = {"SPECDEC_API_KEY", "SPECDEC_DEBUG"}
RECIPE, ENVIRONMENT, OVERRIDE = 1, 2, 3
"""Layers, the higher ones win; `--set` and flags are one layer in which the flag has the last word."""


@dataclass(frozen=True, slots=True)
class ValueOrigin:
    """Layer and place in which a value was given.

    Args:
        layer: RECIPE, ENVIRONMENT or OVERRIDE.
        label: for people: `recipe FILE:LINE`, `environment NAME`, `flag --k`.
        subject: what a message calls it, in backticks; None for a key of the recipe's file.
        where: `file:line:column`, or None outside a file.
        order: sorts messages.
    """

    layer: int
    label: str
    subject: str | None = None
    where: str | None = None
    order: tuple[int, int] = (1 << 30, 0)


def problem_at(origin: ValueOrigin | None, message: str, hint: str | None = None) -> Problem:
    """A problem that stands where a value or key was given."""
    return Problem(message, hint, origin.where, origin.order) if origin else Problem(message, hint)


@dataclass(frozen=True, slots=True)
class Assignment:
    """A value for one path, from the environment or the command line."""

    path: Path
    value: Any
    origin: ValueOrigin


@dataclass(slots=True)
class Tree:
    """Raw values by section and key, and the origin of each path."""

    values: dict[Any, Any] = field(default_factory=dict)
    origins: dict[Path, ValueOrigin] = field(default_factory=dict)
    keys: dict[Path, ValueOrigin] = field(default_factory=dict)

    def origin(self, path: Path) -> ValueOrigin | None:
        """The origin of a path, of the nearest one above it, or of what made it by standing below it."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.origins:
                return self.origins[path[:end]]
        return next((origin for known, origin in self.origins.items() if known[: len(path)] == path), None)

    def layer(self, path: Path) -> int:
        """The layer that gave a path; 0 for a default."""
        origin = self.origins.get(path)
        return origin.layer if origin else 0

    def key_origin(self, path: Path) -> ValueOrigin | None:
        """Origin of a path's key, or of its value."""
        return self.keys.get(path) or self.origin(path)

    def subject(self, path: Path) -> str:
        """The name of a path in messages: the flag or variable that set it, or the key."""
        origin = self.origin(path)
        return origin.subject if origin and origin.subject else f"`{'.'.join(map(str, path))}`"

    def problem(self, path: Path, message: str, hint: str | None = None) -> Problem:
        """A problem with a value; the message goes on after what names it."""
        return problem_at(self.origin(path), f"{self.subject(path)} {message}", hint)

    def assign(self, assignment: Assignment) -> None:
        """Put a value at its path and forget the origins below it."""
        inner = self.values
        for key in assignment.path[:-1]:
            if not isinstance(inner.get(key), dict):
                inner[key] = {}
            inner = inner[key]
        inner[assignment.path[-1]] = assignment.value
        self._forget(assignment.path)
        self.origins[assignment.path] = assignment.origin

    def drop(self, path: Path) -> None:
        """Take a key out of its section, if it is there."""
        section = self.values.get(path[0])
        if isinstance(section, dict):
            section.pop(path[1], None)
        self._forget(path)

    def _forget(self, path: Path) -> None:
        for table in (self.origins, self.keys):
            for known in [known for known in table if known[: len(path)] == path]:
                del table[known]


def from_document(document: Document) -> Tree:
    """The tree of a recipe's file."""

    def origin(line: int, column: int) -> ValueOrigin:
        label = f"recipe {document.source}:{line}"
        return ValueOrigin(RECIPE, label, None, f"{document.source}:{line}:{column}", (line, column))

    tree = Tree(document.value if isinstance(document.value, dict) else {})
    tree.origins = {path: origin(mark.line, mark.column) for path, mark in document.values.items() if path}
    tree.keys = {path: origin(mark.line, mark.column) for path, mark in document.keys.items()}
    if tree.values.get("draft", ...) is None and ("draft",) not in document.refused:
        tree.assign(*_parts(("draft",), None, tree.origins["draft",]))
    return tree


def from_environment(environment: Mapping[str, str], options: Iterable[str]) -> tuple[list[Assignment], list[Problem]]:
    """The values of `SPECDEC_<SECTION>_<KEY>` variables. Empty ones are ignored.

    Args:
        environment: the process's variables.
        options: names of drafting methods' options, which are keys of the draft.
    """
    known = _variables(options)
    assignments, problems = [], []
    for name in sorted(name for name in environment if name.startswith(PREFIX) and name not in _OTHERS):
        if not environment[name]:
            continue
        path = known.get(name)
        origin = ValueOrigin(ENVIRONMENT, f"environment {name}", f"`{name}`", order=(1 << 30, 1))
        if path is not None:
            try:
                assignments.append(Assignment(path, _typed(path, environment[name], origin), origin))
            except RecipeError as error:
                problems += error.problems
        elif _is_meant(name, known):
            problems.append(_unknown_variable(name, known, origin))
    return assignments, problems


def _variables(options: Iterable[str]) -> dict[str, Path]:
    names: dict[str, Path] = {}
    for section in Recipe.model_fields:
        owner = section_class(section)
        keys = [*(owner.model_fields if owner else ()), *(options if owner is Draft else ())]
        names |= {f"{PREFIX}{section}_{key}".upper(): (section, key) for key in keys}
    return names


def _is_meant(name: str, known: Mapping[str, Path]) -> bool:
    """Whether a variable looks as if it were for a recipe's key: it names a section, or is close to one that exists."""
    sections = [f"{PREFIX}{section}".upper() for section in Recipe.model_fields]
    if any(name == section or name.startswith(f"{section}_") for section in sections):
        return True
    return bool(difflib.get_close_matches(name, list(known), n=1, cutoff=0.85))


def _unknown_variable(name: str, known: Mapping[str, Path], origin: ValueOrigin) -> Problem:
    if name.endswith("TRUST_REMOTE_CODE"):
        return never_trusted(f"the environment variable `{name}`", origin)
    meant = why_removed(name.removeprefix(PREFIX)) or did_you_mean(name, known)
    message = f"environment variable `{name}` names no key of a recipe{meant}"
    return problem_at(origin, message, f"`unset {name}`, or correct its name")


def unread_variables(environment: Mapping[str, str], read: Iterable[str] = ()) -> list[str]:
    """A sentence for each `SPECDEC_` variable that nothing reads and that `from_environment` lets pass.

    Args:
        environment: the process's variables.
        read: names of variables that something else reads.
    """
    known = _variables(())
    names = sorted(set(environment) - _OTHERS - set(read))
    return [
        f"environment variable `{name}` is ignored: it is not a recipe's key, `{PREFIX}SECTION_KEY`"
        for name in names
        if name.startswith(PREFIX) and environment[name] and name not in known and not _is_meant(name, known)
    ]


def never_trusted(subject: str, origin: ValueOrigin | None) -> Problem:
    """Code from a checkpoint runs only when the person at the terminal says so."""
    message = f"{subject} is refused: trust_remote_code is never taken from a recipe"
    hint = "give --trust-remote-code on the command line if you trust the model's code"
    return problem_at(origin, message, hint)


def from_sets(sets: Sequence[str]) -> tuple[list[Assignment], list[Problem]]:
    """The values of `--set key.path=value`."""
    assignments, problems = [], []
    for text in sets:
        name, equals, value = text.partition("=")
        path: Path = tuple(name.strip().split("."))
        origin = ValueOrigin(OVERRIDE, "flag --set", f"`--set {name.strip()}`", order=(1 << 30, 2))
        if not equals or not all(path) or not name.isascii():
            hint = "for example `--set sampling.temperature=0.7`"
            problems.append(Problem(f"`--set {text}` is not KEY.PATH=VALUE", hint, order=origin.order))
            continue
        try:
            assignments += _parts(path, _typed(path, value.strip(), origin), origin)
        except RecipeError as error:
            problems += error.problems
    return assignments, problems


def from_flags(flags: Mapping[str, tuple[Any, str]]) -> list[Assignment]:
    """The values of options: path to value and option name. A mapping for a whole section counts key by key."""
    assignments = []
    for name, (value, flag) in flags.items():
        path: Path = tuple(name.split("."))
        kind = "flag" if flag.startswith("-") else "argument"
        origin = ValueOrigin(OVERRIDE, f"{kind} {flag}", f"`{flag}`", order=OPTION)
        assignments += _parts(path, value, origin)
    return assignments


def _parts(path: Path, value: Any, origin: ValueOrigin) -> list[Assignment]:
    """A whole section counts key by key; a draft of null is no draft."""
    if path == ("draft",) and value is None:
        return [Assignment(("draft", "method"), "none", origin)]
    if len(path) == 1 and isinstance(value, dict):
        return [Assignment((*path, key), item, origin) for key, item in value.items()]
    return [Assignment(path, value, origin)]


def _typed(path: Path, text: str, origin: ValueOrigin) -> Any:
    """A value from the environment or `--set`: a YAML scalar, or a list or mapping in brackets."""
    if text[:1] in ("'", '"') or (text[:1] in ("[", "{") and not _is_text(path)):
        subject = origin.subject or ""
        try:
            document = read_document(f"value: {text}".encode(errors="surrogatepass"), subject)
        except RecipeError as error:
            document = Document(subject, problems=error.problems)
        if document.problems:
            message = document.problems[0].message.removeprefix("not YAML: ")
            raise RecipeError([Problem(f"{subject} is not a value in YAML: {message}", None, order=origin.order)])
        return document.value["value"]
    value = plain_value(text)
    return text if isinstance(value, int | float) and _is_text(path) else value


def _is_text(path: Path) -> bool:
    """Whether a key takes text and no number, so that `123` needs no quotes in a variable."""
    return len(path) == 2 and kinds_of(f"{path[0]}.{path[1]}") == {str}


def lay_over(tree: Tree, assignments: Sequence[Assignment]) -> None:
    """Lay one layer over what lies below.

    Naming another model drops the old one's revision and the recipe's conversation settings. Naming another
    draft drops the old method and its options, and a method drops everything about how the old model was
    loaded. Who gives k means no table of k from below. Who gives synthetic acceptance or structured output in one form
    means none of the others.
    """
    named = {assignment.path for assignment in assignments}
    if ("target", "model") in named:
        tree.drop(("target", "revision"))
        for path in [("target", key) for key in OF_ONE_TARGET]:
            if tree.layer(path) == RECIPE:
                tree.drop(path)
    if names := named & {("draft", "model"), ("draft", "method")}:
        section = tree.values.get("draft")
        kept = set(MODEL_KEYS) - {"revision"} if ("draft", "model") in names else set()
        for key in [key for key in section if key not in kept] if isinstance(section, dict) else ():
            tree.drop(("draft", key))
    k, table = (("speculation", key) for key in ("num_speculative_tokens", "k_by_batch"))
    if k in named and table not in named:
        tree.drop(table)
    length, rates = (("speculation", f"synthetic_acceptance_{form}") for form in ("length", "rates"))
    for form, other in ((length, rates), (rates, length)):
        if form in named and other not in named:
            tree.drop(other)
    forms = {("structured", key) for key in Structured.model_fields}
    for path in forms - named if forms & named else ():
        tree.drop(path)
    for assignment in assignments:
        tree.assign(assignment)

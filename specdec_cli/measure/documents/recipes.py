"""Documents about recipes: as they would run, listed, checked, and exported to other engines."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import ConfigDict

from specdec_cli.document import Count, Result, ResultDocument


class EndpointPlanFacts(Result):
    """The server that would be asked."""

    url: str
    path: str
    model: str | None
    model_from: str


class PlanDocument(ResultDocument):
    """A recipe, and the run that a command would make of it; each command has keys of its own."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=False)
    schema_name: ClassVar[str] = "specdec.recipe/1"

    origins: dict[str, str] | None = None
    num_prompts: Count | None = None
    arms: list[str] | None = None
    drafts: list[str] | None = None
    k_max: Count | None = None
    exhaustive: bool | None = None
    repeats: Count | None = None
    batch_size: Count | None = None
    batch_sizes: list[Count] | None = None
    trees: list[str] | None = None
    endpoint: EndpointPlanFacts | None = None
    fields: dict[str, Any] | None = None
    extra_body: dict[str, Any] | None = None
    concurrency: Count | None = None
    request_rate: float | None = None
    servers: list[str] | None = None
    command: str | None = None
    commands: dict[str, str] | None = None
    engine_command: str | None = None
    plan: dict[str, Any] | None = None


class ServedModelPlan(Result):
    """A model that would be served: its first name stands in answers."""

    name: str
    names: list[str]
    recipe: dict[str, Any]
    origins: dict[str, str]


class ServePlanDocument(ResultDocument):
    """Models that a server would have; with another engine none, and the command line of that engine."""

    schema_name: ClassVar[str] = "specdec.serve-plan/1"

    models: list[ServedModelPlan]
    command: str | None = None


class ShippedRecipe(Result):
    """A recipe that comes with the package."""

    name: str
    title: str
    path: str


class RecipeListDocument(ResultDocument):
    """The shipped recipes."""

    schema_name: ClassVar[str] = "specdec.recipe-list/1"

    recipes: list[ShippedRecipe]


class RecipeProblem(Result):
    """An error in a file, at its place where that is known."""

    line: int | None
    column: int | None
    message: str
    hint: str | None


class CheckedRecipe(Result):
    """A file, and the errors in it."""

    file: str
    valid: bool
    errors: list[RecipeProblem]


class RecipeValidationDocument(ResultDocument):
    """Files that were checked."""

    schema_name: ClassVar[str] = "specdec.recipe-validate/1"

    files: list[CheckedRecipe]


class ExportDocument(ResultDocument):
    """A recipe as another engine's configuration."""

    schema_name: ClassVar[str] = "specdec.export/1"

    engine: str
    files: dict[str, str]
    warnings: list[str]
    next_command: str | None

"""Drafts against their target, by configurations alone: the method of each, and what the target must have for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from specdec_cli import drafters
from specdec_cli.drafters.contract import Drafter
from specdec_cli.engine.heads import own_modules, published_draft, published_fields
from specdec_cli.engine.loading import LoadSettings, model_settings
from specdec_cli.errors import UsageError, WeightsError
from specdec_cli.files import given_path
from specdec_cli.lm.files.architecture import check_architecture
from specdec_cli.lm.files.checkpoint import clear_errors, model_folder, read_config
from specdec_cli.lm.files.dummy import is_dummy
from specdec_cli.lm.files.reading import quiet, read_object
from specdec_cli.lm.files.weights_files import check_numbers, check_weights
from specdec_cli.lm.load import check_target

if TYPE_CHECKING:
    from specdec_cli.recipe.schema import Recipe


def check_recipe(recipe: Recipe, *, trust_remote_code: bool = False) -> None:
    """Refuse a recipe's draft that its target cannot have, before their weights are read.

    Raises:
        UsageError: an unknown method or option, or a draft that does not fit.
        RunError: a configuration that cannot be read.
    """
    settings = LoadSettings(
        target=model_settings(recipe.target),
        draft=model_settings(recipe.draft),
        max_model_len=recipe.engine.max_model_len,
        trust_remote_code=trust_remote_code,
    )
    fields = named_fields(recipe.draft_fields(), recipe.target.model, settings)
    checked_drafters(recipe.target.model, [fields], settings)


@contextmanager
def draft_weights() -> Iterator[None]:
    """Make weights that are not a draft's an input error, as a draft head's are.

    Raises:
        UsageError: in the place of a WeightsError.
    """
    try:
        yield
    except WeightsError as error:
        raise UsageError(error.message, error.hint) from error


def check_draft_numbers(name: str, revision: str | None = None, trust_remote_code: bool = False) -> None:
    """See that the weights of a draft model are finite numbers: with others it would only never be accepted.

    Args:
        name: hub id or folder, whose weights are here.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: run Python code that comes with the model.

    Raises:
        UsageError: one is infinite or NaN.
        RunError: its files cannot be read.
    """
    with draft_weights():
        folder = model_folder(name, revision, trust_remote_code)
        check_weights(name, folder)
        check_numbers(name, folder)


def named_fields(fields: Mapping[str, Any], target: str, settings: LoadSettings) -> dict[str, Any]:
    """A draft by its method: a folder that holds a draft head names the head's. The target has what it needs.

    Args:
        fields: `model`, or `method` and its options.
        target: the target's name.
        settings: how both are loaded.

    Raises:
        UsageError: the draft cannot be used, or not with these settings.
        RunError: its folder, or the target's, cannot be read.
    """
    own_modules(fields, target, settings.target, settings.trust_remote_code)
    config = published_draft(fields, settings.draft, target, settings.target)
    if config is not None:
        return published_fields(config, fields.get("first"))
    name = drafters.model_name(fields)
    if name is not None and given_path(name).is_dir() and not is_dummy(name, settings.draft.load_format):
        folder = model_folder(name, None, settings.trust_remote_code)
        read_object(folder / "config.json")
        with quiet(), clear_errors(name):
            check_architecture(name, read_config(name, folder, settings.trust_remote_code), settings.trust_remote_code)
        check_weights(name, folder)  # a head's, if they could be read
    return dict(fields)


def checked_drafters(target: str, given: Sequence[Mapping[str, Any]], settings: LoadSettings) -> list[Drafter]:
    """The drafters of these fields, not loaded; the target's configuration has what they need.

    Raises:
        UsageError: an unknown method or option, or a target without the hidden states or layers that a draft reads.
        RunError: the target's configuration cannot be read.
    """
    made = [drafters.from_fields(fields) for fields in given]
    check_target(
        target,
        settings.max_model_len,
        [tap for drafter in made for tap in drafter.taps],
        [draft for drafter in made for draft in drafter.self_drafts],
        revision=settings.target.revision,
        trust_remote_code=settings.trust_remote_code,
        load_format=settings.target.load_format,
    )
    return made

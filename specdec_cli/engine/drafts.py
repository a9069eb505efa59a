"""Drafts of an engine, each read once: what it is, whether it fits its target, and how it is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from specdec_cli import drafters
from specdec_cli.call_checks import check_kind
from specdec_cli.drafters.contract import Drafter
from specdec_cli.engine.loading import LoadSettings, ModelSettings, model_settings
from specdec_cli.errors import UsageError, WeightsError
from specdec_cli.files import given_path
from specdec_cli.lm.files.draft_formats import kinds_by_method
from specdec_cli.lm.files.names import NONE
from specdec_cli.lm.files.weights_files import check_numbers
from specdec_cli.lm.heads.mtp_files import MtpModules, read_mtp
from specdec_cli.lm.heads.published import PublishedDraft, find_published, read_published
from specdec_cli.lm.model_tokenizer import tokenizer_of
from specdec_cli.lm.plan import ModelPlan
from specdec_cli.lm.plan_checks import check_target
from specdec_cli.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from specdec_cli.recipe.schema import Recipe

UNIVERSAL = "universal"
"""The drafting method of a model with another tokenizer."""


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A draft that was read, and is to be loaded for a target.

    Args:
        method: that drafts.
        options: of the method, a model's name among them.
        settings: how it is loaded.
        source: what its folder says, or the target's checkpoint; None for a language model, and without a model.
        is_certain: whether the method is no guess that its tokenizer may change.
        first: drafts that are asked before it.
        model: the plan of a language model; None for a published draft and for one without a model.
    """

    method: str
    options: Mapping[str, Any]
    settings: LoadSettings
    source: PublishedDraft | MtpModules | None = None
    is_certain: bool = True
    first: tuple[Mapping[str, Any], ...] = ()
    model: ModelPlan | None = None

    @property
    def published(self) -> PublishedDraft | None:
        """The published draft in its folder; None of any other draft."""
        return self.source if isinstance(self.source, PublishedDraft) else None

    def drafter(self) -> Drafter:
        """Its drafter, not loaded.

        Raises:
            UsageError: an unknown method or option.
        """
        return drafters.planned(self.method, self.options, self.source, self.first)

    @property
    def load_settings(self) -> LoadSettings:
        """How it is loaded: without the limit of contexts where it counts other tokens than the target."""
        return replace(self.settings, max_model_len=None) if self.method == UNIVERSAL else self.settings

    def by_tokenizer(self, tokenizer: Tokenizer, target: str) -> DraftPlan:
        """The same by its tokenizer: a model whose tokenizer differs from the target's drafts as `universal`.

        A stand-in for a missing tokenizer has no text to compare: there, token ids are taken as they are.

        Raises:
            UsageError: the tokenizers differ, and the method needs the target's.
            RunError: the draft's tokenizer cannot be read.
        """
        name = drafters.model_name({"method": self.method, **self.options})
        if name is None:
            return self
        model = self.model or draft_model(name, self.settings)
        other = Tokenizer(tokenizer_of(model))
        if tokenizer.is_stand_in or other.is_stand_in:
            return self
        overlap = tokenizer.compare(other)
        if overlap.equal:
            return self
        if self.is_certain or model.drafted_tokens is not None:
            raise UsageError(
                f"the tokenizers of target `{target}` and draft `{name}` differ: {overlap.reason}",
                f"choose a `{self.method}` draft that was made for this target",
            )
        return replace(self, method=UNIVERSAL)


def read_draft(
    fields: Mapping[str, Any], target: ModelPlan, settings: LoadSettings, has_weights: bool = True
) -> DraftPlan:
    """Read what a draft's fields name: a folder that holds a draft head names the method. The target has what it needs.

    Args:
        fields: `model`, or `method` and its options; `first` names drafts before it.
        target: of the target.
        settings: how both are loaded.
        has_weights: its weights are to be read: fetch a published draft's, and see that others are here.

    Raises:
        UsageError: the draft cannot be used, or not with these settings.
        RunError: its folder, or the target's, cannot be read.
    """
    for key in ("method", "model", "first"):
        check_kind(f"the draft's {key}", fields.get(key), str | None)
    options = {key: value for key, value in fields.items() if key not in ("method", "first")}
    method, first = fields.get("method"), tuple(drafters.parse_first(fields.get("first")))
    if method == "mtp" and has_weights:
        source = read_mtp(target.name, settings.target.revision, settings.trust_remote_code)
        return DraftPlan(method, options, settings, source, first=first)
    published = _published(method, options, settings.draft, has_weights)
    if published is not None:
        drafters.create(published.method, options)  # which checks the options
        published = published.given(options, lambda: target.num_layers)
        return DraftPlan(published.method, options, settings, published, first=first)
    name = drafters.model_name(fields)
    model = None if name is None else draft_model(name, settings)
    if has_weights and model is not None and not model.is_dummy and given_path(model.name).is_dir():
        with draft_weights():
            model.check()
    return DraftPlan(method or "model", options, settings, None, method is not None, first, model)


def _published(
    method: str | None, options: Mapping[str, Any], draft: ModelSettings, has_weights: bool
) -> PublishedDraft | None:
    """The published draft that options name; None for every other draft."""
    name = options.get("model")
    if not isinstance(name, str) or method not in (None, *kinds_by_method()):
        return None
    if method is None:
        published = find_published(name, draft.revision, has_weights)
    else:
        published = read_published(name, draft.revision, has_weights, method)
    changed = [key for key in ("dtype", "device", "load_format", "quantize", "compute") if _differs(key, draft)]
    if published is not None and changed and published.runs_as_target:
        message = f"the draft head `{name}` runs as its target does, so `draft.{changed[0]}` has no meaning for it"
        raise UsageError(message, "leave it out")
    return published


def _differs(key: str, draft: ModelSettings) -> bool:
    return bool(getattr(draft, key) != getattr(ModelSettings(), key))


def check_drafters(target: ModelPlan, made: Sequence[Drafter], max_model_len: int | None) -> None:
    """See that a target's configuration has what drafters need, before any weight is read.

    Raises:
        UsageError: a target without the hidden states or layers that a draft reads.
        RunError: the target's configuration cannot be read.
    """
    taps = [tap for drafter in made for tap in drafter.taps]
    check_target(target, max_model_len, taps, [draft for drafter in made for draft in drafter.self_drafts])


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
    target = ModelPlan(recipe.target.model, settings.target, trust_remote_code=trust_remote_code)
    plan = read_draft(recipe.draft_fields(), target, settings)
    check_drafters(target, [plan.drafter()], settings.max_model_len)


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


def check_draft_numbers(draft: ModelPlan) -> None:
    """See that the weights of a draft model, where they are here, are finite numbers: no others are ever accepted.

    Raises:
        UsageError: one is infinite or NaN.
        RunError: its files cannot be read.
    """
    with draft_weights():
        if draft.is_complete:
            check_numbers(draft.name, draft.folder)


def draft_model(name: str, settings: LoadSettings) -> ModelPlan:
    """The plan of a draft model."""
    return ModelPlan(name, settings.draft, settings.decoder, NONE, settings.trust_remote_code)


def matching(drafter: Drafter) -> list[str]:
    """That a draft's tokenizer differs from the target's, and how it drafts therefore; nothing where it does not."""
    shared = drafter.shared_vocabulary
    if shared is None:
        return []
    greedy, sampled = ("by text" if drafter.forced_lm(t) is None else "by the shared tokens" for t in (0.0, 1.0))
    ways = greedy if greedy == sampled else f"{greedy} at temperature 0, {sampled} above it"
    return [f"the draft's tokenizer differs from the target's: it drafts {ways}; {shared}"]

"""The tokenizer of a draft model beside the target's: a draft with another one drafts by its text, or shared tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specdec_cli import drafters
from specdec_cli.engine.loading import LoadSettings
from specdec_cli.errors import UsageError
from specdec_cli.lm.load import load_tokenizer
from specdec_cli.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from specdec_cli.drafters.contract import Drafter

UNIVERSAL = "universal"
"""The drafting method of a model with another tokenizer."""


def draft_tokenizer(name: str, settings: LoadSettings) -> Tokenizer:
    """The tokenizer of a draft model.

    Raises:
        RunError: there is none, or it is broken.
    """
    return Tokenizer(
        load_tokenizer(
            name,
            revision=settings.draft.revision,
            trust_remote_code=settings.trust_remote_code,
            load_format=settings.draft.load_format,
        )
    )


def by_tokenizer(
    fields: Mapping[str, Any], tokenizer: Tokenizer, target: str, settings: LoadSettings
) -> dict[str, Any]:
    """The draft by its method: a model whose tokenizer differs from the target's drafts as `universal`.

    A stand-in for a missing tokenizer has no text to compare: there, token ids are taken as they are.

    Args:
        fields: `model`, or `method` and its options.
        tokenizer: the target's.
        target: the target's name.
        settings: how the draft is loaded.

    Raises:
        UsageError: the tokenizers differ, and the method needs the target's.
        RunError: the draft's tokenizer cannot be read.
    """
    name = drafters.model_name(fields)
    if name is None:
        return dict(fields)
    other = draft_tokenizer(name, settings)
    if tokenizer.is_stand_in or other.is_stand_in:
        return dict(fields)
    overlap = tokenizer.compare(other)
    if overlap.equal:
        return dict(fields)
    if "method" in fields:
        raise UsageError(
            f"the tokenizers of target `{target}` and draft `{name}` differ: {overlap.reason}",
            f"choose a `{fields['method']}` draft that was made for this target",
        )
    return {"method": UNIVERSAL, **fields}


def of_own_length(fields: Mapping[str, Any], settings: LoadSettings) -> LoadSettings:
    """How a draft is loaded: without the limit of contexts where it counts other tokens than the target."""
    return replace(settings, max_model_len=None) if fields.get("method") == UNIVERSAL else settings


def matching(drafter: Drafter) -> list[str]:
    """That a draft's tokenizer differs from the target's, and how it drafts therefore; nothing where it does not."""
    shared = drafter.shared_vocabulary
    if shared is None:
        return []
    greedy, sampled = ("by text" if drafter.forced_lm(t) is None else "by the shared tokens" for t in (0.0, 1.0))
    said = greedy if greedy == sampled else f"{greedy} at temperature 0, {sampled} above it"
    return [f"the draft's tokenizer differs from the target's: it drafts {said}; {shared}"]

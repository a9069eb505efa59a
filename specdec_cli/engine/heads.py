"""Published drafts behind a draft's name: a folder that holds one becomes its drafting method, with its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec_cli.engine.loading import ModelSettings
from specdec_cli.errors import UsageError
from specdec_cli.lm.heads.formats import FORMATS, is_published, read_published
from specdec_cli.lm.heads.mtp_files import MtpModules, read_mtp
from specdec_cli.lm.heads.published import PublishedDraft
from specdec_cli.lm.load import num_layers

_METHODS = frozenset(method for one in FORMATS for method in one.methods)


def published_draft(
    fields: Mapping[str, Any], draft: ModelSettings, target: str, settings: ModelSettings, has_weights: bool = True
) -> PublishedDraft | None:
    """The published draft that a draft's fields name, as it will run; None for every other draft.

    Args:
        fields: `model`, or `method` and its options.
        draft: how the draft is loaded.
        target: the target's name.
        settings: how the target is loaded.
        has_weights: fetch the draft's weights too.

    Raises:
        UsageError: the draft cannot be used, or not with these settings.
        RunError: its folder cannot be read.
    """
    method, name = fields.get("method"), fields.get("model")
    if not isinstance(name, str):
        return None
    if method not in _METHODS and not (method is None and is_published(name, draft.revision)):
        return None
    found = read_published(name, draft.revision, has_weights, method)
    changed = [key for key in ("dtype", "device", "load_format", "quantize") if _differs(key, draft)]
    if changed and found.runs_as_target:
        said = f"the draft head `{name}` runs as its target does, so `draft.{changed[0]}` has no meaning for it"
        raise UsageError(said, "leave it out")
    return found.given(fields, lambda: num_layers(target, settings.revision))


def own_modules(
    fields: Mapping[str, Any], target: str, settings: ModelSettings, trust_remote_code: bool
) -> MtpModules | None:
    """The modules of the target's own checkpoint that a draft's fields name; None for every other draft.

    Args:
        fields: `model`, or `method` and its options.
        target: the target's name.
        settings: how the target is loaded.
        trust_remote_code: run Python code that comes with the target.

    Raises:
        UsageError: it has none, or they cannot be read.
        RunError: its files cannot be read.
    """
    return read_mtp(target, settings.revision, trust_remote_code) if fields.get("method") == "mtp" else None


def _differs(key: str, draft: ModelSettings) -> bool:
    return bool(getattr(draft, key) != getattr(ModelSettings(), key))


def published_fields(found: PublishedDraft, first: str | None = None) -> dict[str, Any]:
    """A published draft as drafters take it; `first` is asked before it."""
    before = {} if first is None else {"first": first}
    return {"method": found.method, "model": found.name, **found.options(), **before}

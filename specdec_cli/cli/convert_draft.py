"""`specdec train-draft --export`: a published draft in another format."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specdec_cli.cli.output import deliver, envelope
from specdec_cli.cli.screen import open_screen
from specdec_cli.cli.shared import Shared
from specdec_cli.errors import UsageError

if TYPE_CHECKING:
    from specdec_cli.recipe import Resolved

_READ = ("target.model", "train.depth")


@dataclass(frozen=True, slots=True)
class ConversionRequest:
    """A draft that is to be converted.

    Args:
        draft: folder or hub id; None names none.
        to: the format.
        output: the new folder; None names none.
        dry_run: tell, and write nothing.
        without: options of training that were given, which a conversion has no use for.
    """

    draft: str | None
    to: str
    output: Path | None
    dry_run: bool
    without: tuple[str, ...] = ()


def convert(request: ConversionRequest, resolved: Resolved, shared: Shared) -> None:
    """Write a draft in another format and say what it is there.

    Raises:
        UsageError: there is no draft or folder, an option has no effect, or the format cannot say what the draft is.
        RunError: the draft cannot be read, or the folder cannot be written.
    """
    if request.draft is None:
        raise UsageError("there is no draft to convert", f"name its folder: --export {request.to} DIR")
    _refuse_others(request, resolved, shared)
    from specdec_cli.train.convert import check_conversion, convert_draft
    from specdec_cli.train.documents import ConversionDocument

    if request.dry_run:
        check_conversion(request.draft, request.to, request.output, has_weights=False, force=shared.force)
        sys.stdout.write(f"# would write {request.draft} in the format {request.to}\n")
        return
    if request.output is None:
        raise UsageError("there is no folder to write the draft into", "add --output DIR")
    is_named = resolved.origins["target.model"] != "default"
    target = resolved.recipe.target.model if is_named else None
    converted = convert_draft(
        request.draft, request.to, request.output, target, resolved.recipe.train.depth, shared.force
    )
    if shared.json:
        body = {"draft": request.draft, "format": request.to, "folder": str(request.output), "holds": str(converted)}
        document = envelope(ConversionDocument, resolved.recipe.as_dict(), ConversionDocument.given(body))
        deliver(document, shared)
    open_screen(shared.quiet, streams_text=False).say(f"wrote {request.output}: {converted}")


def _refuse_others(request: ConversionRequest, resolved: Resolved, shared: Shared) -> None:
    """Refuse options, and keys of the recipe's `train` section, that a conversion has no use for."""
    flags = [name for path, (_, name) in shared.flags.items() if path not in _READ]
    origins = {path: origin for path, origin in resolved.origins.items() if path not in (*_READ, *shared.flags)}
    keys = [path for path, origin in origins.items() if path.startswith("train.") and origin != "default"]
    given = [*flags, *keys, *request.without]
    if given:
        raise UsageError(f"`{given[0]}` has no effect with --export, which trains nothing", "leave it out")

"""`specdec train-draft --export`: a published draft in another format."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specdec_cli.cli.options import Shared
from specdec_cli.cli.output import deliver, envelope
from specdec_cli.cli.screen import open_screen
from specdec_cli.errors import UsageError

if TYPE_CHECKING:
    from specdec_cli.recipe import Resolved

SCHEMA = "specdec.conversion/1"
_READ = ("target.model", "train.depth")


@dataclass(frozen=True, slots=True)
class ConversionWish:
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


def convert(wish: ConversionWish, resolved: Resolved, shared: Shared) -> None:
    """Write a draft in another format and say what it is there.

    Raises:
        UsageError: there is no draft or folder, an option has no effect, or the format cannot say what the draft is.
        RunError: the draft cannot be read, or the folder cannot be written.
    """
    if wish.draft is None:
        raise UsageError("there is no draft to convert", f"name its folder: --export {wish.to} DIR")
    _refuse_others(wish, resolved, shared)
    from specdec_cli.train.convert import check_conversion, convert_draft

    if wish.dry_run:
        check_conversion(wish.draft, wish.to, wish.output, has_weights=False, force=shared.force)
        sys.stdout.write(f"# would write {wish.draft} in the format {wish.to}\n")
        return
    if wish.output is None:
        raise UsageError("there is no folder to write the draft into", "add --output DIR")
    is_named = resolved.origins["target.model"] != "default"
    target = resolved.recipe.target.model if is_named else None
    found = convert_draft(wish.draft, wish.to, wish.output, target, resolved.recipe.train.depth, shared.force)
    if shared.json:
        body = {"draft": wish.draft, "format": wish.to, "folder": str(wish.output), "holds": str(found)}
        deliver(envelope(SCHEMA, resolved.recipe.as_dict(), body), to_stdout=True)
    open_screen(shared.quiet, streams_text=False).say(f"wrote {wish.output}: {found}")


def _refuse_others(wish: ConversionWish, resolved: Resolved, shared: Shared) -> None:
    """Refuse options, and keys of the recipe's `train` section, that a conversion has no use for."""
    flags = [name for path, (_, name) in shared.flags.items() if path not in _READ]
    origins = {path: origin for path, origin in resolved.origins.items() if path not in (*_READ, *shared.flags)}
    keys = [path for path, origin in origins.items() if path.startswith("train.") and origin != "default"]
    given = [*flags, *keys, *wish.without]
    if given:
        raise UsageError(f"`{given[0]}` has no effect with --export, which trains nothing", "leave it out")

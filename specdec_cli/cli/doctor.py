"""`specdec doctor`: what this machine is, and whether a pair will run, before any weight is loaded."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from specdec_cli.cli.options import OPTIONS, RUN, Shared, with_shared_options
from specdec_cli.cli.output import deliver, envelope
from specdec_cli.cli.screen import open_screen, progress
from specdec_cli.cli.terminal import colourful
from specdec_cli.report.doctor import SCHEMA, print_doctor
from specdec_cli.report.page import open_page

if TYPE_CHECKING:
    from specdec_cli.measure.machine.doctor import Diagnosis
    from specdec_cli.recipe import Resolved

_OF_A_RUN = ("sampling.", "speculation.", "serve.")
_PLANNED = ("speculation.num_speculative_tokens", "speculation.tree")  # which the memory plan reads
_WITHOUT = [one.path for one in OPTIONS if one.path.startswith(_OF_A_RUN) and one.path not in _PLANNED]


@with_shared_options(aliases=True, without=_WITHOUT)
def doctor(
    kernels: Annotated[
        bool | None,
        typer.Option(
            "--kernels/--no-kernels",
            help="Test whether the CPU's bfloat16 kernels give a row the same bits in any company. Some seconds, "
            "and minutes on a busy machine.",
            show_default="only if no pair is named",
            rich_help_panel=RUN,
        ),
    ] = None,
    *,
    shared: Shared,
) -> None:
    """Check this machine and, with a target, a draft or a recipe, the pair without loading its weights."""
    shared.takes_structured = True  # a recipe may ask for it
    resolved = shared.resolve()
    screen = open_screen(shared.quiet, streams_text=False)
    with progress(screen) as say:
        say("starting torch and transformers")
        from specdec_cli.measure.machine.doctor import examine

        say("looking at the machine")
        recipe = resolved.recipe if _names_pair(resolved, shared) else None
        tests_kernels = recipe is None if kernels is None else kernels
        diagnosis = examine(recipe, trust_remote_code=shared.trust_remote_code, tests_kernels=tests_kernels)
    if shared.json or shared.output is not None:
        document = envelope(SCHEMA, recipe.as_dict() if recipe is not None else None, diagnosis.as_dict())
        deliver(document, to_stdout=shared.json, path=shared.output, force=shared.force)
    _show(diagnosis, shared)
    error = diagnosis.error()
    if error is not None:
        raise error


def _names_pair(resolved: Resolved, shared: Shared) -> bool:
    """Whether anything says what pair to look at, or how it would run: a flag, a recipe, `--set`, the environment."""
    return shared.recipe is not None or any(origin != "default" for origin in resolved.origins.values())


def _show(diagnosis: Diagnosis, shared: Shared) -> None:
    """The report, on stdout unless a document stands there."""
    from specdec_cli.measure.machine.doctor import NOT_CLAIMED

    if not shared.json:
        print_doctor(open_page(sys.stdout, colourful(sys.stdout)), diagnosis, NOT_CLAIMED)
    elif not shared.quiet:
        print_doctor(open_page(sys.stderr, colourful(sys.stderr)), diagnosis, NOT_CLAIMED)

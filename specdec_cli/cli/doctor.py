"""`specdec doctor`: what this machine is, and whether a pair will run, before any weight is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from specdec_cli.cli.completion import targets
from specdec_cli.cli.options import OPTIONS, RUN
from specdec_cli.cli.output import deliver_with_report, envelope
from specdec_cli.cli.screen import open_screen, progress, start_torch
from specdec_cli.cli.shared import Shared, take_target, with_shared_options
from specdec_cli.report.doctor import print_doctor

if TYPE_CHECKING:
    from specdec_cli.recipe import Resolved

_OF_A_RUN = ("sampling.", "speculation.", "serve.")
_PLANNED = ("speculation.num_speculative_tokens", "speculation.tree")  # which the memory plan reads
_WITHOUT = [option.path for option in OPTIONS if option.path.startswith(_OF_A_RUN) and option.path not in _PLANNED]


@with_shared_options(common="recipe target draft dtype device json output", aliases=True, without=_WITHOUT)
def doctor(
    model: Annotated[
        str | None, typer.Argument(help="The target, as in --target.", metavar="MODEL", autocompletion=targets)
    ] = None,
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
    """Check this machine and, with a target, a draft or a recipe, the pair without loading its weights.

    Examples:
        # Check this machine.
        specdec doctor
        # Check a pair without loading its weights; the draft may be left out.
        specdec doctor MODEL -d DRAFT
        # Check a recipe and write the report.
        specdec doctor -r tuned.yaml --output doctor.json
    """
    shared.takes_structured = True  # a recipe may ask for it
    if model is not None:
        take_target(model, shared)
    resolved = shared.resolve()
    screen = open_screen(shared.quiet, streams_text=False)
    with progress(screen) as say:
        start_torch(say)
        from specdec_cli.measure.machine.doctor import examine

        say("looking at the machine")
        recipe = resolved.recipe if _names_pair(resolved, shared) else None
        tests_kernels = recipe is None if kernels is None else kernels
        diagnosis = examine(recipe, trust_remote_code=shared.trust_remote_code, tests_kernels=tests_kernels)
    document = envelope(type(diagnosis), None if recipe is None else recipe.as_dict(), diagnosis.as_json())
    deliver_with_report(document, shared, lambda page: print_doctor(page, diagnosis))
    error = diagnosis.error()
    if error is not None:
        raise error


def _names_pair(resolved: Resolved, shared: Shared) -> bool:
    """Whether anything says what pair to look at, or how it would run: a flag, a recipe, `--set`, the environment."""
    return shared.recipe is not None or any(origin != "default" for origin in resolved.origins.values())

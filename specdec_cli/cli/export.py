"""`specdec export`: a recipe as another engine's files."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_cli import __version__
from specdec_cli.cli.completion import choices
from specdec_cli.cli.options import OPTIONS, PAIR, PARALLEL_OPTIONS, RUN, SERVE_OPTIONS
from specdec_cli.cli.output import deliver, envelope, write_file
from specdec_cli.cli.screen import open_screen
from specdec_cli.cli.shared import Shared, with_shared_options
from specdec_cli.drafters import to_spec
from specdec_cli.errors import UsageError, did_you_mean
from specdec_cli.export import ENGINES, Export
from specdec_cli.export import export as export_recipe
from specdec_cli.export.measured import (
    as_measured,
    machine_of,
    measured_schedule,
    read_measurement,
    refuse_another_draft,
)
from specdec_cli.files import given_path
from specdec_cli.measure.documents.recipes import ExportDocument

if TYPE_CHECKING:
    from specdec_cli.recipe import Resolved

_ADDRESS = [option for option in SERVE_OPTIONS if option.path in ("serve.host", "serve.port")]
_WITHOUT = ["output", "trust_remote_code", *(option.path for option in OPTIONS if option.path == "engine.decoder")]


@with_shared_options(
    common=f"{PAIR} temperature tensor-parallel-size measured output json",
    aliases=True,
    without=_WITHOUT,
    beside=(*_ADDRESS, *PARALLEL_OPTIONS),
)
def export(
    engine: Annotated[
        str, typer.Argument(help=", ".join(ENGINES) + ".", metavar="ENGINE", autocompletion=choices("|".join(ENGINES)))
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Write the files into this folder.", metavar="DIR", rich_help_panel=RUN),
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(
            "--measured",
            help="Put figures and k of this result (of bench, sweep-k or compare-drafts) into the files.",
            metavar="FILE",
            rich_help_panel=RUN,
        ),
    ] = None,
    *,
    shared: Shared,
) -> None:
    """Write a recipe as another engine's configuration, ready to run.

    Examples:
        # Print a vLLM start script.
        specdec export vllm -t MODEL -d DRAFT -k 4 --tensor-parallel-size 2
        # Write TensorRT-LLM's files for Triton.
        specdec export triton -r mine.yaml --output triton
        # Put the figures and k of a sweep into them.
        specdec export sglang -r mine.yaml --measured sweep.json
    """
    if engine not in ENGINES:
        raise UsageError(f"unknown engine `{engine}`{did_you_mean(engine, ENGINES)}", f"one of: {', '.join(ENGINES)}")
    shared.takes_structured = shared.takes_parallel = shared.takes_engine = True
    shared.loads_models = False
    resolved = shared.resolve()
    document = None if measured is None else read_measurement(measured, resolved.recipe.target.model)
    notes: list[str] = []
    if measured is not None and document is not None:
        if engine != "profile":  # its draft is the measured one
            refuse_another_draft(measured, document, resolved.recipe.draft)
        resolved, notes = with_measured_k(resolved, document)
        draft = as_measured(resolved.recipe.draft, document)
        resolved = replace(resolved, recipe=resolved.recipe.model_copy(update={"draft": draft}))
    made, warnings = export_recipe(engine, resolved, __version__, document, notes)
    if output is not None:
        _write(made, output, shared.force)
    screen = open_screen(shared.quiet, streams_text=False)
    for warning in warnings:
        screen.say(f"warning: {warning}", "yellow")
    if shared.json:
        body = {"engine": engine, "files": made.files, "warnings": warnings, "next_command": made.next_command}
        document = ExportDocument.given(body)
        deliver(envelope(ExportDocument, resolved.recipe.as_dict(), document), shared)
    elif output is None:
        sys.stdout.write(_as_text(made))
    if output is not None:
        for name in made.files:
            screen.say(f"wrote {output / name}")
    if made.next_command is not None:
        screen.say(f"next, once it runs: {made.next_command}")


def with_measured_k(resolved: Resolved, document: Mapping[str, Any]) -> tuple[Resolved, list[str]]:
    """The recipe with the k, p-min or schedule of k that was measured, where the recipe sets none; and notes."""
    schedule, why = measured_schedule(document, to_spec(resolved.recipe.draft_fields()))
    paths = ("speculation.num_speculative_tokens", "speculation.k_by_batch", "speculation.tree")
    if any(resolved.origins.get(path, "default") != "default" for path in paths):
        own, ks = resolved.recipe.speculation, sorted({k for _, k in schedule})
        is_same = own.k_by_batch is None and own.tree is None and ks == [own.num_speculative_tokens]
        words = f"the figures were measured at k = {', '.join(map(str, ks))}, and the recipe sets another"
        return resolved, [words] if schedule and not is_same else []
    if not schedule:
        return resolved, [] if why is None else [why]
    (size, first), *others = schedule
    below = [(1, first)] if size > 1 else []
    most, by_batch = max(k for _, k in schedule), (*below, *schedule) if others else None
    update: dict[str, Any] = {"num_speculative_tokens": most, "k_by_batch": by_batch}
    sizes = document.get("by_batch_size")
    if sizes and (p_min := sizes[0]["recommended"].get("p_min")):
        update |= {"depth_policy": "confidence", "p_min": p_min}
    speculation = resolved.recipe.speculation.model_copy(update=update)
    recipe = resolved.recipe.model_copy(update={"speculation": speculation})
    origins = resolved.origins | {f"speculation.{name}": "--measured" for name in update}
    where = f"specdec's own engine on {machine_of(document)}"
    is_ours = "engine_sweep" not in document and document.get("engine") is None
    notes = [f"k is the measured one of {where}; another engine's may differ"] if is_ours else []
    return replace(resolved, recipe=recipe, origins=origins), notes


def _as_text(made: Export) -> str:
    """The one file as it is; of several each under its name."""
    if len(made.files) == 1:
        return next(iter(made.files.values()))
    return "\n".join(f"### {name}\n{text}" for name, text in made.files.items())


def _write(made: Export, folder: Path, force: bool) -> None:
    """Write the files, all or none of those that exist without `force`."""
    folder = given_path(folder)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"`--output {folder}` is not a folder", "name a folder for the files")
    present = [name for name in made.files if (folder / name).exists()]
    if present and not force:
        raise UsageError(f"`{folder / present[0]}` already exists", "name another folder, or overwrite it with --force")
    for name, text in made.files.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"`{path.parent}` cannot be made: {error.strerror}", "name another folder") from None
        write_file(path, text, force)
        if name in made.executable:
            os.chmod(path, path.stat().st_mode | 0o111 & ~0o022)

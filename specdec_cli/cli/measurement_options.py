"""What the measuring commands' own options have in common: their declarations, checks, and what a dry run shows."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_cli.cli.output import check_destination, deliver, envelope
from specdec_cli.errors import UsageError
from specdec_cli.measure.dataset import is_at_hand
from specdec_cli.measure.journal import check_journal
from specdec_cli.measure.workload import read_rows
from specdec_cli.report.plot import check_available, check_plot

if TYPE_CHECKING:
    from specdec_cli.cli.options import Shared
    from specdec_cli.measure.prompts import PromptRow
    from specdec_cli.recipe import Recipe
    from specdec_cli.recipe.schema import Speculation
    from specdec_cli.recipe.schema import Workload as WorkloadSection

HOW, FILES = "How it is measured", "Result files"

KMax = Annotated[
    int, typer.Option("--k-max", min=1, max=64, help="The largest k to consider.", rich_help_panel=HOW)
]  # fmt: skip
Exhaustive = Annotated[
    bool,
    typer.Option("--exhaustive", help="Measure every k, not only the best predicted.", rich_help_panel=HOW),
]
Repeats = Annotated[
    int, typer.Option("--repeats", min=1, help="How often every arm decodes every prompt.", rich_help_panel=HOW)
]
BatchSize = Annotated[
    int, typer.Option("--batch-size", min=1, help="Prompts of one task that are decoded together.", rich_help_panel=HOW)
]
Chat = Annotated[
    bool, typer.Option("--chat", help="Prompts are messages: use the chat template.", rich_help_panel=HOW)
]  # fmt: skip
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show what would run; load nothing.", rich_help_panel=HOW)
]  # fmt: skip
TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        help="Read the trace from this file; write it if there is none.",
        metavar="FILE",
        rich_help_panel=FILES,
    ),
]


Plot = Annotated[
    Path | None,
    typer.Option("--plot", help="Draw the results.", metavar="FILE.png|FILE.svg", rich_help_panel=FILES),
]
Html = Annotated[
    Path | None,
    typer.Option("--html", help="Write a page with tables and plots, one file.", metavar="FILE", rich_help_panel=FILES),
]


@dataclass(frozen=True, slots=True)
class Wish:
    """What the options of every measuring command ask for.

    Args:
        repeats: how often every arm decodes every prompt.
        batch_size: prompts that are decoded together; of several numbers the largest.
        chat: whether prompts are messages.
        plot: file of a picture, or None.
        html: file of a page, or None.
    """

    repeats: int
    batch_size: int
    chat: bool
    plot: Path | None
    html: Path | None

    def as_plan(self) -> dict[str, Any]:
        """What decides how it is measured; files do not."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, int | tuple)}


def chosen_rows(workload: WorkloadSection) -> list[PromptRow]:
    """The rows that a recipe's workload names."""
    return read_rows(workload.dataset, workload.tasks, workload.num_prompts)


def num_at_hand(workload: WorkloadSection) -> int | None:
    """How many rows would be measured; None for a data set that is not at hand, which is not read."""
    if workload.dataset.startswith("builtin:") or is_at_hand(workload.dataset):
        return len(chosen_rows(workload))
    return None


def num_prompts_words(workload: WorkloadSection, num: int | None) -> str:
    """`8 prompts of builtin:mini`."""
    return f"{f'up to {workload.num_prompts}' if num is None else num} prompts of {workload.dataset}"


def show_plan(recipe: Mapping[str, Any], body: Mapping[str, Any], shared: Shared, text: str) -> None:
    """What a dry run shows: a document where one is asked for, otherwise a line and the recipe as YAML."""
    if shared.json or shared.output is not None:
        document = envelope("specdec.recipe/1", recipe, body)
        deliver(document, to_stdout=shared.json, path=shared.output, force=shared.force)
    if not shared.json:
        sys.stdout.write(text)


def check_files(wish: Wish, files: Mapping[str, Path | None], shared: Shared) -> None:
    """Refuse files that could not be written, and two of one name, before anything is read or loaded.

    Args:
        wish: names the picture and the page.
        files: the command's own, by the option that names them.
        shared: the command's shared options.

    Raises:
        UsageError: there are such, a picture cannot be drawn, or an interrupted run's journal would be lost.
    """
    if wish.plot is not None:
        check_plot(wish.plot)
    if wish.html is not None:
        check_available("--html")
    files = {"--plot": wish.plot, "--html": wish.html, **files}
    named = [path.resolve() for path in (shared.output, *files.values()) if path is not None]
    if len(set(named)) < len(named):
        raise UsageError("two files have the same name", "give each its own")
    for flag, path in files.items():
        is_read = flag == "--trace" and path is not None and path.exists()
        if not is_read:
            check_destination(path, shared.force and flag != "--trace", flag)
    if shared.output is not None:
        check_journal(shared.output, shared.resume, shared.force)


def check_regression(recipe: Recipe, shared: Shared) -> None:
    """Refuse a limit to a regression from nothing.

    Raises:
        UsageError: there is no baseline.
    """
    if "gates.max_regression" in shared.flags and recipe.gates.baseline is None:
        raise UsageError("`--max-regression` has no effect without a baseline", "add --baseline FILE")


def whole_numbers(text: str, flag: str, most: int) -> tuple[int, ...]:
    """Whole numbers with commas between, each once, in ascending order.

    Raises:
        UsageError: something else, or a number beyond 1 to `most`.
    """
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UsageError(f"`{flag} {text}` is no list of whole numbers", f"for example {flag} 1,4") from None
    if numbers[0] < 1 or numbers[-1] > most:
        raise UsageError(f"`{flag} {text}` must be from 1 to {most}", f"for example {flag} 1,4")
    return tuple(numbers)


def check_fixed_depth(speculation: Speculation) -> None:
    """Refuse what picks k by itself where the command measures one k after another.

    Raises:
        UsageError: the adaptive policy, or a table of k by batch size.
    """
    if speculation.depth_policy == "adaptive":
        raise UsageError("depth_policy `adaptive` picks its own k, and every k is measured here", "use `fixed`")
    if speculation.k_by_batch is not None:
        raise UsageError("k_by_batch picks k by the batch size, and every k is measured here", "leave k_by_batch out")

"""Options shared by the measuring commands: their declarations, checks and dry run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_cli.cli.options import FILES
from specdec_cli.cli.output import check_destination
from specdec_cli.drafted import MOST_DEPTH
from specdec_cli.engine.prompts import PromptSet
from specdec_cli.errors import UsageError
from specdec_cli.measure.workload.dataset import is_at_hand
from specdec_cli.measure.workload.workload import read_rows, task_of
from specdec_cli.quantities import counted

if TYPE_CHECKING:
    from specdec_cli.cli.shared import Shared
    from specdec_cli.engine.prompts import PromptRow
    from specdec_cli.recipe import Recipe
    from specdec_cli.recipe.schema import Gates, Speculation, WorkloadSection

HOW = "Measurement"
K_MAX, FURTHEST = 8, 32  # without --k-max: where the search for k ends, and where while the best is the largest
_TIMED_TASK = re.compile(r"\b(by_task|task_winners)\..*\.(speedup|timing)\b")


KMax = Annotated[
    int | None,
    typer.Option(
        "--k-max",
        min=1,
        max=MOST_DEPTH,
        help="Largest k to consider.",
        show_default=f"{K_MAX}, or up to {FURTHEST} while the best is the largest",
        rich_help_panel=HOW,
    ),
]
Exhaustive = Annotated[
    bool,
    typer.Option(
        "--exhaustive", help="Measure every k instead of only those with the best prediction.", rich_help_panel=HOW
    ),
]
BatchSize = Annotated[
    int, typer.Option("--batch-size", min=1, help="Number of prompts to decode together.", rich_help_panel=HOW)
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show what would run without loading anything.", rich_help_panel=HOW)
]  # fmt: skip
TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        help="Read the trace from this file, or write it if the file does not exist.",
        metavar="FILE",
        rich_help_panel=FILES,
    ),
]


def repeats_option(shown: str | bool = True, number: str = "How many times") -> Any:
    """The option `--repeats` of a command.

    Args:
        shown: the default in words where it depends on other options.
        number: begins the sentence of its help.
    """
    message = f"{number} each arm decodes each prompt."
    return typer.Option("--repeats", min=1, help=message, show_default=shown, rich_help_panel=HOW)


@dataclass(frozen=True, slots=True)
class MeasurementOptions:
    """The options that all measuring commands have.

    Args:
        repeats: how often every arm decodes every prompt.
        batch_size: prompts that are decoded together; the largest of several sizes.
        chat: whether prompts are messages.
        by: the column by which `bench` groups its prompts; None groups by category, in the details.
    """

    repeats: int
    batch_size: int
    chat: bool
    by: str | None = field(default=None, kw_only=True)

    @property
    def first_batch_size(self) -> int:
        """The batch size of the document's figures: the smallest if there are several."""
        return self.batch_size

    def as_plan(self) -> dict[str, Any]:
        """The options that affect the measurement. Output files do not."""
        values = {option.name: getattr(self, option.name) for option in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, int | tuple)}


def chosen_prompts(
    workload: WorkloadSection, chat: bool, only_at_hand: bool = False, by: str | None = None
) -> PromptSet:
    """The prompts that a recipe's workload names, as conversations where the command decodes those.

    Args:
        workload: the recipe's.
        chat: whether whole conversations are wanted.
        only_at_hand: give none of a data set that is neither built in nor a file here.
        by: the column that says a prompt's task; None takes `category`.
    """
    if only_at_hand and not is_at_hand(workload.dataset):
        return PromptSet([])
    return read_rows(workload.dataset, workload.tasks, workload.num_prompts, chat, by)


def num_prompts_words(workload: WorkloadSection, num: int | None) -> str:
    """`8 prompts of builtin:mini`."""
    return f"{'up to ' if num is None else ''}{counted(num or workload.num_prompts, 'prompt')} of {workload.dataset}"


def check_files(shared: Shared, more: Mapping[str, Path | None] = MappingProxyType({})) -> None:
    """Refuse files that could not be written, and two of one name, before anything is read or loaded.

    Args:
        shared: names the files of a result.
        more: the command's own, by the option that names them.

    Raises:
        UsageError: there are such, a picture cannot be drawn, or an interrupted run's journal would be lost.
    """
    from specdec_cli.report.plot import check_available, check_plot

    if (plot := shared.files.get("plot")) is not None:
        check_plot(plot)
    if "html" in shared.files:
        check_available("--html")
    files = {**{f"--{kind}": path for kind, path in shared.files.items()}, **more}
    named = [path.resolve() for path in (shared.output, *files.values()) if path is not None]
    if len(set(named)) < len(named):
        raise UsageError("two files have the same name", "give each its own")
    for flag, path in files.items():
        is_read = flag == "--trace" and path is not None and path.exists()
        if not is_read:
            check_destination(path, shared.force and flag != "--trace", flag)
    if shared.output is not None:
        from specdec_cli.measure.bench.journal import check_journal

        check_journal(shared.output, shared.resume, shared.force)


def check_regression(recipe: Recipe, shared: Shared) -> None:
    """Refuse a limit to a regression from nothing.

    Raises:
        UsageError: there is no baseline.
    """
    if "gates.max_regression" in shared.flags and recipe.gates.baseline is None:
        raise UsageError("`--max-regression` has no effect without a baseline", "add --baseline FILE")


def check_batch(size: int, num_prompts: int) -> None:
    """Refuse a batch that there are not enough prompts for.

    Raises:
        UsageError: there are fewer.
    """
    if size > num_prompts:
        raise UsageError(
            f"a batch of `{size}` needs as many prompts, and there are `{num_prompts}`",
            "raise --num-prompts, or lower the batch's size",
        )


def check_speculates(speculation: Speculation, batch_size: int) -> None:
    """Refuse a batch in which the draft would be switched off.

    Raises:
        UsageError: more sequences than the recipe speculates with.
    """
    table = [k for size, k in speculation.k_by_batch or () if size <= batch_size]
    if table and table[-1] == 0:
        raise UsageError(
            f"k_by_batch has no draft where `{batch_size}` sequences run together",
            "lower the batch's size, or leave k_by_batch out",
        )
    limit = speculation.disable_by_batch_size
    if limit is not None and batch_size > limit:
        raise UsageError(
            f"the recipe does not speculate beyond `{limit}` sequences, and `{batch_size}` should run together",
            "lower the batch's size, or leave disable_by_batch_size out",
        )


def check_timed_tasks(gates: Gates, batch_size: int, rows: Sequence[PromptRow]) -> None:
    """Refuse gates on times by task if prompts of several tasks are decoded together.

    Raises:
        UsageError: there is one.
    """
    timed = (text for text in gates.fail_if if _TIMED_TASK.search(text))
    is_mixed = batch_size > 1 and len(set(map(task_of, rows))) > 1
    if is_mixed and (gate := next(timed, None)) is not None:
        raise UsageError(
            f"`--fail-if '{gate}'` needs the times of one task, and a batch of `{batch_size}` holds several",
            "use --batch-size 1, or a gate on all tasks such as speedup.decode",
        )


def depth_within_rates(speculation: Speculation, k_max: int) -> tuple[int, list[str]]:
    """The largest k whose acceptance is known, and a sentence where that is less than was asked for.

    Given synthetic rates end somewhere; what lies beyond is not known. A synthetic length tells every k.
    """
    rates = speculation.synthetic_acceptance_rates
    if rates is None or k_max <= len(rates):
        return k_max, []
    message = f"k ends at {len(rates)}, not at {k_max}, because so many synthetic acceptance rates are given"
    return len(rates), [message]


def whole_numbers(text: str, flag: str, most: int) -> tuple[int, ...]:
    """Whole numbers with commas between, each once, in ascending order.

    Raises:
        UsageError: something else, or a number beyond 1 to `most`.
    """
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UsageError(f"`{flag} {text}` is not a list of whole numbers", f"for example `{flag} 1,4`") from None
    if numbers[0] < 1 or numbers[-1] > most:
        raise UsageError(f"`{flag} {text}` must be from 1 to {most}", f"for example `{flag} 1,4`")
    return tuple(numbers)


def check_fixed_depth(speculation: Speculation) -> None:
    """Refuse what picks k by itself where the command measures one k after another.

    Raises:
        UsageError: a policy that changes k, or a schedule of k.
    """
    if speculation.depth_policy in ("adaptive", "heuristic"):
        message = f"depth_policy `{speculation.depth_policy}` picks its own k, and every k is measured here"
        raise UsageError(message, "use `fixed`")
    for key, what in (("k_by_batch", "the batch size"), ("k_by_context", "the context")):
        if getattr(speculation, key) is not None:
            raise UsageError(f"{key} picks k by {what}, and every k is measured here", f"leave {key} out")

"""The workload: which prompts are measured, spread evenly over their tasks and tokenized once, outside the timing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

from specdec_cli.document import Count
from specdec_cli.engine.decoding import Request
from specdec_cli.engine.prompts import PromptRow, PromptSet
from specdec_cli.errors import UsageError
from specdec_cli.measure.workload.dataset import check_dataset_name, read_dataset
from specdec_cli.measure.workload.reading import Reading, prompts_of
from specdec_cli.measure.workload.tables import rows_of_bytes
from specdec_cli.measure.workload.turns import fits, request_of
from specdec_cli.sampling.params import SamplingParams

NO_TASK = "unnamed"


@dataclass(frozen=True, slots=True)
class Skipped:
    """A prompt that was left out because it and its output do not fit the context.

    Args:
        index: the row.
        id: the row's name, or None.
        prompt_tokens: of the prompt.
        max_new_tokens: that should follow it.
    """

    index: Count
    id: str | int | None
    prompt_tokens: Count
    max_new_tokens: Count


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests ready to decode.

    Args:
        dataset: where they came from.
        requests: in the order of the rows.
        skipped: what did not fit.
        max_context: what it would have had to fit; None where another engine tokenizes the prompts.
    """

    dataset: str
    requests: tuple[Request, ...]
    skipped: tuple[Skipped, ...]
    max_context: int | None

    @property
    def tasks(self) -> dict[str, int]:
        """Tasks and how many prompts each has; empty where no row names one."""
        return tasks_of([request.row for request in self.requests])

    @property
    def notice(self) -> str | None:
        """A sentence about what was left out, or None."""
        if not self.skipped:
            return None
        num = "1 prompt was" if len(self.skipped) == 1 else f"{len(self.skipped)} prompts were"
        return f"{num} left out: prompt and output are longer than the context of {self.max_context} tokens"

    @property
    def num_prompts(self) -> int:
        """Prompts that are decoded."""
        return len(self.requests)

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of all prompts; None where another engine tokenizes them."""
        return sum(len(request.token_ids) for request in self.requests) or None


def task_of(row: PromptRow) -> str:
    """A row's task; rows without one share a name."""
    return row.category or NO_TASK


def tasks_of(rows: Sequence[PromptRow]) -> dict[str, int]:
    """Tasks and how many rows each has; empty where no row names one."""
    return dict(Counter(map(task_of, rows))) if any(row.category for row in rows) else {}


CATEGORY = "category"


def read_rows(
    dataset: str, tasks: Sequence[str] | None, num_prompts: int, chat: bool | None = False, by: str | None = None
) -> PromptSet:
    """The chosen rows of a data set, and notices about how it was read.

    Args:
        dataset: `builtin:mini`, `builtin:stories`, or what `read_dataset` takes.
        tasks: only these, or None for all.
        num_prompts: most rows.
        chat: whether whole conversations are wanted.
        by: the column that says a row's task; None takes `category`, and needs none.

    Raises:
        UsageError: an unknown data set, task or column, or no rows.
        RunError: a data set that cannot be read.
    """
    prompts = read_dataset(dataset, chat) if not dataset.startswith("builtin:") else built_in_rows(dataset, chat)
    rows = prompts.rows if by is None else grouped(prompts.rows, by)
    return replace(prompts, rows=select(rows, tasks, num_prompts))


def grouped(rows: Sequence[PromptRow], by: str) -> list[PromptRow]:
    """Rows whose task is the value of a column; `category` is that of the data set.

    Raises:
        UsageError: no row has a value there.
    """
    if by == CATEGORY:
        groups = [row.category for row in rows]
    else:
        values = [row.values.get(by) for row in rows]
        groups = [str(value) if isinstance(value, str | int | float) and value != "" else None for value in values]
    if not any(groups):
        columns = list(dict.fromkeys(column for row in rows for column in row.values))
        raise UsageError(f"`--by {by}`: no prompt has a {by}", f"the columns are {', '.join(columns) or 'none'}")
    return [replace(row, category=group) for row, group in zip(rows, groups, strict=True)]


def built_in_rows(dataset: str, chat: bool | None = False) -> PromptSet:
    """The rows of `builtin:mini` or `builtin:stories`.

    Raises:
        UsageError: another name.
    """
    check_dataset_name(dataset)
    name = f"{dataset.removeprefix('builtin:')}.jsonl"
    data = files("specdec_cli.measure.workload").joinpath("prompts", name).read_bytes()
    return prompts_of(rows_of_bytes(data, name, name), name, Reading(chat))


def select(rows: Sequence[PromptRow], tasks: Sequence[str] | None, num_prompts: int) -> list[PromptRow]:
    """At most `num_prompts` rows, as evenly over the tasks as they have rows, and evenly within each.

    Raises:
        UsageError: a task that no row has.
    """
    by_task: dict[str, list[PromptRow]] = {}
    for row in rows:
        by_task.setdefault(task_of(row), []).append(row)
    if tasks is not None:
        unknown = next((task for task in tasks if task not in by_task), None)
        if unknown is not None:
            raise UsageError(f"no prompt has the task `{unknown}`", f"the tasks are {', '.join(by_task)}")
        by_task = {task: by_task[task] for task in dict.fromkeys(tasks)}
    shares = _shares([len(rows) for rows in by_task.values()], num_prompts)
    parts = zip(by_task.values(), shares, strict=True)
    chosen = [row for rows, share in parts for row in (rows[place * len(rows) // share] for place in range(share))]
    return sorted(chosen, key=lambda row: row.index)


def _shares(sizes: Sequence[int], num: int) -> list[int]:
    """How many of each size to take so that `num` is reached and no share is above another that could still grow."""
    shares = [0] * len(sizes)
    left = min(num, sum(sizes))
    while left:
        for place, size in enumerate(sizes):
            if left and shares[place] < size:
                shares[place] += 1
                left -= 1
    return shares


def tokenize(
    rows: Sequence[PromptRow],
    dataset: str,
    encode: Callable[[PromptRow], list[int]],
    params: SamplingParams,
    max_context: int,
) -> Workload:
    """The workload of rows that are not tokenized yet.

    Args:
        rows: the chosen rows.
        dataset: their source's name.
        encode: a row's token ids.
        params: the run's; a row's own length and seed go before them.
        max_context: of the target.

    Raises:
        UsageError: no row fits.
    """
    return workload_of([request_of(row, encode(row), params) for row in rows], dataset, max_context)


def workload_of(requests: Sequence[Request], dataset: str, max_context: int) -> Workload:
    """The requests that fit the context together with their output.

    Raises:
        UsageError: none of them fits.
    """
    fitting = tuple(request for request in requests if fits(request, max_context))
    skipped = [
        Skipped(request.row.index, request.row.id, len(request.token_ids), request.params.max_new_tokens)
        for request in requests
        if not fits(request, max_context)
    ]
    if not fitting:
        shortest = min(skipped, key=lambda each: each.prompt_tokens)
        raise UsageError(
            f"no prompt of `{dataset}` fits the context of `{max_context}` tokens: the shortest has "
            f"`{shortest.prompt_tokens}`, and `{shortest.max_new_tokens}` more should follow",
            "ask for fewer new tokens (-n), or choose a dataset of shorter prompts",
        )
    return Workload(dataset, fitting, tuple(skipped), max_context)

"""The report of `bench`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType

from specdec_cli.measure.documents.bench import live_arms
from specdec_cli.quantities import counted
from specdec_cli.report.columns import PageTable, TableColumn, interval_columns, named_rows, one_digit
from specdec_cli.report.live_table import LiveTable
from specdec_cli.report.result import grid_of, print_result
from specdec_cli.report.table import NOTHING, number, percent
from specdec_cli.report.trees import tree_table

if TYPE_CHECKING:
    from specdec_cli.measure.bench.bench import Progress


class BenchView(LiveTable):
    """The live table of a benchmark; drawn between passes alone.

    Args:
        console: standard error.
        is_live: whether it may be drawn.
        table: what is drawn of the benchmark; its arms without one.
        say: takes a line every 15 seconds where nothing may be drawn.
    """

    def __init__(
        self,
        console: Console,
        is_live: bool,
        table: Callable[[Any], RenderableType] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(console, is_live, say)
        self._table = table or (lambda bench: grid_of(arms_table(live_arms(bench)).first))

    def show(self, study: Any, progress: Progress) -> None:
        """Draw, if the last time is long enough ago."""
        time = self._pace.words(progress.done, progress.total)
        line = f"{progress.done} of {progress.total} passes, {time}; next: {progress.arm}"
        self.draw(lambda: self._table(study), line)


ARM_COLUMNS = (
    TableColumn("arm", "name"),
    TableColumn("tokens/s", "timing.decode_tokens_per_second", one_digit),
    TableColumn("first ms", "timing.ttft_s", lambda seconds: one_digit(seconds and 1000 * seconds)),
    TableColumn("accepted", "speculative.acceptance_rate", percent),
    TableColumn("length", "speculative.acceptance_length", number),
    *interval_columns("speed-up", "speedup.decode"),
    TableColumn("draft/verify/rest %", "speculative", lambda counts: _shares(counts or {})),
    *interval_columns("end to end", "speedup.latency"),
)
AGAINST_COLUMNS = (
    TableColumn("other arm", "name"),
    *interval_columns("draft is faster", "speedup.decode"),
    *interval_columns("end to end", "speedup.latency"),
)
TASK_COLUMNS = (
    TableColumn("task", "name"),
    TableColumn("prompts", "num_prompts"),
    TableColumn("plain tokens/s", "plain.timing.decode_tokens_per_second", one_digit),
    TableColumn("draft tokens/s", "draft.timing.decode_tokens_per_second", one_digit),
    TableColumn("accepted", "draft.speculative.acceptance_rate", percent),
    TableColumn("length", "draft.speculative.acceptance_length", number),
    *interval_columns("speed-up", "speedup.decode"),
)
GROUP_COLUMNS = tuple(TASK_COLUMNS[place] for place in (1, 4, 5, 6, 7))
LEGEND = (
    "first: milliseconds to the first token. speed-up: of decoding, over the same engine without a draft; 95 %: its "
    "interval, if there are enough pairs. draft/verify/rest: shares of a step's time."
)


def arms_table(body: Mapping[str, Any]) -> PageTable:
    """The arms, the plain one first."""
    is_synthetic = "recipe" in body and body["recipe"]["speculation"]["verify"] == "synthetic"
    draft = {"name": "draft (synthetic)" if is_synthetic else "draft", "speedup": body["speedup"], **body["draft"]}
    others = [{"name": name, **arm, "speedup": None} for name, arm in body["against"].items()]
    return PageTable.of("Arms", ARM_COLUMNS, [{"name": "plain", **body["plain"]}, draft, *others], num_first=7)


def bench_tables(document: Mapping[str, Any]) -> Iterator[PageTable]:
    """The tables of a document: arms, trees, other engines, tasks."""
    yield arms_table(document)
    if (trees := tree_table("arm", tree_arms(document))) is not None:
        yield trees
    if document["against"]:
        yield PageTable.of("The draft beside other engines", AGAINST_COLUMNS, named_rows(document["against"]))
    if document["by_task"]:
        yield PageTable.of("Tasks", TASK_COLUMNS, named_rows(document["by_task"]))


def groups_table(document: Mapping[str, Any]) -> PageTable | None:
    """A row for each value of the column of `--by`; None without that option."""
    by = document["plan"].get("by")
    if by is None:
        return None
    return PageTable.of("", (TableColumn(by, "name"), *GROUP_COLUMNS), named_rows(document["by_task"]))


def print_bench(console: Console, body: Mapping[str, Any], details: bool) -> None:
    """Print the report."""
    arms, *others = bench_tables(body)
    engines = [table.first for table in others if table.heads[0] == AGAINST_COLUMNS[0].head]
    tables = [table for table in others if table.heads[0] != AGAINST_COLUMNS[0].head]
    words = filter(None, (_roofline_words(body["roofline"]), *body["findings"][1:]))
    further = [LEGEND, arms.rest, *tables, *words] if details else None
    verdict, checks = body["findings"][:1], [compared_words(body)]
    left_out = "where the time goes, every task, and why"
    groups = groups_table(body)
    figures = [arms.first, *([] if groups is None else [groups]), *engines]
    print_result(console, body, verdict, figures, checks, further, left_out)


def tree_arms(body: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any] | None]]:
    """The arms of a document that may have drafted trees, with their statistics."""
    others = ((name, arm.get("speculative")) for name, arm in body["against"].items())
    return [("draft", body["draft"]["speculative"]), *others]


def _shares(counts: Mapping[str, Any]) -> str:
    """`20/70/10`: drafting, verification and the rest in per cent of the steps' time."""
    seconds = [counts.get(f"{part}_seconds") or 0.0 for part in ("draft", "verify", "overhead")]
    return "/".join(f"{100 * part / sum(seconds):.0f}" for part in seconds) if sum(seconds) > 0 else NOTHING


def _roofline_words(roofline: Mapping[str, Any] | None) -> str | None:
    if roofline is None:
        return None
    parts = []
    for name, key in (("a plain step", "plain"), ("verification", "verify")):
        roof = roofline[key]
        if roof is not None and roof["fraction"] is not None:
            parts.append(
                f"{name} moves {roof['bytes_per_step'] / 1e6:.1f} MB for {roof['tokens_per_step']:.1f} tokens "
                f"({roof['flops_per_byte']:.1f} flops per byte, {roof['bound']}-bound) and reaches "
                f"{percent(roof['fraction'])} of the roofline"
            )
    bandwidth, size = roofline["bandwidth_bytes_per_second"] / 1e9, roofline["bandwidth_measured_over_bytes"] / 1e6
    head = f"Roofline (this machine reads {size:.0f} MB at {bandwidth:.1f} GB/s)"
    return f"{head}: {'; '.join(parts)}." if parts else None


_AUDIT = "`specdec audit` says whether it is a near-tie"
_NOTED = "the notes say how far apart the two tokens are"


def compared_words(body: Mapping[str, Any]) -> str:
    """The result of comparing a document's tokens."""
    return lossless_words(body["lossless"], _NOTED if "engine" in body else _AUDIT)


def lossless_words(lossless: Mapping[str, Any], advice: str = _AUDIT) -> str:
    """The result of comparing the tokens, with advice where they differ."""
    if not lossless["promised"]:
        return f"Lossless: no (--verify {lossless['verify']} does not follow the target's distribution)."
    if lossless["checked_tokens"] is None:
        return "Lossless: promised in distribution; tokens were not compared."
    if not lossless["mismatches"]:
        num = lossless["checked_tokens"]
        return (
            f"Lossless: {'the one token is that' if num == 1 else f'all {num} tokens are those'} of the target alone."
        )
    first, num = lossless["first_divergence"], lossless["mismatches"]
    return (
        f"Lossless: {counted(num, 'output')} {'DIFFERS' if num == 1 else 'DIFFER'} from the target's own, first in "
        f"prompt {first['index'] + 1} at token {first['position'] + 1}; {advice}."
    )

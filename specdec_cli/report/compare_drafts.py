"""The report of `compare-drafts`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType

from specdec_cli.measure.documents.compare_drafts import live_drafts
from specdec_cli.measure.paths import value_at
from specdec_cli.measure.predict.ranking import BUDGETS, ORACLE_WIDTH, RECALLS
from specdec_cli.measure.stats import ENOUGH_PAIRS
from specdec_cli.quantities import sized
from specdec_cli.report.bench import compared_words
from specdec_cli.report.columns import PageTable, TableColumn, interval_columns, times
from specdec_cli.report.result import grid_of, print_result
from specdec_cli.report.table import NOTHING, number, percent
from specdec_cli.report.trees import tree_table

if TYPE_CHECKING:
    from specdec_cli.measure.bench.compare import DraftComparison

UNDECIDED = "undecided"
_BASELINE = "none"  # what recipes and documents call plain decoding
RANKING_LEGEND = (
    "top n: text tokens among the draft's n likeliest. Behind k, acceptance lengths at most k deep: of a chain, of the "
    f"best static trees by number of nodes, and of an oracle that chooses among the first {ORACLE_WIDTH}."
)
LEGEND = (
    "k: the draft's best. cost: a drafted token over a plain step. memory: weights and KV cache of the draft. "
    "predicted: from the trace. 95 %: intervals, if there are enough pairs."
)


def arm_words(name: str) -> str:
    """A draft's name in a table; the baseline is `plain`."""
    return "plain" if name == _BASELINE else name


DRAFT_COLUMNS = (
    TableColumn("draft", "draft", arm_words),
    TableColumn("k", "best_k", lambda k: str(k) if k else NOTHING),
    *interval_columns("speed-up", "speedup"),
    TableColumn("accepted", "acceptance_rate", percent),
    TableColumn("length", "acceptance_length", number),
    TableColumn("cost", "cost_ratio", lambda ratio: number(ratio, 3)),
    TableColumn("memory", "memory_bytes", lambda num: NOTHING if num is None else sized(num)),
    TableColumn("predicted", "predicted_at_best", times),
    *interval_columns("end to end", "latency_speedup"),
)
RANKING_COLUMNS = (
    TableColumn("draft", "draft", arm_words),
    *(TableColumn(f"top {num}", f"ranking.recall.{num}", percent) for num in RECALLS),
    TableColumn("k", "ranking.depth"),
    TableColumn("chain", "ranking.chain.median", number),
    *(TableColumn(f"{num} nodes", f"ranking.trees.{num}.median", number) for num in BUDGETS),
    TableColumn("oracle", "ranking.oracle.median", number),
)
PAIR_COLUMNS = (
    TableColumn("A", "a", arm_words),
    TableColumn("B", "b", arm_words),
    *interval_columns("A over B", "", "speedup_ratio"),
    TableColumn("P(A is faster)", "p_a_faster", lambda share: number(share, 3)),
)


def print_compare(console: Console, body: Mapping[str, Any], details: bool) -> None:
    """Print the report."""
    drafts, *others = compare_tables(body)
    left_out = "end-to-end and predicted speeds, every pair and every task"
    further: list[PageTable | str] = [LEGEND, drafts.rest, *others]
    more, checks = further if details else None, [compared_words(body)]
    print_result(console, body, [body["recommendation"]], [drafts.first], checks, more, left_out)


def compare_tables(document: Mapping[str, Any]) -> Iterator[PageTable]:
    """The tables of a document: drafts, trees, rankings, tasks, pairs."""
    yield _drafts(document["rows"])
    if (trees := tree_table("draft", tree_drafts(document))) is not None:
        yield trees
    if ranked := [row for row in document["rows"] if row.get("ranking") is not None]:
        yield PageTable.of("What each draft's ranking could give", RANKING_COLUMNS, ranked, RANKING_LEGEND)
    if document["task_winners"]:
        yield _tasks_table(document)
    if document["pairwise"]:
        yield PageTable.of("Pairs", PAIR_COLUMNS, document["pairwise"])


def _drafts(rows: Sequence[dict[str, Any]]) -> PageTable:
    """Drafts, each at its best k and with the speed-up that its trace predicts there."""
    by_k = [{at_k["k"]: at_k["speedup"]["median"] for at_k in row.get("predicted") or ()} for row in rows]
    at_best = [
        row | {"predicted_at_best": predicted.get(row["best_k"])} for row, predicted in zip(rows, by_k, strict=True)
    ]
    return PageTable.of("Drafts, each at its best k", DRAFT_COLUMNS, at_best, num_first=8)


def tree_drafts(body: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The drafts of a document with their statistics."""
    return [(arm_words(row["draft"]), row["speculative"]) for row in body["rows"]]


def draft_words(name: str) -> str:
    """A draft's name in a sentence or a plot; the baseline is `no draft`."""
    return "no draft" if name == _BASELINE else name


def drafts_table(comparison: DraftComparison) -> RenderableType:
    """The drafts as they were measured so far, the fastest first."""
    return grid_of(_drafts(live_drafts(comparison)).first)


def _tasks_table(document: Mapping[str, Any]) -> PageTable:
    """Every draft's speed-up in each task, and the fastest where that is certain."""
    rows = []
    for task, winner in document["task_winners"].items():
        speeds = [times(value_at(row, f"by_task.{task}.speedup.median")) for row in document["rows"]]
        rows.append([task, *speeds, _winner_words(winner, document)])
    names = [arm_words(row["draft"]) for row in document["rows"]]
    return PageTable("Tasks", ("task", *names, "fastest"), rows)


def _winner_words(winner: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    """The winner of a task: a draft, `plain`, or why it is open."""
    if winner["draft"] is not None:
        return arm_words(winner["draft"])
    pairs = winner["speedup"]["pairs"]
    return f"{pairs} of {ENOUGH_PAIRS} pairs" if pairs < ENOUGH_PAIRS else UNDECIDED

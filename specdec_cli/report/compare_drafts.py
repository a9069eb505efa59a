"""The document of `compare-drafts`, `specdec.compare-drafts/1`, and its report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType

from specdec_cli.measure.predict.evidence import largest_words
from specdec_cli.measure.stats import ENOUGH_PAIRS
from specdec_cli.report.bench import compared_words
from specdec_cli.report.bench import json_schema as bench_schema
from specdec_cli.report.result import details_of, grid_of, print_result
from specdec_cli.report.schema import read_schema
from specdec_cli.report.table import NOTHING, PageTable, interval_cells, number, percent
from specdec_cli.report.trees import tree_table

if TYPE_CHECKING:
    from specdec_cli.measure.bench.compare import Contender, DraftComparison
    from specdec_cli.measure.bench.passes import Kind, Track
    from specdec_cli.measure.stats import Interval
    from specdec_cli.report.generate import Promise

SCHEMA = "specdec.compare-drafts/1"
HEADS = (
    *("draft", "k", "speed-up", "95 %", "accepted", "length", "cost", "memory"),
    *("predicted", "end to end", "95 %"),
)
_NUM_CELLS = 8  # of the first table on a terminal
UNDECIDED = "undecided"
_BASELINE = "none"  # what recipes and documents call plain decoding
LEGEND = (
    "k: the draft's best. cost: a drafted token over a plain step. memory: weights and KV cache of the draft. "
    "predicted: from the trace. 95 %: intervals, if there are enough pairs."
)
_NO_INTERVAL: Mapping[str, Any] = {"median": None, "ci95": None, "pairs": 0}


def json_schema() -> dict[str, Any]:
    """The JSON Schema of the whole document; statistics, timing and intervals are `bench`'s."""
    bench = bench_schema()
    schema = read_schema("compare-drafts", bench)
    schema["properties"] |= {name: bench["properties"][name] for name in ("workload", "machine", "engine", "gates")}
    return schema


def compare_body(
    comparison: DraftComparison,
    promise: Promise,
    tokens_must_agree: bool,
    machine: Mapping[str, Any],
    interrupted: bool,
) -> dict[str, Any]:
    """The document's own fields, after those that every document has. `gates` is empty until the gates are judged.

    Args:
        comparison: after its run.
        promise: of the verification mode.
        tokens_must_agree: whether every draft's tokens are compared with plain decoding's.
        machine: its load before and after.
        interrupted: whether it was ended early.
    """
    from specdec_cli.measure.bench.choice import choose_draft

    ranking, choice = comparison.ranking(), choose_draft(comparison)
    best = choice.fastest or next(one for one in ranking if one.drafts)
    largest = [
        f"{one.draft} is fastest at k = {comparison.k_max}; {largest_words(comparison.k_max, one.most_depth)}"
        for one in ranking
        if one.prediction is not None and comparison.best_k(one) == comparison.k_max
    ]
    known = [notice for notice in (comparison.workload.notice, comparison.bench.hidden_tasks) if notice is not None]
    timed_tasks = [] if comparison.bench.hidden_tasks else comparison.bench.tasks()
    return {
        "workload": comparison.workload.as_dict(),
        "plan": {
            "k_max": comparison.k_max,
            "exhaustive": comparison.is_exhaustive,
            "batch_size": comparison.batch_size,
            "group_sizes": {str(size): num for size, num in comparison.bench.group_sizes().items()},
            "repeats": comparison.repeats,
            "order": comparison.bench.plan.order,
            "passes": comparison.num_passes,
            "interrupted": interrupted,
        },
        "machine": dict(machine),
        "plain": _totals(comparison.plain),
        "rows": [_row(comparison, one) for one in ranking],
        "pairwise": [
            {
                "a": pair.a.draft,
                "b": pair.b.draft,
                "speedup_ratio": pair.found.ratio.median,
                "ci95": _ends(pair.found.ratio),
                "p_a_faster": pair.found.p_a_faster,
            }
            for pair in comparison.pairs()
        ],
        "task_winners": {task: _task_winner(comparison, task) for task in timed_tasks},
        "winner": choice.winner_name,
        "speedup": {kind: _interval(comparison.speedup(best, kind)) for kind in _KINDS},
        "recommendation": choice.recommendation,
        "verdict": choice.verdict,
        "needs": list(choice.needs),
        "lossless": {
            "promised": promise.is_lossless,
            "verify": promise.verify,
            **_differences(comparison, tokens_must_agree),
        },
        "notices": [*known, *comparison.notices, *largest],
        "gates": [],
    }


_KINDS: tuple[Kind, ...] = ("decode", "latency")


def _row(comparison: DraftComparison, one: Contender) -> dict[str, Any]:
    track, (parameters, memory_bytes) = comparison.track(one), one.sizes()
    shared = one.shared_vocabulary
    return {
        "draft": one.draft,
        "method": one.method,
        "parameters": parameters,
        "memory_bytes": memory_bytes,
        "vocabulary": None if shared is None else shared.as_dict(comparison.outputs()),
        **_figures(comparison, one),
        "by_task": {
            task: {
                "acceptance_rate": track.counts(task).acceptance_rate,
                "acceptance_length": track.counts(task).acceptance_length,
                "speedup": _interval(comparison.speedup(one, task=task)),
            }
            for task in comparison.bench.tasks()
            if task in track.task_counts
        },
        "predicted": _predicted(one),
        "measured": [{"k": k, "speedup": _interval(comparison.speedup_at(one, k))} for k in sorted(one.tracks)],
        **_totals(track),
    }


def _figures(comparison: DraftComparison, one: Contender) -> dict[str, Any]:
    """A draft at its best k."""
    counts = comparison.track(one).counts()
    return {
        "cost_ratio": one.cost_ratio,
        "best_k": comparison.best_k(one),
        "acceptance_rate": counts.acceptance_rate,
        "acceptance_length": counts.acceptance_length,
        "speedup": _interval(comparison.speedup(one)),
        "latency_speedup": _interval(comparison.speedup(one, "latency")),
    }


def _predicted(one: Contender) -> list[dict[str, Any]] | None:
    """A draft at every k, by its trace."""
    if one.prediction is None:
        return None
    return [
        {"k": row.k, "acceptance_length": row.acceptance_length.as_dict(), "speedup": row.median_speedup.as_dict()}
        for row in one.prediction.rows
    ]


def _totals(track: Track) -> dict[str, Any]:
    return {"timing": track.timing().as_dict(), "speculative": track.counts().as_dict()}


def _task_winner(comparison: DraftComparison, task: str) -> dict[str, Any]:
    from specdec_cli.measure.bench.choice import task_winner

    winner, speedup = task_winner(comparison, task)
    return {"draft": winner, "speedup": _interval(speedup)}


def _interval(interval: Interval | None) -> dict[str, Any]:
    return dict(_NO_INTERVAL) if interval is None else interval.as_dict()


def _ends(interval: Interval) -> list[float] | None:
    return None if interval.ci95 is None else list(interval.ci95)


def _differences(comparison: DraftComparison, tokens_must_agree: bool) -> dict[str, Any]:
    """All drafts' outputs against plain decoding's, as one."""
    if not tokens_must_agree:
        return {"checked_tokens": None, "mismatches": None, "first_divergence": None}
    found = comparison.differences()
    return dict(found.as_dict())


def print_compare(console: Console, body: Mapping[str, Any], details: bool) -> None:
    """Print the report."""
    drafts, *others = compare_tables(body)

    def further() -> Iterator[RenderableType | str]:
        yield LEGEND
        yield grid_of(("draft", *HEADS[_NUM_CELLS:]), [[row[0], *row[_NUM_CELLS:]] for row in drafts.rows])
        for table in others:
            yield from details_of(table)

    figures = [grid_of(HEADS[:_NUM_CELLS], [row[:_NUM_CELLS] for row in drafts.rows])]
    left_out = "end-to-end and predicted speeds, every pair and every task"
    checks = [compared_words(body)]
    print_result(console, body, [body["recommendation"]], figures, checks, further if details else None, left_out)


def compare_tables(document: Mapping[str, Any]) -> Iterator[PageTable]:
    """The tables of a document: drafts, trees, tasks, pairs."""
    yield PageTable("Drafts, each at its best k", HEADS, [_cells(row) for row in document["rows"]])
    if (trees := tree_table("draft", tree_drafts(document))) is not None:
        yield trees
    if document["task_winners"]:
        yield _tasks_table(document)
    if document["pairwise"]:
        pairs = [
            [
                arm_words(one["a"]),
                arm_words(one["b"]),
                *interval_cells({"median": one["speedup_ratio"], "ci95": one["ci95"]}),
                number(one["p_a_faster"], 3),
            ]
            for one in document["pairwise"]
        ]
        yield PageTable("Pairs", ("A", "B", "A over B", "95 %", "P(A is faster)"), pairs)


def tree_drafts(body: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The drafts of a document with their statistics."""
    return [(arm_words(row["draft"]), row["speculative"]) for row in body["rows"]]


def arm_words(name: str) -> str:
    """A draft's name in a table; the baseline is `plain`."""
    return "plain" if name == _BASELINE else name


def draft_words(name: str) -> str:
    """A draft's name in a sentence or a plot; the baseline is `no draft`."""
    return "no draft" if name == _BASELINE else name


def drafts_table(comparison: DraftComparison) -> RenderableType:
    """The drafts as they were measured so far, the fastest first."""
    rows = [
        {"draft": one.draft, "memory_bytes": one.sizes()[1], "predicted": None, **_figures(comparison, one)}
        for one in comparison.ranking()
    ]
    return grid_of(HEADS[:_NUM_CELLS], [_cells(row)[:_NUM_CELLS] for row in rows])


def _cells(row: Mapping[str, Any]) -> list[str]:
    predicted = [found["speedup"] for found in row["predicted"] or () if found["k"] == row["best_k"]]
    return [
        arm_words(row["draft"]),
        str(row["best_k"]) if row["best_k"] else NOTHING,
        *interval_cells(row["speedup"]),
        percent(row["acceptance_rate"]),
        number(row["acceptance_length"]),
        number(row["cost_ratio"], 3),
        _bytes(row["memory_bytes"]),
        interval_cells(predicted[0] if predicted else None)[0],
        *interval_cells(row["latency_speedup"]),
    ]


def _tasks_table(document: Mapping[str, Any]) -> PageTable:
    """Every draft's speed-up in each task, and the fastest where that is certain."""
    rows = []
    for task, found in document["task_winners"].items():
        speeds = [interval_cells(row.get("by_task", {}).get(task, {}).get("speedup"))[0] for row in document["rows"]]
        rows.append([task, *speeds, _winner_words(found, document)])
    names = [arm_words(row["draft"]) for row in document["rows"]]
    return PageTable("Tasks", ("task", *names, "fastest"), rows)


def _winner_words(found: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    """The winner of a task: a draft, `plain`, or why it is open."""
    if found["draft"] is not None:
        return arm_words(found["draft"])
    pairs = found["speedup"]["pairs"]
    return f"{pairs} of {ENOUGH_PAIRS} pairs" if pairs < ENOUGH_PAIRS else UNDECIDED


def _bytes(num: int | None) -> str:
    if num is None:
        return NOTHING
    return f"{num / 1e9:.2f} GB" if num >= 1e9 else f"{num / 1e6:.1f} MB" if num else "0"

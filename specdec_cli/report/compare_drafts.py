"""The document of `compare-drafts`, `specdec.compare-drafts/1`, and its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec_cli.report.bench import compared_words, interval_words, print_notes_and_gates
from specdec_cli.report.bench import json_schema as bench_schema
from specdec_cli.report.grid import Grid
from specdec_cli.report.schema import read_schema
from specdec_cli.report.table import NOTHING, number, percent
from specdec_cli.report.trees import print_tree_table, tree_table

if TYPE_CHECKING:
    from specdec_cli.measure.bench.compare import Contender, DraftComparison
    from specdec_cli.measure.bench.passes import Kind, Track
    from specdec_cli.measure.stats import Interval
    from specdec_cli.report.generate import Promise

SCHEMA = "specdec.compare-drafts/1"
HEADS = ("draft", "best k", "speed-up (95 %)", "end to end", "predicted", "accepted", "length", "cost", "memory")
UNDECIDED = "undecided"
_BASELINE = "none"  # what recipes and documents call plain decoding
LEGEND = (
    "cost: a drafted token over a plain step. predicted: from the trace. memory: weights and KV cache of the draft. "
    "In brackets: 95 % intervals, if there are enough pairs."
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
        "notices": [*known, *comparison.notices],
        "gates": [],
    }


_KINDS: tuple[Kind, ...] = ("decode", "latency")


def _row(comparison: DraftComparison, one: Contender) -> dict[str, Any]:
    track = comparison.track(one)
    counts, (parameters, memory_bytes) = track.counts(), one.sizes()
    shared = one.shared_vocabulary
    return {
        "draft": one.draft,
        "method": one.method,
        "parameters": parameters,
        "memory_bytes": memory_bytes,
        "vocabulary": None if shared is None else shared.as_dict(comparison.outputs()),
        "cost_ratio": one.cost_ratio,
        "best_k": comparison.best_k(one),
        "acceptance_rate": counts.acceptance_rate,
        "acceptance_length": counts.acceptance_length,
        "speedup": _interval(comparison.speedup(one)),
        "latency_speedup": _interval(comparison.speedup(one, "latency")),
        "by_task": {
            task: {
                "acceptance_rate": track.counts(task).acceptance_rate,
                "acceptance_length": track.counts(task).acceptance_length,
                "speedup": _interval(comparison.speedup(one, task=task)),
            }
            for task in comparison.bench.tasks()
            if task in track.task_counts
        },
        "predicted": None
        if one.prediction is None
        else [
            {
                "k": row.k,
                "acceptance_length": row.acceptance_length.as_dict(),
                "speedup": row.median_speedup.as_dict(),
            }
            for row in one.prediction.rows
        ],
        "measured": [{"k": k, "speedup": _interval(comparison.speedup_at(one, k))} for k in sorted(one.tracks)],
        **_totals(track),
    }


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


def print_compare(console: Console, comparison: DraftComparison, body: Mapping[str, Any]) -> None:
    """Print the report."""
    console.print(drafts_table(comparison))
    console.print(Text(LEGEND, style="dim"), soft_wrap=True)
    print_tree_table(console, tree_table("draft", tree_drafts(body)))
    if body["task_winners"]:
        console.print(_tasks_table(comparison, body))
    if body["pairwise"]:
        console.print(_pairs_table(body))
    console.print(_classic_table(body))
    console.print(Text(compared_words(body)), soft_wrap=True)
    print_notes_and_gates(console, body)
    console.print(Text(body["recommendation"], style="bold"), soft_wrap=True)


def tree_drafts(body: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The drafts of a document with their statistics."""
    return [(draft_words(row["draft"]), row["speculative"]) for row in body["rows"]]


def draft_words(name: str) -> str:
    """A draft's name in a report; the baseline is `no draft`."""
    return "no draft" if name == _BASELINE else name


def winner_words(name: str | None) -> str:
    """The winner of a task in a report: a draft, `no draft`, or `undecided`."""
    return UNDECIDED if name is None else draft_words(name)


def drafts_table(comparison: DraftComparison) -> Table:
    """The drafts as they were measured so far, the fastest first."""
    rows = []
    for one in comparison.ranking():
        k, counts = comparison.best_k(one), comparison.track(one).counts()
        predicted = [] if one.prediction is None else [row for row in one.prediction.rows if row.k == k]
        rows.append(
            [
                draft_words(one.draft),
                str(k) if k else NOTHING,
                interval_words(comparison.speedup(one)),
                interval_words(comparison.speedup(one, "latency")),
                _short(predicted[0].median_speedup.as_dict() if predicted else None),
                percent(counts.acceptance_rate),
                number(counts.acceptance_length),
                number(one.cost_ratio, 3),
                _bytes(one.sizes()[1]),
            ]
        )
    return _table(HEADS, rows)


def _tasks_table(comparison: DraftComparison, body: Mapping[str, Any]) -> Table:
    rows = [
        [
            task,
            *(_short(row["by_task"].get(task, {}).get("speedup")) for row in body["rows"]),
            winner_words(found["draft"]),
        ]
        for task, found in body["task_winners"].items()
    ]
    return _table(("task", *(draft_words(one.draft) for one in comparison.ranking()), "winner"), rows)


def _pairs_table(body: Mapping[str, Any]) -> Table:
    rows = []
    for pair in body["pairwise"]:
        ends = "" if pair["ci95"] is None else f" ({pair['ci95'][0]:.2f}–{pair['ci95'][1]:.2f})"
        ratio = f"{pair['speedup_ratio']:.2f}×{ends}"
        rows.append([draft_words(pair["a"]), draft_words(pair["b"]), ratio, number(pair["p_a_faster"], 3)])
    return _table(("A", "B", "A over B (95 %)", "P(A is faster)"), rows)


def _classic_table(body: Mapping[str, Any]) -> Table:
    target = str(body["recipe"]["target"]["model"])
    return _table(
        ("Target", "Draft", "Speed-up"),
        [[target, draft_words(row["draft"]), _short(row["speedup"])] for row in body["rows"]],
    )


def _short(speedup: Mapping[str, Any] | None) -> str:
    return NOTHING if speedup is None or speedup["median"] is None else f"{speedup['median']:.2f}×"


def _bytes(num: int | None) -> str:
    if num is None:
        return NOTHING
    return f"{num / 1e9:.2f} GB" if num >= 1e9 else f"{num / 1e6:.1f} MB" if num else "0"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Grid(*heads)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table

"""The document of `sweep-k`, `specdec.sweep-k/1`, and its report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from specdec_cli.report.bench import lossless_words
from specdec_cli.report.generate import Promise
from specdec_cli.report.generate import json_schema as generate_schema
from specdec_cli.report.pace import Pace
from specdec_cli.report.recommendation import INCONCLUSIVE, depth_mark, recommendation_words, short_words, size_name
from specdec_cli.report.result import grid_of, print_result
from specdec_cli.report.schema import read_schema
from specdec_cli.report.sweep_trees import TREE_HEADS, tree_rows
from specdec_cli.report.table import NOTHING, interval_cells, number
from specdec_cli.text.printable import printable

if TYPE_CHECKING:
    from specdec_cli.measure.bench.bench import Progress
    from specdec_cli.measure.bench.sweep import Measured, Sweep
    from specdec_cli.measure.bench.sweeps import Sweeps
    from specdec_cli.measure.predict.predict import Predicted

SCHEMA = "specdec.sweep-k/1"
SIZE_HEADS = ("batch", "best k", "speed-up", "95 %")
HEADS = (
    *("k", "tokens a step", "predicted", "95 %", "measured", "95 %", ""),
    *("textbook", "draft/verify/rest %"),
)
_NUM_CELLS, _NUM_TREE_CELLS = 7, 8  # of the first tables on a terminal
_SECONDS_BETWEEN_DRAWS = 0.25


def json_schema() -> dict[str, Any]:
    """The JSON Schema of the whole document; counts and the lossless check are `generate`'s."""
    return read_schema("sweep-k", generate_schema())


def sweep_body(
    sweeps: Sweeps,
    promise: Promise,
    tokens_must_agree: bool,
    machine: Mapping[str, Any],
    trace: Mapping[str, Any] | None,
    notices: list[str],
    interrupted: bool,
) -> dict[str, Any]:
    """The document's own fields, after those that every document has. `gates` is empty until the gates are judged.

    Figures are the smallest batch size's; `by_batch_size` has every one's.

    Args:
        sweeps: after their run.
        promise: of the verification mode.
        tokens_must_agree: whether tokens with and without a draft are compared.
        machine: its load before and after.
        trace: what it rests on, or None without one.
        notices: sentences that a reader should know.
        interrupted: whether it was ended early.
    """
    from specdec_cli.measure.predict.predict import PUBLISHED_K
    from specdec_cli.measure.predict.replay import by_position, by_task

    by_size = [_by_size(sweep) for sweep in sweeps.known()]
    first, smallest = sweeps.first, by_size[0]
    prediction = first.prediction
    replays = [] if prediction is None else [row.replayed for row in prediction.chains]
    unchecked = {"checked_tokens": None, "mismatches": None, "first_divergence": None}
    return {
        "workload": first.workload.as_dict(),
        "plan": {
            "k_max": first.k_max,
            "exhaustive": first.is_exhaustive,
            "measured_k": smallest["measured_k"],
            "measured_trees": [row["tree"] for row in smallest["trees"] if row["measured"] is not None],
            "batch_size": first.batch_size,
            "batch_sizes": [sweep.batch_size for sweep in sweeps.by_size],
            "repeats": first.repeats,
            "order": "A B B A",
            "passes": sum(len(track.passes) for track in sweeps.tracks()),
            "interrupted": interrupted,
            "settled_after": smallest["settled_after"],
        },
        "machine": dict(machine),
        "trace": None if trace is None else dict(trace),
        **{name: smallest[name] for name in ("costs", "rows", "trees", "recommended")},
        "by_batch_size": by_size,
        "k_by_batch": ",".join(f"{size}:{k}" for size, k in sweeps.k_by_batch().items()),
        "table": _table(sweeps),
        "by_task": by_task(replays) if replays else {},
        "by_position": by_position(replays) if replays else [],
        "guidance": list(PUBLISHED_K),
        "iid": {"alpha": None, "speedup_by_k": {}} if prediction is None else prediction.iid_as_dict(),
        "break_even_alpha": None if prediction is None else prediction.break_even_alpha,
        "draft_seconds_for_2x": None if prediction is None else prediction.draft_seconds_for_2x,
        "ceiling": None if prediction is None else _known(prediction.ceiling),
        "cost_ratio": None if prediction is None else _known(prediction.cost_ratio),
        "lossless": {
            "promised": promise.is_lossless,
            "verify": promise.verify,
            **(sweeps.differences().as_dict() if tokens_must_agree else unchecked),
        },
        "notices": notices,
        "gates": [],
    }


def _table(sweeps: Sweeps) -> dict[str, Any] | None:
    """Predicted acceptance with the recommended table of k; None for one batch size, or without a trace."""
    found = sweeps.table()
    if found is None:
        return None
    num_steps = sum(found.steps_by_batch.values())
    return {
        "max_num_seqs": max(found.steps_by_batch),
        "tokens_per_step": found.tokens_per_step().as_dict(),
        "acceptance_length": found.acceptance_length().as_dict(),
        "acceptance_rate": found.acceptance_rate().as_dict(),
        "share_of_steps": {str(size): num / num_steps for size, num in found.steps_by_batch.items()},
    }


def _by_size(sweep: Sweep) -> dict[str, Any]:
    """The result at one batch size."""
    measured, recommended = sweep.measured(), sweep.recommended()
    return {
        "batch_size": sweep.batch_size,
        "measured_k": [shape.k for shape in measured if shape.tree is None],
        "settled_after": sweep.settled_after,
        "costs": sweep.costs.as_dict(),
        "rows": list(_chains(sweep)),
        "trees": list(_trees(sweep)),
        "recommended": {
            "k": recommended.k,
            "tree": None if recommended.tree is None else str(recommended.tree),
            "speedup": None if recommended.speedup is None else recommended.speedup.as_dict(),
            "why": recommended.why,
            "verdict": recommended.verdict,
            "needs": list(recommended.needs),
        },
    }


def _chains(sweep: Sweep, has_rates: bool = True) -> Iterator[dict[str, Any]]:
    """Every k, predicted and measured."""
    measured = sweep.measured()
    for shape in sweep.every_shape():
        if shape.tree is None:
            yield {"k": shape.k, **_row(sweep.predicted(shape), measured.get(shape), has_rates)}


def _trees(sweep: Sweep, has_rates: bool = True) -> Iterator[dict[str, Any]]:
    """Every tree, predicted and measured."""
    measured = sweep.measured()
    for shape in sweep.every_shape():
        if shape.tree is not None:
            figures = _row(sweep.predicted(shape), measured.get(shape), has_rates)
            yield {"tree": str(shape.tree), "nodes": shape.num_nodes, "depth": shape.k, **figures}


def _row(predicted: Predicted | None, measured: Measured | None, has_rates: bool = True) -> dict[str, Any]:
    """One k or tree; its acceptance length is the trace's, and without one that of the measured steps.

    Args:
        predicted: None where no trace can tell.
        measured: None where it was not measured.
        has_rates: whether rates by depth are wanted, with their intervals.
    """
    length = None if predicted is None else _known(predicted.acceptance_length.median)
    if predicted is None and measured is not None:
        length = measured.track.counts().acceptance_length
    said = None
    if predicted is not None:
        speedup = predicted.speedup.as_dict()
        said = {"speedup": speedup.pop("median"), **speedup, "shares": predicted.shares()}
        said["tokens_per_second"] = _known(predicted.tokens_per_second)
        said |= predicted.replayed.acceptance() if has_rates else {}
    return {
        "acceptance_length": length,
        "predicted": said,
        "measured": None if measured is None else measured.as_dict(),
    }


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


class SweepView:
    """The live table on a terminal; drawn between passes alone, at most four times a second.

    Args:
        console: standard error.
        is_live: whether it may be drawn.
        say: takes a line every 15 seconds where nothing may be drawn.
    """

    def __init__(self, console: Console, is_live: bool, say: Callable[[str], None] | None = None) -> None:
        self._say, self._pace = say, Pace()
        live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
        self._live = live if is_live else None
        self._last = 0.0

    def __enter__(self) -> SweepView:
        """Open the live area."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        if self._live is not None:
            self._live.stop()

    def show(self, sweep: Sweep, progress: Progress) -> None:
        """Draw, if the last time is long enough ago."""
        together = "" if sweep.batch_size == 1 else f"{sweep.batch_size} together: "
        time = self._pace.words(progress.done, progress.total)
        line = f"{together}{progress.done} of {progress.total} passes, {time}; next: {progress.arm}"
        if self._live is None:
            if self._say is not None and self._pace.is_due():
                self._say(line)
            return
        if perf_counter() < self._last + _SECONDS_BETWEEN_DRAWS:
            return
        rows = {"rows": list(_chains(sweep, False)), "trees": list(_trees(sweep, False)), "recommended": None}
        self._live.update(Group(*_first_tables(rows), Text(line, style="dim")), refresh=True)
        self._last = perf_counter()


def depth_rows(found: Mapping[str, Any], iid: Mapping[str, float | None]) -> Iterator[list[str]]:
    """Every k of one batch size as cells, predicted and measured. The recommended one is marked, or the k in use.

    Args:
        found: the batch size's part of a document.
        iid: the textbook's speed-up by k.
    """
    for row in found["rows"]:
        predicted, textbook = row["predicted"], iid.get(str(row["k"]))
        shares = [] if predicted is None else [f"{100 * share:.0f}" for share in (predicted["shares"] or {}).values()]
        yield [
            str(row["k"]),
            number(row["acceptance_length"]),
            *interval_cells(predicted, "speedup"),
            *interval_cells(row["measured"], "speedup"),
            depth_mark(row["k"], found["recommended"]),
            NOTHING if textbook is None else f"{textbook:.2f}×",
            "/".join(shares) or NOTHING,
        ]


def _first_tables(found: Mapping[str, Any], title: str | None = None) -> Iterator[RenderableType]:
    """Every k and tree of one batch size."""
    yield grid_of(HEADS[:_NUM_CELLS], [row[:_NUM_CELLS] for row in depth_rows(found, {})], title)
    if found["trees"]:
        yield grid_of(TREE_HEADS[:_NUM_TREE_CELLS], [row[:_NUM_TREE_CELLS] for row in tree_rows(found)])


def print_sweeps(console: Console, body: Mapping[str, Any], details: bool) -> None:
    """Print the report."""
    by_size = body["by_batch_size"]
    has_several = len(body["plan"]["batch_sizes"]) > 1
    verdict = [recommendation_words(found["recommended"], size_name(found, has_several)) for found in by_size]
    figures: list[RenderableType] = []
    if has_several:
        verdict.append(f"k by batch size: --k-by-batch {body['k_by_batch']}{_table_words(body['table'])}")
        figures.append(grid_of(SIZE_HEADS, size_rows(by_size)))
    for found in by_size:
        figures += _first_tables(found, f"Batch size {found['batch_size']}" if has_several else None)
    checks = [lossless_words(body["lossless"])] if body["plan"]["passes"] else []
    further = (lambda: _details(body)) if details else None
    left_out = "the costs of steps, the textbook's figures and tasks"
    print_result(console, body, verdict, figures, checks, further, left_out)


def _details(body: Mapping[str, Any]) -> Iterator[RenderableType | str]:
    """The rest of the report."""
    by_size = body["by_batch_size"]
    for found in by_size:
        is_first = found is by_size[0]
        rows = depth_rows(found, body["iid"]["speedup_by_k"] if is_first else {})
        yield grid_of(("k", *HEADS[_NUM_CELLS:]), [[row[0], *row[_NUM_CELLS:]] for row in rows])
        if found["trees"]:
            rows = tree_rows(found)
            yield grid_of(("tree", *TREE_HEADS[_NUM_TREE_CELLS:]), [[row[0], *row[_NUM_TREE_CELLS:]] for row in rows])
        yield from _cost_words(found)
        if is_first:
            yield from (*_textbook_words(body), *_acceptance_words(body, found))
    low, high = body["guidance"]
    here = ", ".join(short_words(found["recommended"]) for found in by_size)
    yield f"Published guidance: {low} to {high} tokens; here: {here}."


def size_rows(by_size: list[dict[str, Any]]) -> Iterator[list[str]]:
    """The best k of every batch size, as cells, from the document's `by_batch_size`."""
    for found in by_size:
        k, speedup = found["recommended"]["k"], found["recommended"]["speedup"]
        is_open = found["recommended"]["verdict"] == INCONCLUSIVE
        best = f"{k}: inconclusive" if is_open else str(k or "0: do not speculate")
        yield [str(found["batch_size"]), best, *interval_cells(speedup)]


def _cost_words(found: Mapping[str, Any]) -> list[str]:
    costs = found["costs"]
    rows = " ".join(f"{1000 * seconds:.2f}" for seconds in costs["target_seconds_by_rows"])
    draft, engine = 1000 * costs["draft_seconds_per_token"], 1000 * costs["overhead_seconds"]
    lines = [
        f"Speed-up of decoding, the median prompt's. Target forward of 1 to {len(found['rows']) + 1} rows: {rows} ms; "
        f"draft {draft:.2f} ms a token; the engine {engine:.2f} ms a step (context {costs['context_length']}); "
        f"{_rounds_words(costs)}."
    ]
    if (settled := found["settled_after"]) is not None:
        lines.append(f"Measuring ended after {settled} groups: the choice was known to within 2 %.")
    return lines


def _rounds_words(costs: Mapping[str, Any]) -> str:
    """When step costs were measured, seen from the passes."""
    num, in_turn = costs["repeats"], costs["rounds_in_turn"]
    rounds = "1 round" if num == 1 else f"{num} rounds"
    if in_turn == num:
        return f"{rounds} taken between the passes"
    return f"{rounds}, {in_turn} of them taken between the passes" if in_turn else f"{rounds} taken before the passes"


def _acceptance_words(body: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Acceptance by task and along the text, at the recommended k or, without one, at the k predicted best."""
    known = [row for row in found["rows"] if row["predicted"] and row["predicted"]["speedup"] is not None]
    if not known:
        return []
    k = 0 if found["recommended"]["tree"] else found["recommended"]["k"]
    k = k or max(known, key=lambda row: (row["predicted"]["speedup"], -row["k"]))["k"]
    k = min(k, len(found["rows"]))  # a recipe's own k, which is kept, may be larger than what was swept
    tasks = [
        f"{printable(name)} {_length_words(rows[k - 1]['acceptance_length'])}" for name, rows in body["by_task"].items()
    ]
    places = [
        f"{one['from']}–{one['to']}: {number(one['by_k'][k - 1]['acceptance_length']['median'])}"
        for one in body["by_position"]
    ]
    ways = (("by task", tasks), ("by output position", places))
    return [
        f"Predicted tokens a drafting step at k = {k} {how}: {', '.join(said)}." for how, said in ways if len(said) > 1
    ]


def _length_words(interval: Mapping[str, Any]) -> str:
    ends = "" if interval["ci95"] is None else " ({:.2f}–{:.2f})".format(*interval["ci95"])
    return number(interval["median"]) + ends


def _table_words(table: Mapping[str, Any] | None) -> str:
    if table is None or table["tokens_per_step"]["median"] is None:
        return ""
    words = _length_words(table["tokens_per_step"])
    return f" (predicted: {words} tokens a step of a sequence, up to {table['max_num_seqs']} together)"


def _textbook_words(body: Mapping[str, Any]) -> list[str]:
    if body["iid"]["alpha"] is None:
        return []
    even, twice = body["break_even_alpha"], body["draft_seconds_for_2x"]
    pays = "no acceptance breaks even at these costs" if even is None else f"it breaks even at {even:.2f}"
    draft = "not even a free draft gives 2×" if twice is None else f"2× needs a draft of {1000 * twice:.2f} ms a token"
    ceiling = "" if body["ceiling"] is None else f"; the ceiling with a free draft is {body['ceiling']:.2f}×"
    return [f"Textbook: one α for every token, here {body['iid']['alpha']:.2f}; {pays}; {draft}{ceiling}."]

"""The report of `sweep-k`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType

from specdec_cli.measure.documents.sweep_k import live_rows
from specdec_cli.quantities import counted
from specdec_cli.report.bench import lossless_words
from specdec_cli.report.columns import PageTable, TableColumn, interval_columns, one_digit, times
from specdec_cli.report.recommendation import INCONCLUSIVE, depth_mark, recommendation_words, short_words, size_name
from specdec_cli.report.result import grid_of, print_result
from specdec_cli.report.table import NOTHING, number, percent
from specdec_cli.text.printable import printable

if TYPE_CHECKING:
    from specdec_cli.measure.bench.sweep import Sweep

SIZE_COLUMNS = (
    TableColumn("batch", "batch_size"),
    TableColumn("best k", "recommended", lambda recommended: _best_words(recommended)),
    *interval_columns("speed-up", "recommended.speedup"),
)
_FIGURES = (
    TableColumn("tokens a step", "acceptance_length", number),
    *interval_columns("predicted", "predicted", "speedup"),
    *interval_columns("measured", "measured", "speedup"),
    TableColumn("", "mark"),
)
_SHARES = TableColumn(
    "draft/verify/rest %",
    "predicted.shares",
    lambda shares: "/".join(f"{100 * share:.0f}" for share in (shares or {}).values()) or NOTHING,
)
DEPTH_COLUMNS = (TableColumn("k", "k"), *_FIGURES, TableColumn("textbook", "textbook", times), _SHARES)
UNSURE_COLUMNS = (TableColumn("k", "k"), TableColumn("p-min", "p_min", number), *_FIGURES, _SHARES)
TREE_COLUMNS = (
    *(TableColumn("tree", "tree"), TableColumn("nodes", "nodes"), *_FIGURES),
    *(TableColumn("depth", "depth"), TableColumn("tokens/s", "tokens_per_second", one_digit), _SHARES),
)


def live_tables(sweep: Sweep) -> RenderableType:
    """The ks and trees as they were measured so far."""
    return Group(*(grid_of(table.first) for table in size_tables(live_rows(sweep))))


def size_tables(
    at_size: Mapping[str, Any], textbook: Mapping[str, float | None] = MappingProxyType({}), at: str = ""
) -> Iterator[PageTable]:
    """Every k and tree of one batch size, predicted and measured. The recommended one is marked, or the one in use.

    Args:
        at_size: the batch size's part of a document.
        textbook: its speed-up by k.
        at: words about the batch size in the titles.
    """
    recommended = at_size["recommended"]
    chains = [
        row | {"textbook": textbook.get(str(row["k"])), "mark": depth_mark(row["k"], recommended)}
        for row in at_size["rows"]
    ]
    yield PageTable.of(f"Every k{at}", DEPTH_COLUMNS, chains, num_first=7)
    if unsure := at_size.get("by_p_min"):
        rows = [row | {"mark": depth_mark(row["k"], recommended, p_min=row["p_min"])} for row in unsure]
        yield PageTable.of(f"With p-min{at}", UNSURE_COLUMNS, rows, num_first=8)
    trees = [
        row
        | {"mark": depth_mark(row["depth"], recommended, row["tree"])}
        | {"tokens_per_second": (row["measured"] or row["predicted"] or {}).get("tokens_per_second")}
        for row in at_size.get("trees", ())
    ]
    if trees:
        yield PageTable.of(f"Trees{at}", TREE_COLUMNS, trees, num_first=8)


def sizes_table(document: Mapping[str, Any]) -> PageTable:
    """The best k of every batch size; where that is open there is no speed-up of it."""
    rows = [
        row if (its := row["recommended"])["verdict"] != INCONCLUSIVE else row | {"recommended": its | {"speedup": {}}}
        for row in document["by_batch_size"]
    ]
    return PageTable.of(f"Batch sizes (--k-by-batch {document['k_by_batch']})", SIZE_COLUMNS, rows)


def sweep_tables(document: Mapping[str, Any]) -> Iterator[PageTable]:
    """The tables of a document: batch sizes, and of each one every k, its trees and the costs of steps."""
    by_size = document["by_batch_size"]
    if len(by_size) > 1:
        yield sizes_table(document)
    for place, at_size in enumerate(by_size):
        at = f", batch size {at_size['batch_size']}" if len(by_size) > 1 else ""
        yield from size_tables(at_size, document["iid"]["speedup_by_k"] if place == 0 else {}, at)
        yield _costs_table(at_size["costs"], at)


def _costs_table(costs: Mapping[str, Any], at: str) -> PageTable:
    seconds = [("draft, a token", costs["draft_seconds_per_token"]), ("engine, a step", costs["overhead_seconds"])]
    seconds += [(f"target, {counted(n, 'row')}", cost) for n, cost in enumerate(costs["target_seconds_by_rows"], 1)]
    return PageTable(f"Costs{at}", ("what", "milliseconds"), [[name, f"{1000 * cost:.3f}"] for name, cost in seconds])


def print_sweeps(console: Console, body: Mapping[str, Any], details: bool) -> None:
    """Print the report."""
    by_size = body["by_batch_size"]
    has_several = len(body["plan"]["batch_sizes"]) > 1
    verdict = [recommendation_words(at_size["recommended"], size_name(at_size, has_several)) for at_size in by_size]
    figures: list[PageTable | str] = []
    if has_several:
        verdict.append(f"k by batch size: --k-by-batch {body['k_by_batch']}{_table_words(body['table'])}")
        figures.append(sizes_table(body).first)
    for at_size in by_size:
        first, *trees = (table.first for table in size_tables(at_size))
        figures += [replace(first, title=f"Batch size {at_size['batch_size']}" if has_several else ""), *trees]
    checks = [lossless_words(body["lossless"])] if body["plan"]["passes"] else []
    checks += _engine_words(body)
    further = _details(body) if details else None
    left_out = "the costs of steps, the textbook's figures and tasks"
    print_result(console, body, verdict, figures, checks, further, left_out)


def _details(body: Mapping[str, Any]) -> Iterator[PageTable | str]:
    """The rest of the report."""
    by_size = body["by_batch_size"]
    for at_size in by_size:
        is_first = at_size is by_size[0]
        textbook = body["iid"]["speedup_by_k"] if is_first else {}
        yield from (table.rest for table in size_tables(at_size, textbook))
        yield from _cost_words(at_size)
        if is_first:
            yield from (*_textbook_words(body), *_acceptance_words(body, at_size))
    yield from _start_words(body)
    low, high = body["guidance"]
    here = ", ".join(short_words(at_size["recommended"]) for at_size in by_size)
    yield f"Published guidance: {low} to {high} tokens; here: {here}."


def _engine_words(body: Mapping[str, Any]) -> list[str]:
    """How well a few starts of another engine predicted the rest."""
    if (sweep := body.get("engine_sweep")) is None:
        return []
    return [f"Predicted speed-ups differ from measured ones by {percent(sweep['median_error'])} in the median."]


def _start_words(body: Mapping[str, Any]) -> Iterator[str]:
    """The starts of another engine, its rule, and the costs of steps that were fitted to them."""
    if (sweep := body.get("engine_sweep")) is None:
        return
    source, p_mins = sweep["source"], sweep.get("p_mins") or [0] * len(sweep["starts"])
    pairs = zip(sweep["starts"], p_mins, strict=True)
    starts = ", ".join(f"{k}{f' with p-min {p_min:g}' if p_min else ''}" for k, p_min in pairs)
    yield (
        f"{body['trace']['draft']} under the engine's rule {sweep['rule']}, started at k = {starts}; trace: "
        f"{counted(source['requests'], 'request')}, {source['bytes'] / 1e6:.2f} MB; {source['seconds']:.1f} s in all."
    )
    for costs in sweep["costs"]:
        plain, base, slope = (1e3 * costs[name] for name in ("plain_seconds", "base_seconds", "seconds_per_token"))
        error, stop = percent(max(map(abs, costs["error"].values()))), costs.get("seconds_per_stop")
        stop = "" if stop is None else f", and {1e3 * stop:.1f} ms where p-min ends the draft"
        yield (
            f"Batch size {costs['batch_size']}: a step takes {plain:.1f} ms, with k drafted tokens {base:.1f} + "
            f"{slope:.1f} k ms more{stop}, fitted within {error}."
        )


def _best_words(recommended: Mapping[str, Any]) -> str:
    """The best k of a batch size, or that it is open."""
    k = recommended["k"]
    return f"{k}: inconclusive" if recommended["verdict"] == INCONCLUSIVE else str(k or "0: do not speculate")


def _cost_words(at_size: Mapping[str, Any]) -> list[str]:
    costs = at_size["costs"]
    rows = " ".join(f"{1000 * seconds:.2f}" for seconds in costs["target_seconds_by_rows"])
    draft, engine = 1000 * costs["draft_seconds_per_token"], 1000 * costs["overhead_seconds"]
    lines = [
        f"Speed-up of decoding, the median prompt's. Target forward of 1 to {len(at_size['rows']) + 1} rows: {rows} "
        f"ms; draft {draft:.2f} ms a token; the engine {engine:.2f} ms a step (context {costs['context_length']}); "
        f"{_rounds_words(costs)}."
    ]
    if (settled := at_size["settled_after"]) is not None:
        lines.append(f"Measuring ended after {settled} groups: the choice was known to within 2 %.")
    return lines


def _rounds_words(costs: Mapping[str, Any]) -> str:
    """When step costs were measured, seen from the passes."""
    num, in_turn = costs["repeats"], costs["rounds_in_turn"]
    rounds = counted(num, "round")
    if in_turn == num:
        return f"{rounds} taken between the passes"
    return f"{rounds}, {in_turn} of them taken between the passes" if in_turn else f"{rounds} taken before the passes"


def _acceptance_words(body: Mapping[str, Any], at_size: Mapping[str, Any]) -> list[str]:
    """Acceptance by task and along the text, at the recommended k or, without one, at the k predicted best."""
    known = [row for row in at_size["rows"] if row["predicted"] and row["predicted"]["speedup"] is not None]
    if not known:
        return []
    k = 0 if at_size["recommended"]["tree"] else at_size["recommended"]["k"]
    k = k or max(known, key=lambda row: (row["predicted"]["speedup"], -row["k"]))["k"]
    k = min(k, len(at_size["rows"]))  # a recipe's own k, which is kept, may be larger than what was swept
    tasks = [
        f"{printable(name)} {_length_words(rows[k - 1]['acceptance_length'])}" for name, rows in body["by_task"].items()
    ]
    places = [
        f"{part['from']}–{part['to']}: {number(part['by_k'][k - 1]['acceptance_length']['median'])}"
        for part in body["by_position"]
    ]
    ways = (("by task", tasks), ("by output position", places))
    return [
        f"Predicted tokens a drafting step at k = {k} {how}: {', '.join(message)}."
        for how, message in ways
        if len(message) > 1
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

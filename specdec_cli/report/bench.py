"""The document of `bench`, `specdec.bench/1`, and its report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from specdec_cli.report.generate import Promise
from specdec_cli.report.generate import json_schema as generate_schema
from specdec_cli.report.pace import Pace
from specdec_cli.report.result import details_of, grid_of, print_result
from specdec_cli.report.schema import read_schema
from specdec_cli.report.table import NOTHING, PageTable, interval_cells, number, percent
from specdec_cli.report.trees import tree_table

if TYPE_CHECKING:
    from specdec_cli.measure.bench.bench import Bench, Progress
    from specdec_cli.measure.bench.passes import Kind, Track
    from specdec_cli.measure.bench.verdict import StepSplit

SCHEMA = "specdec.bench/1"
_SECONDS_BETWEEN_DRAWS = 0.25
_ABOVE_THE_ROOF = 1.05


def json_schema() -> dict[str, Any]:
    """The JSON Schema of the whole document; statistics and timing are `generate`'s."""
    return read_schema("bench", generate_schema())


def bench_body(
    bench: Bench,
    promise: Promise,
    tokens_must_agree: bool,
    machine: Mapping[str, Any],
    roofline: Mapping[str, Any] | None,
    versions: Mapping[str, str],
    interrupted: bool,
) -> dict[str, Any]:
    """The document's own fields, after those that every document has. `gates` is empty until the gates are judged.

    Args:
        bench: after its run.
        promise: of the verification mode.
        tokens_must_agree: whether both arms' tokens are compared.
        machine: its load before and after.
        roofline: None where the target's sizes are not known, or it could not be computed.
        versions: of the other engines.
        interrupted: whether it was ended early.
    """
    from specdec_cli.measure.bench.verdict import costs_of, sentences
    from specdec_cli.measure.machine.figures import figure

    missing: list[str] = []
    costs = figure("the cost of a step", lambda: _as_dict(costs_of(bench.draft, bench.plain)), missing)
    efficiency = figure("the efficiency", lambda: bench.efficiency, missing)
    findings = figure("the verdict in words", lambda: sentences(bench, machine["busy"]), missing) or []
    differences = bench.differences().as_dict() if tokens_must_agree else _UNCHECKED
    known = [notice for notice in (bench.workload.notice, bench.hidden_tasks) if notice is not None]
    notices = [*known, *bench.notices, *_too_fast(roofline), *missing]
    return {
        "workload": bench.workload.as_dict(),
        "plan": {
            "batch_size": bench.plan.batch_size,
            "group_sizes": {str(size): num for size, num in bench.group_sizes().items()},
            "repeats": bench.plan.repeats,
            "order": bench.plan.order,
            "passes": len(bench.passes),
            "interrupted": interrupted,
        },
        "machine": dict(machine),
        **_arms(bench),
        "against": {
            name: {
                "version": versions[name],
                "timing": track.timing().as_dict(),
                "speedup": _speedup(bench, against=track),
                "equal": bench.differences(track).as_dict(),
            }
            for name, track in bench.against.items()
        },
        "tokens_per_step": bench.tokens_per_step,
        "efficiency": efficiency,
        "costs": costs,
        "roofline": None if roofline is None else dict(roofline),
        "by_task": {
            task: {
                "num_prompts": bench.workload.tasks[task],
                "plain": _totals(bench.plain, task),
                "draft": _totals(bench.draft, task),
                "speedup": _speedup(bench, task),
            }
            for task in bench.tasks()
        },
        "lossless": {"promised": promise.is_lossless, "verify": promise.verify, **differences},
        "findings": findings,
        "notices": notices,
        "gates": [],
    }


def _as_dict(costs: StepSplit | None) -> dict[str, Any] | None:
    return None if costs is None else costs.as_dict()


def _too_fast(roofline: Mapping[str, Any] | None) -> list[str]:
    """A figure above the roofline is no feat but a fault of the measurement."""
    roofs = [] if roofline is None else [roofline["plain"], roofline["verify"]]
    if any(roof is not None and (roof["fraction"] or 0) > _ABOVE_THE_ROOF for roof in roofs):
        return ["a step was faster than the roofline: the machine was busy while its bandwidth was measured"]
    return []


_UNCHECKED: Mapping[str, Any] = {"checked_tokens": None, "mismatches": None, "first_divergence": None}
_NO_INTERVAL: Mapping[str, Any] = {"median": None, "ci95": None, "pairs": 0}


def _arms(bench: Bench) -> dict[str, Any]:
    """The arms of our own engine and the draft's speed-up."""
    return {"plain": _totals(bench.plain), "draft": _totals(bench.draft), "speedup": _speedup(bench)}


def _totals(track: Track, task: str | None = None) -> dict[str, Any]:
    return {"timing": track.timing(task).as_dict(), "speculative": track.counts(task).as_dict()}


def _speedup(bench: Bench, task: str | None = None, against: Track | None = None) -> dict[str, Any]:
    kinds: tuple[Kind, ...] = ("decode", "latency")
    found = {kind: bench.speedup(kind, task, against) for kind in kinds}
    return {kind: dict(_NO_INTERVAL) if one is None else one.as_dict() for kind, one in found.items()}


def _live_table(bench: Bench) -> RenderableType:
    others = {name: {"timing": track.timing().as_dict()} for name, track in bench.against.items()}
    return arms_table({**_arms(bench), "against": others})


class BenchView:
    """The live table on a terminal; drawn between passes alone, at most four times a second.

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
        table: Callable[[Bench], RenderableType] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._say, self._pace = say, Pace()
        live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
        self._live = live if is_live else None
        self._last = 0.0
        self._table = table or _live_table

    def __enter__(self) -> BenchView:
        """Open the live area."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        if self._live is not None:
            self._live.stop()

    def show(self, bench: Bench, progress: Progress) -> None:
        """Draw, if the last time is long enough ago."""
        time = self._pace.words(progress.done, progress.total)
        line = f"{progress.done} of {progress.total} passes, {time}; next: {progress.arm}"
        self.draw(lambda: self._table(bench), line)
        if self._live is None and self._say is not None and self._pace.is_due():
            self._say(line)

    def draw(self, table: Callable[[], RenderableType], line: str, pause: float = _SECONDS_BETWEEN_DRAWS) -> None:
        """Draw a table and a line below it, if the last time is `pause` seconds ago."""
        now = perf_counter()
        if self._live is not None and now >= self._last + pause:
            self._live.update(Group(table(), Text(line, style="dim")), refresh=True)
            self._last = now


ARM_HEADS = (
    *("arm", "tokens/s", "first ms", "accepted", "length", "speed-up", "95 %"),
    *("draft/verify/rest %", "end to end", "95 %"),
)
_NUM_ARM_CELLS = 7  # of the first table on a terminal
AGAINST_HEADS = ("other arm", "draft is faster", "95 %", "end to end", "95 %")
TASK_HEADS = ("task", "prompts", "plain tokens/s", "draft tokens/s", "accepted", "length", "speed-up", "95 %")
LEGEND = (
    "first: milliseconds to the first token. speed-up: of decoding, over the same engine without a draft; 95 %: its "
    "interval, if there are enough pairs. draft/verify/rest: shares of a step's time."
)


def bench_tables(document: Mapping[str, Any]) -> Iterator[PageTable]:
    """The tables of a document: arms, trees, other engines, tasks."""
    yield PageTable("Arms", ARM_HEADS, _arm_rows(document))
    if (trees := tree_table("arm", tree_arms(document))) is not None:
        yield trees
    if document["against"]:
        yield PageTable("The draft beside other engines", AGAINST_HEADS, _against_rows(document))
    if document["by_task"]:
        yield PageTable("Tasks", TASK_HEADS, _task_rows(document))


def print_bench(console: Console, body: Mapping[str, Any], details: bool) -> None:
    """Print the report."""
    arms, *others = bench_tables(body)

    def further() -> Iterator[RenderableType | str]:
        yield LEGEND
        yield grid_of(("arm", *ARM_HEADS[_NUM_ARM_CELLS:]), [[row[0], *row[_NUM_ARM_CELLS:]] for row in arms.rows])
        for table in others:
            if table.heads != AGAINST_HEADS:
                yield from details_of(table)
        yield from filter(None, (_roofline_words(body["roofline"]), *body["findings"][1:]))

    figures = [arms_table(body), *(grid_of(one.heads, one.rows) for one in others if one.heads == AGAINST_HEADS)]
    verdict, checks = body["findings"][:1], [compared_words(body)]
    left_out = "where the time goes, every task, and why"
    print_result(console, body, verdict, figures, checks, further if details else None, left_out)


def tree_arms(body: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any] | None]]:
    """The arms of a document that may have drafted trees, with their statistics."""
    others = ((name, found.get("speculative")) for name, found in body["against"].items())
    return [("draft", body["draft"]["speculative"]), *others]


def _arm_rows(body: Mapping[str, Any]) -> list[list[str]]:
    """The arms as cells, the plain one first."""
    is_synthetic = "recipe" in body and body["recipe"]["speculation"]["verify"] == "synthetic"
    return [
        _arm_row("plain", body["plain"], None),
        _arm_row("draft (synthetic)" if is_synthetic else "draft", body["draft"], body["speedup"]),
        *(_arm_row(name, found, None) for name, found in body["against"].items()),
    ]


def _arm_row(name: str, totals: Mapping[str, Any], speedup: Mapping[str, Any] | None) -> list[str]:
    timing, counts = totals["timing"], totals.get("speculative") or {}
    return [
        name,
        number(timing["decode_tokens_per_second"], 1),
        NOTHING if timing["ttft_s"] is None else f"{1000 * timing['ttft_s']:.1f}",
        percent(counts.get("acceptance_rate")),
        number(counts.get("acceptance_length")),
        *interval_cells(speedup and speedup["decode"]),
        _shares(counts),
        *interval_cells(speedup and speedup["latency"]),
    ]


def _shares(counts: Mapping[str, Any]) -> str:
    """`20/70/10`: drafting, verification and the rest in per cent of the steps' time."""
    seconds = [counts.get(f"{part}_seconds") or 0.0 for part in ("draft", "verify", "overhead")]
    return "/".join(f"{100 * one / sum(seconds):.0f}" for one in seconds) if sum(seconds) > 0 else NOTHING


def _against_rows(body: Mapping[str, Any]) -> list[list[str]]:
    """How much faster than each other engine the draft is, as cells."""
    return [
        [name, *interval_cells(found["speedup"]["decode"]), *interval_cells(found["speedup"]["latency"])]
        for name, found in body["against"].items()
    ]


def _task_rows(body: Mapping[str, Any]) -> list[list[str]]:
    """The tasks as cells."""
    return [
        [
            task,
            str(found["num_prompts"]),
            number(found["plain"]["timing"]["decode_tokens_per_second"], 1),
            number(found["draft"]["timing"]["decode_tokens_per_second"], 1),
            percent(found["draft"]["speculative"]["acceptance_rate"]),
            number(found["draft"]["speculative"]["acceptance_length"]),
            *interval_cells(found["speedup"]["decode"]),
        ]
        for task, found in body["by_task"].items()
    ]


def arms_table(body: Mapping[str, Any]) -> RenderableType:
    """The arms with their speed, acceptance and speed-up."""
    return grid_of(ARM_HEADS[:_NUM_ARM_CELLS], [row[:_NUM_ARM_CELLS] for row in _arm_rows(body)])


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
        return f"Lossless: all {lossless['checked_tokens']} tokens are those of the target alone."
    first = lossless["first_divergence"]
    return (
        f"Lossless: {lossless['mismatches']} outputs DIFFER from the target's own, first in prompt "
        f"{first['index'] + 1} at token {first['position'] + 1}; {advice}."
    )

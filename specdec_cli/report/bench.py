"""The document of `bench`, `specdec.bench/1`, and its report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from specdec_cli.report.generate import Promise
from specdec_cli.report.generate import json_schema as generate_schema
from specdec_cli.report.grid import Grid
from specdec_cli.report.pace import Pace
from specdec_cli.report.schema import read_schema
from specdec_cli.report.table import NOTHING, number, percent
from specdec_cli.report.trees import print_tree_table, tree_table

if TYPE_CHECKING:
    from specdec_cli.engine.outputs import Timing
    from specdec_cli.measure.bench.bench import Bench, Progress
    from specdec_cli.measure.bench.passes import Kind, Track
    from specdec_cli.measure.bench.verdict import StepSplit
    from specdec_cli.measure.stats import Interval

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
        "plain": _totals(bench.plain),
        "draft": _totals(bench.draft),
        "against": {
            name: {
                "version": versions[name],
                "timing": track.timing().as_dict(),
                "speedup": _speedup(bench, against=track),
                "equal": bench.differences(track).as_dict(),
            }
            for name, track in bench.against.items()
        },
        "speedup": _speedup(bench),
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


def _totals(track: Track, task: str | None = None) -> dict[str, Any]:
    return {"timing": track.timing(task).as_dict(), "speculative": track.counts(task).as_dict()}


def _speedup(bench: Bench, task: str | None = None, against: Track | None = None) -> dict[str, Any]:
    kinds: tuple[Kind, ...] = ("decode", "latency")
    found = {kind: bench.speedup(kind, task, against) for kind in kinds}
    return {kind: dict(_NO_INTERVAL) if one is None else one.as_dict() for kind, one in found.items()}


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
        self._table = table or arms_table

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


def print_bench(console: Console, bench: Bench, body: Mapping[str, Any]) -> None:
    """Print the report."""
    console.print(arms_table(bench))
    console.print(Text(LEGEND, style="dim"), soft_wrap=True)
    print_tree_table(console, tree_table("arm", tree_arms(body)))
    if bench.tasks():
        console.print(tasks_table(bench))
    for line in (_roofline_words(body["roofline"]), compared_words(body)):
        if line:
            console.print(Text(line), soft_wrap=True)
    print_notes_and_gates(console, body)
    for place, sentence in enumerate(body["findings"]):
        console.print(Text(sentence, style="bold" if place == 0 else ""), soft_wrap=True)


def print_notes_and_gates(console: Console, body: Mapping[str, Any]) -> None:
    """Print what a reader must know beside the figures, and what became of the gates."""
    for notice in [*([body["machine"]["busy"]] if body["machine"]["busy"] else []), *body["notices"]]:
        console.print(Text(f"note: {notice}", style="yellow"), soft_wrap=True)
    for gate in body["gates"]:
        style = "green" if gate["passed"] else "bold red"
        word = "passed" if gate["passed"] else "FAILED"
        console.print(Text(f"gate {word}: fail if {gate['expression']}: {gate['reason']}", style=style), soft_wrap=True)


def tree_arms(body: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any] | None]]:
    """The arms of a document that may have drafted trees, with their statistics."""
    others = ((name, found.get("speculative")) for name, found in body["against"].items())
    return [("with the draft", body["draft"]["speculative"]), *others]


def arm_rows(bench: Bench) -> list[list[str]]:
    """The arms as cells: name, tokens/s, first token, acceptance rate and length, time shares, the draft's speed-up."""
    return [
        _arm_row(bench.plain, None, None),
        _arm_row(bench.draft, bench.speedup("decode"), bench.speedup("latency")),
        *(_arm_row(track, None, None) for track in bench.against.values()),
    ]


def against_rows(bench: Bench) -> list[list[str]]:
    """How much faster than each other engine the draft is, as cells."""
    return [
        [
            track.name,
            interval_words(bench.speedup("decode", against=track)),
            interval_words(bench.speedup("latency", against=track)),
        ]
        for track in bench.against.values()
    ]


AGAINST_HEADS = ("other arm", "the draft is faster by", "end to end")
ARM_HEADS = ("arm", "tokens/s", "first ms", "accepted", "length", "time in %", "speed-up (95 %)", "end to end")
LEGEND = (
    "first: milliseconds to the first token. time in %: draft / verification / the rest. speed-up: over the same "
    "engine without a draft. In brackets: 95 % intervals, if there are enough pairs."
)


def _arm_row(track: Track, decode: Interval | None, latency: Interval | None) -> list[str]:
    timing: Timing = track.timing()
    counts, shares = track.counts(), track.meter.shares
    return [
        track.name,
        number(timing.decode_tokens_per_second, 1),
        NOTHING if timing.ttft_s is None else f"{1000 * timing.ttft_s:.1f}",
        percent(counts.acceptance_rate),
        number(counts.acceptance_length),
        NOTHING
        if shares is None
        else f"{100 * shares.draft:.0f}/{100 * shares.verify:.0f}/{100 * shares.overhead:.0f}",
        interval_words(decode),
        interval_words(latency),
    ]


def interval_words(interval: Interval | None) -> str:
    """`1.42× (1.31–1.55)`, or a dash."""
    if interval is None:
        return NOTHING
    ends = "" if interval.ci95 is None else f" ({interval.ci95[0]:.2f}–{interval.ci95[1]:.2f})"
    return f"{interval.median:.2f}×{ends}"


TASK_HEADS = ("task", "prompts", "tokens/s without", "with the draft", "accepted", "length", "speed-up (95 %)")


def task_rows(bench: Bench) -> list[list[str]]:
    """The tasks as cells."""
    rows = []
    for task in bench.tasks():
        counts = bench.draft.counts(task)
        rows.append(
            [
                task,
                str(bench.workload.tasks[task]),
                number(bench.plain.timing(task).decode_tokens_per_second, 1),
                number(bench.draft.timing(task).decode_tokens_per_second, 1),
                percent(counts.acceptance_rate),
                number(counts.acceptance_length),
                interval_words(bench.speedup("decode", task)),
            ]
        )
    return rows


def arms_table(bench: Bench) -> RenderableType:
    """The arms, and below them the draft's speed-up over every other engine."""
    arms = _table(ARM_HEADS, arm_rows(bench))
    return Group(arms, _table(AGAINST_HEADS, against_rows(bench))) if bench.against else arms


def tasks_table(bench: Bench) -> RenderableType:
    """The tasks."""
    return _table(TASK_HEADS, task_rows(bench))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Grid(*heads)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


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

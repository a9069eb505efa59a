"""The document of `sweep-k`, `specdec.sweep-k/1`, and what a person sees of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from specdec_cli.recipe.present import to_yaml
from specdec_cli.recipe.schema import Draft
from specdec_cli.report.bench import interval_words, lossless_words
from specdec_cli.report.generate import Promise
from specdec_cli.report.generate import json_schema as generate_schema
from specdec_cli.report.page import grid
from specdec_cli.report.schema import read_schema
from specdec_cli.report.table import NOTHING, number

if TYPE_CHECKING:
    from specdec_cli.measure.bench import Progress
    from specdec_cli.measure.predict import Predicted
    from specdec_cli.measure.sweep import Measured, Sweep
    from specdec_cli.recipe import Resolved

SCHEMA = "specdec.sweep-k/1"
HEADS = ("k", "tokens a step", "predicted (95 %)", "measured (95 %)", "textbook", "draft/verify/rest %", "")
_SECONDS_BETWEEN_DRAWS = 0.25


def json_schema() -> dict[str, Any]:
    """The JSON Schema of the whole document; counts and the lossless check are `generate`'s."""
    return read_schema("sweep-k", generate_schema())


def sweep_body(
    sweep: Sweep,
    promise: Promise,
    tokens_must_agree: bool,
    machine: Mapping[str, Any],
    trace: Mapping[str, Any] | None,
    notices: list[str],
    interrupted: bool,
) -> dict[str, Any]:
    """What stands in the document after the fields that every document has; `gates` is empty until they are judged.

    Args:
        sweep: after its run.
        promise: of the verification mode.
        tokens_must_agree: whether tokens with and without a draft are compared.
        machine: its load before and after.
        trace: what it rests on, or None without one.
        notices: sentences that a reader should know.
        interrupted: whether it was ended early.
    """
    from specdec_cli.measure.predict import PUBLISHED_K

    prediction, measured, recommended = sweep.prediction, sweep.measured(), sweep.recommended()
    bench = sweep.bench
    tracks = [] if bench is None else [bench.draft, bench.plain, *bench.against.values()]
    unchecked = {"checked_tokens": None, "mismatches": None, "first_divergence": None}
    return {
        "workload": sweep.workload.as_dict(),
        "plan": {
            "k_max": sweep.k_max,
            "exhaustive": sweep.is_exhaustive,
            "measured_k": sorted(measured),
            "batch_size": sweep.batch_size,
            "repeats": sweep.repeats,
            "order": "A B B A",
            "passes": sum(len(track.passes) for track in tracks),
            "interrupted": interrupted,
            "settled_after": sweep.settled_after,
        },
        "machine": dict(machine),
        "trace": None if trace is None else dict(trace),
        "costs": sweep.costs.as_dict(),
        "rows": [
            _row(k, None if prediction is None else prediction.rows[k - 1], measured.get(k))
            for k in range(1, sweep.k_max + 1)
        ],
        "recommended": {
            "k": recommended.k,
            "speedup": None if recommended.speedup is None else recommended.speedup.as_dict(),
            "why": recommended.why,
        },
        "guidance": list(PUBLISHED_K),
        "iid": {"alpha": None, "speedup_by_k": {}} if prediction is None else prediction.iid_as_dict(),
        "break_even_alpha": None if prediction is None else prediction.break_even_alpha,
        "draft_seconds_for_2x": None if prediction is None else prediction.draft_seconds_for_2x,
        "ceiling": None if prediction is None else _known(prediction.ceiling),
        "cost_ratio": None if prediction is None else _known(prediction.cost_ratio),
        "lossless": {
            "promised": promise.is_lossless,
            "verify": promise.verify,
            **(sweep.differences().as_dict() if tokens_must_agree else unchecked),
        },
        "notices": notices,
        "gates": [],
    }


def _row(k: int, predicted: Predicted | None, measured: Measured | None) -> dict[str, Any]:
    """One k; its acceptance length is the trace's, and without one that of the measured steps."""
    length = None if predicted is None else _known(predicted.acceptance_length.median)
    if predicted is None and measured is not None:
        length = measured.track.counts().acceptance_length
    said = None
    if predicted is not None:
        speedup = predicted.speedup.as_dict()
        said = {"speedup": speedup.pop("median"), **speedup, "shares": predicted.shares()}
        said["per_position_acceptance_rates"] = list(predicted.per_position_rates)
    return {
        "k": k,
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
    """

    def __init__(self, console: Console, is_live: bool) -> None:
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
        if self._live is None or perf_counter() < self._last + _SECONDS_BETWEEN_DRAWS:
            return
        line = f"{progress.done} of {progress.total} passes; next: {progress.arm}"
        self._live.update(Group(sweep_table(sweep, None), Text(line, style="dim")), refresh=True)
        self._last = perf_counter()


def sweep_table(sweep: Sweep, recommended: int | None) -> RenderableType:
    """Every k, predicted beside measured; the recommended one is marked."""
    table = grid(*HEADS)
    measured = sweep.measured()
    for k in range(1, sweep.k_max + 1):
        row = None if sweep.prediction is None else sweep.prediction.rows[k - 1]
        one = measured.get(k)
        counted = None if one is None else one.track.counts().acceptance_length
        shares = {} if row is None else row.shares()
        cells = [
            str(k),
            number(counted if row is None else _known(row.acceptance_length.median)),
            interval_words(row.speedup if row is not None and math.isfinite(row.speedup.median) else None),
            interval_words(None if one is None else one.speedup),
            NOTHING if row is None or row.iid_speedup is None else f"{row.iid_speedup:.2f}×",
            "/".join(f"{100 * share:.0f}" for share in shares.values()) or NOTHING,
            "recommended" if k == recommended else "",
        ]
        table.add_row(*(Text(cell) for cell in cells), style="bold" if k == recommended else "")
    return table


def print_sweep(console: Console, sweep: Sweep, body: Mapping[str, Any]) -> None:
    """Print the report."""
    recommended = body["recommended"]
    console.print(sweep_table(sweep, recommended["k"]))
    for line in _explanations(sweep, body):
        console.print(Text(line, style="dim"), soft_wrap=True)
    if body["plan"]["passes"]:
        console.print(Text(lossless_words(body["lossless"])), soft_wrap=True)
    for notice in [*([body["machine"]["busy"]] if body["machine"]["busy"] else []), *body["notices"]]:
        console.print(Text(f"note: {notice}", style="yellow"), soft_wrap=True)
    for gate in body["gates"]:
        style, word = ("green", "passed") if gate["passed"] else ("bold red", "FAILED")
        console.print(Text(f"gate {word}: fail if {gate['expression']}: {gate['reason']}", style=style), soft_wrap=True)
    low, high = body["guidance"]
    found = f"here: {recommended['k'] or 'do not speculate'}"
    console.print(Text(f"Published guidance: {low} to {high} tokens; {found}."), soft_wrap=True)
    console.print(Text(f"Recommended: {recommended['why']}.", style="bold"), soft_wrap=True)


def _explanations(sweep: Sweep, body: Mapping[str, Any]) -> list[str]:
    costs = body["costs"]
    rows = " ".join(f"{1000 * seconds:.2f}" for seconds in costs["target_seconds_by_rows"])
    lines = [
        f"Speed-up of decoding, the median prompt's. Target forward of 1 to {sweep.k_max + 1} rows: {rows} ms; draft "
        f"{1000 * costs['draft_seconds_per_token']:.2f} ms a token; the engine {1000 * costs['overhead_seconds']:.2f} "
        f"ms a step (context {costs['context_length']})."
    ]
    if (settled := body["plan"]["settled_after"]) is not None:
        lines.append(f"Measuring ended after {settled} groups: the choice was known to within 2 %.")
    if body["iid"]["alpha"] is not None:
        even, twice = body["break_even_alpha"], body["draft_seconds_for_2x"]
        pays = "no acceptance breaks even at these costs" if even is None else f"it breaks even at {even:.2f}"
        draft = (
            "not even a free draft gives 2×" if twice is None else f"2× needs a draft of {1000 * twice:.2f} ms a token"
        )
        ceiling = "" if body["ceiling"] is None else f"; the ceiling with a free draft is {body['ceiling']:.2f}×"
        lines.append(f"Textbook: one α for every token, here {body['iid']['alpha']:.2f}; {pays}; {draft}{ceiling}.")
    return lines


def tuned_recipe(resolved: Resolved, k: int, why: str) -> str:
    """The resolved recipe as YAML with this k; 0 takes the draft out.

    Args:
        resolved: what the sweep ran with.
        k: the recommended one.
        why: stands above it as a comment.
    """
    recipe = resolved.recipe
    update: dict[str, Any] = {"speculation": recipe.speculation.model_copy(update={"num_speculative_tokens": k})}
    if k == 0:
        update["draft"] = Draft(method="none")
    text = to_yaml(replace(resolved, recipe=recipe.model_copy(update=update)))
    return f"# By `specdec sweep-k`: {''.join(letter for letter in why if letter.isprintable())}.\n{text}"

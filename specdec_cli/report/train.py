"""A training run on the terminal: the live table, a line for each evaluation, and the result document."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from specdec_cli.report.pace import Pace
from specdec_cli.report.train_pages import loss_curve
from specdec_cli.train.events import Evaluated, Trained, TrainingEvent

if TYPE_CHECKING:
    from specdec_cli.report.view import Screen

_SECONDS_BETWEEN_DRAWS = 0.25
_RECENT = 50  # steps that the shown loss and rates are averaged over


class TrainView:
    """Shows a run as its events come; a context manager, so that the terminal is left tidy.

    Args:
        screen: the streams.
        num_steps: of the whole run.
        step: steps taken before.
    """

    def __init__(self, screen: Screen, num_steps: int, step: int) -> None:
        self._screen, self._num_steps, self._step = screen, num_steps, step
        self._recent: deque[Trained] = deque(maxlen=_RECENT)
        self._evaluations: list[Evaluated] = []
        self._pace, self._drawn_at = Pace(), 0.0
        live = Live(
            console=screen.console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._live = live if screen.is_live else None

    def __enter__(self) -> TrainView:
        """Open the live area."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        if self._live is not None:
            self._live.stop()

    def watch(self, event: TrainingEvent) -> None:
        """Show one event."""
        if isinstance(event, Trained):
            self._recent.append(event)
            self._step = event.step
        elif isinstance(event, Evaluated):
            self._evaluations.append(event)
            self._screen.say(evaluation_words(event))
        if self._live is not None:
            self._draw()
        elif self._pace.is_due():
            self._screen.say(self._progress())

    def _draw(self) -> None:
        now = perf_counter()
        if self._live is not None and now >= self._drawn_at + _SECONDS_BETWEEN_DRAWS:
            self._live.update(Group(self._table(), Text(self._progress(), style="dim")), refresh=True)
            self._drawn_at = now

    def _progress(self) -> str:
        parts = [f"step {self._step} of {self._num_steps}"]
        if self._recent:
            num, seconds = len(self._recent), sum(one.seconds for one in self._recent)
            parts.append(f"loss {sum(one.loss for one in self._recent) / num:.3f}")
            parts.append(f"{sum(one.num_tokens for one in self._recent) / seconds:.0f} tokens/s")
            parts.append(f"{duration((self._num_steps - self._step) * seconds / num)} left")
        return ", ".join(parts)

    def _table(self) -> RenderableType:
        """Acceptance by depth: of the last steps' batches, and of the last evaluations."""
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("")
        table.add_column("length", justify="right")
        shown = self._evaluations[-4:]
        depths = max([len(one.matches) for one in self._recent] + [one.acceptance.k for one in shown], default=0)
        for depth in range(1, depths + 1):
            table.add_column(f"depth {depth}", justify="right")
        for one in shown:
            found = one.acceptance
            table.add_row(f"step {one.step}, held out", f"{found.length:.2f}", *_percentages(found.by_depth))
        if self._recent:
            sums = [sum(its) / len(self._recent) for its in zip(*(one.matches for one in self._recent), strict=True)]
            table.add_row(f"step {self._step}, training", "", *_percentages(sums))
        return table


def evaluation_words(event: Evaluated) -> str:
    """`step 40: acceptance length 2.31 at k = 5 (62 % 41 % ...), the best so far`."""
    found = event.acceptance
    rates = " ".join(_percentages(found.by_depth))
    best = ", the best so far" if event.is_best else ""
    return f"step {event.step}: acceptance length {found.length:.2f} at k = {found.k} ({rates}){best}"


def train_body(
    rows: Sequence[dict[str, Any]], settled: dict[str, Any], notices: Sequence[str], interrupted: bool
) -> dict[str, Any]:
    """The document's own keys.

    Args:
        rows: of the log.
        settled: sizes that the method chose.
        notices: sentences about the data.
        interrupted: whether the run was ended early.
    """
    steps = [row for row in rows if row["event"] == "step"]
    evaluations = [row for row in rows if row["event"] == "evaluation"]
    best = max(evaluations, key=lambda row: float(row["acceptance_length"]), default=None)
    return {
        "interrupted": interrupted,
        "notices": list(notices),
        "num_steps": steps[-1]["step"] if steps else 0,
        "seconds": round(sum(row["seconds"] for row in steps), 3),
        "num_tokens": sum(row["num_tokens"] for row in steps),
        "last_loss": steps[-1]["loss"] if steps else None,
        "settled": settled,
        "best": best,
        "evaluations": evaluations,
        "curve": loss_curve(rows),
    }


def _percentages(rates: Sequence[float]) -> list[str]:
    return [f"{100 * rate:.0f} %" for rate in rates]


def duration(seconds: float) -> str:
    """`1 h 5 min`, `2 min 3 s`, `4 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"

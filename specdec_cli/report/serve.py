"""Output of `serve` while it runs: a live table, or an occasional line without a terminal.

A thread of its own pulls plain numbers and draws; the engine's thread knows nothing of it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Literal

from rich.live import Live
from rich.table import Table

from specdec_cli.engine.jobs.snapshot import Snapshot
from specdec_cli.report.grid import Grid
from specdec_cli.report.table import NOTHING, number, percent

if TYPE_CHECKING:
    from rich.console import Console

DRAW_SECONDS = 0.25
LINE_SECONDS = 10.0
_WINDOW_SECONDS = 5.0
_MOST_OF_THE_TIME = 20  # a draw that took t is followed by at least 20 t without one: 5 % of the engine's time at most


_COLUMNS: tuple[tuple[str, Literal["left", "right"]], ...] = (
    ("dim", "left"),
    ("", "right"),
    ("dim", "left"),
    ("", "right"),
    ("", "right"),
)
"""Style and side of each column of the table."""


class Board:
    """Snapshots of the last seconds, and the figures from them.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._recent: deque[tuple[float, Snapshot]] = deque([(clock(), Snapshot())])

    def take(self, snapshot: Snapshot) -> None:
        """Add a snapshot and forget those that are older than the window, but for the newest of them."""
        now = self._clock()
        self._recent.append((now, snapshot))
        while len(self._recent) > 2 and now - self._recent[1][0] >= _WINDOW_SECONDS:
            self._recent.popleft()

    @property
    def latest(self) -> Snapshot:
        """The newest snapshot."""
        return self._recent[-1][1]

    @property
    def recent(self) -> Snapshot:
        """The newest snapshot, with the counts of the last seconds alone."""
        return self.latest.since(self._recent[0][1])

    @property
    def tokens_per_second(self) -> float | None:
        """Generated tokens per second in the last seconds, all requests together; None before any time has passed."""
        seconds = self._recent[-1][0] - self._recent[0][0]
        return self.recent.num_generation_tokens / seconds if seconds > 0 else None

    @property
    def is_still(self) -> bool:
        """Whether nothing runs, waits or has changed in the last seconds."""
        return self._recent[0][1] == self.latest and not self.latest.num_running and not self.latest.num_waiting

    def table(self) -> Table:
        """The live table: the last seconds beside the totals since the start."""
        now, recent = self.latest, self.recent
        table = Grid("requests", "", "speculation", f"last {_WINDOW_SECONDS:.0f} s", "since start", may_split=False)
        for column, (style, justify) in zip(table.columns, _COLUMNS, strict=True):
            column.style, column.justify = style, justify
        left = (
            ("running", f"{now.num_running:,}"),
            ("waiting", f"{now.num_waiting:,}"),
            ("finished", f"{now.num_finished:,}"),
            ("aborted / failed", f"{now.num_aborted:,} / {now.num_failed:,}"),
            ("refused", f"{now.num_refused:,}"),
            ("KV cache in use", percent(now.kv_cache_usage)),
        )
        right = (
            ("tokens/s", number(self.tokens_per_second, 1), NOTHING),
            ("acceptance rate", percent(recent.acceptance_rate), percent(now.acceptance_rate)),
            ("acceptance length", number(recent.acceptance_length), number(now.acceptance_length)),
            ("drafted per step", number(recent.drafted_per_step), number(now.drafted_per_step)),
            ("tokens out", f"{recent.num_generation_tokens:,}", f"{now.num_generation_tokens:,}"),
            ("tokens in", "", f"{now.num_prompt_tokens:,}"),
        )
        for requests, speculation in zip(left, right, strict=True):
            table.add_row(*requests, *speculation)
        if now.nodes_per_step is not None:
            table.add_row("", "", "nodes per step", number(recent.nodes_per_step), number(now.nodes_per_step))
        if now.num_draft_failures:
            table.add_row("", "", "the draft failed", "", f"{now.num_draft_failures:,}")
        return table

    def line(self) -> str:
        """Figures in a line, for a log."""
        now, recent = self.latest, self.recent
        refused = f", {now.num_refused} refused" if now.num_refused else ""
        failed = f", the draft failed {now.num_draft_failures} times" if now.num_draft_failures else ""
        return (
            f"{now.num_running} running, {now.num_waiting} waiting, {now.num_finished} finished{refused}; "
            f"{number(self.tokens_per_second, 1)} tokens/s, "
            f"acceptance rate {percent(recent.acceptance_rate)}, length {number(recent.acceptance_length)}, "
            f"KV cache {percent(now.kv_cache_usage)}{failed}"
        )


class ServeView:
    """Shows a server while it runs; a context manager, so that the terminal is left tidy.

    Args:
        pull: gives the server's numbers; called from the view's thread.
        console: of standard error, a terminal that takes cursor movement; None for lines.
        log: takes a line now and then where there is no console; None shows nothing (`--quiet`).
        seconds: between two draws or lines; by default 4 draws a second, or a line every 10 seconds.
    """

    def __init__(
        self,
        pull: Callable[[], Snapshot],
        console: Console | None = None,
        log: Callable[[str], None] | None = None,
        seconds: float | None = None,
    ) -> None:
        self._pull = pull
        self._log = log
        self._board = Board()
        self._live = Live(console=console, auto_refresh=False) if console is not None else None
        self._seconds = seconds or (LINE_SECONDS if console is None else DRAW_SECONDS)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="specdec-terminal", daemon=True)

    def __enter__(self) -> ServeView:
        """Begin to draw."""
        if self._live is not None:
            self._live.start()
        if self._live is not None or self._log is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Draw the last numbers and leave them there."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()
            self._show()
        if self._live is not None:
            self._live.stop()

    def _run(self) -> None:
        wait = self._seconds
        while not self._closing.wait(wait):
            begin = monotonic()
            self._show()
            wait = max(self._seconds, _MOST_OF_THE_TIME * (monotonic() - begin))

    def _show(self) -> None:
        was_still = self._board.is_still
        self._board.take(self._pull())
        if self._live is not None:
            if not (was_still and self._board.is_still and self._live.renderable):
                self._live.update(self._board.table(), refresh=True)
        elif self._log is not None and not self._board.is_still:
            self._log(self._board.line())

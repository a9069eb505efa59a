"""Output of `serve` while it runs: a live table, or an occasional line without a terminal.

A thread of its own pulls plain numbers and draws; the engine's thread knows nothing of it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Literal

from rich.live import Live
from rich.table import Table

from specdec_cli.report.grid import Grid
from specdec_cli.report.table import NOTHING, number, percent

if TYPE_CHECKING:
    from rich.console import Console

DRAW_SECONDS = 0.25
LINE_SECONDS = 10.0
_WINDOW_SECONDS = 5.0
_MOST_OF_THE_TIME = 20  # a draw that took t is followed by at least 20 t without one: 5 % of the engine's time at most


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The server's numbers at one moment; all but the first three only grow.

    Args:
        num_running: requests in the running batch.
        num_waiting: requests that wait.
        kv_cache_usage: share of the KV blocks in use, 0 to 1.
        num_finished: requests that ended by themselves.
        num_aborted: requests whose client went away.
        num_failed: requests that an error ended.
        num_refused: requests that were not let in.
        num_prompt_tokens: of requests that began decoding.
        num_generation_tokens: that reached an output.
        num_drafts: verifications that had a drafted token.
        num_draft_tokens: drafted and verified.
        num_draft_nodes: drafted and verified, siblings in trees counted.
        num_accepted_tokens: of those, kept.
        num_draft_failures: steps in which the draft raised.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_finished: int = 0
    num_aborted: int = 0
    num_failed: int = 0
    num_refused: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_draft_nodes: int = 0
    num_accepted_tokens: int = 0
    num_draft_failures: int = 0


@dataclass(frozen=True, slots=True)
class SnapshotDelta:
    """How it went between two snapshots.

    Args:
        seconds: between them.
        num_tokens: generated.
        num_drafts: verifications that had a drafted token.
        num_draft_tokens: drafted and verified.
        num_draft_nodes: drafted and verified, siblings in trees counted.
        num_accepted_tokens: of those, kept.
    """

    seconds: float
    num_tokens: int
    num_drafts: int
    num_draft_tokens: int
    num_draft_nodes: int
    num_accepted_tokens: int

    @classmethod
    def between(cls, before: Snapshot, after: Snapshot, seconds: float) -> SnapshotDelta:
        """The pace from one snapshot to a later one."""
        return cls(
            seconds,
            after.num_generation_tokens - before.num_generation_tokens,
            after.num_drafts - before.num_drafts,
            after.num_draft_tokens - before.num_draft_tokens,
            after.num_draft_nodes - before.num_draft_nodes,
            after.num_accepted_tokens - before.num_accepted_tokens,
        )

    @property
    def tokens_per_second(self) -> float | None:
        """Generated tokens per second of the clock, all requests together; None for no time at all."""
        return self.num_tokens / self.seconds if self.seconds > 0 else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None when nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted tokens per drafting step; None when nothing was drafted."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def depth(self) -> float | None:
        """Drafted tokens per drafting step: k as it was lived; None when nothing was drafted."""
        return self.num_draft_tokens / self.num_drafts if self.num_drafts else None

    @property
    def nodes(self) -> float | None:
        """Nodes per drafting step; None when no trees were drafted."""
        return self.num_draft_nodes / self.num_drafts if self.num_draft_nodes > self.num_draft_tokens else None


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
        self._begin = clock()
        self._recent: deque[tuple[float, Snapshot]] = deque([(self._begin, Snapshot())])

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
    def recent(self) -> SnapshotDelta:
        """The pace of the last seconds."""
        (before, first), (after, last) = self._recent[0], self._recent[-1]
        return SnapshotDelta.between(first, last, after - before)

    @property
    def overall(self) -> SnapshotDelta:
        """The pace since the start."""
        return SnapshotDelta.between(Snapshot(), self.latest, self._recent[-1][0] - self._begin)

    @property
    def is_still(self) -> bool:
        """Whether nothing runs, waits or has changed in the last seconds."""
        return self._recent[0][1] == self.latest and not self.latest.num_running and not self.latest.num_waiting

    def table(self) -> Table:
        """The live table: the last seconds beside the totals since the start."""
        now, recent, overall = self.latest, self.recent, self.overall
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
            ("tokens/s", number(recent.tokens_per_second, 1), NOTHING),
            ("acceptance rate", percent(recent.acceptance_rate), percent(overall.acceptance_rate)),
            ("acceptance length", number(recent.acceptance_length), number(overall.acceptance_length)),
            ("drafted per step", number(recent.depth), number(overall.depth)),
            ("tokens out", f"{recent.num_tokens:,}", f"{now.num_generation_tokens:,}"),
            ("tokens in", "", f"{now.num_prompt_tokens:,}"),
        )
        for requests, speculation in zip(left, right, strict=True):
            table.add_row(*requests, *speculation)
        if overall.nodes is not None:
            table.add_row("", "", "nodes per step", number(recent.nodes), number(overall.nodes))
        if now.num_draft_failures:
            table.add_row("", "", "the draft failed", "", f"{now.num_draft_failures:,}")
        return table

    def line(self) -> str:
        """The same in a line, for a log."""
        now, recent = self.latest, self.recent
        refused = f", {now.num_refused} refused" if now.num_refused else ""
        failed = f", the draft failed {now.num_draft_failures} times" if now.num_draft_failures else ""
        return (
            f"{now.num_running} running, {now.num_waiting} waiting, {now.num_finished} finished{refused}; "
            f"{number(recent.tokens_per_second, 1)} tokens/s, "
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

"""Output of `generate`: text on standard output, everything else on standard error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from rich.console import Console, Group, RenderableType
from rich.text import Text

from specdec_cli.events import Emitted, Event, Failed, Finished, Noticed, Stepped
from specdec_cli.quantities import counted
from specdec_cli.report.live import LiveArea
from specdec_cli.report.pace import Pace
from specdec_cli.report.pieces import LEGEND, LEGEND_OF_TREES, STYLES, Piece, TokenPieces, marked, plain_pieces
from specdec_cli.report.table import Column, number, run_table
from specdec_cli.report.texts import Sink, Texts, Writer
from specdec_cli.report.trees import drawn_tree

if TYPE_CHECKING:
    from specdec_cli.engine.comparison import Comparison
    from specdec_cli.engine.decoding import Decoding
    from specdec_cli.engine.promise import Promise


_SECONDS_WITHOUT_PROGRESS = 5.0  # a single output that takes no longer has a table alone


@dataclass(frozen=True, slots=True)
class Screen:
    """Capabilities of the two standard streams.

    Args:
        stdout: takes the text.
        stdout_colour: whether it may be coloured.
        console: standard error.
        is_live: whether a live area may be drawn on standard error.
        is_shared: whether standard output is the same terminal or the same file.
        is_quiet: whether standard error is for errors alone.
    """

    stdout: TextIO
    stdout_colour: bool
    console: Console
    is_live: bool
    is_shared: bool
    is_quiet: bool

    def say(self, message: str, style: str = "dim") -> None:
        """One line on standard error, unless quiet."""
        if not self.is_quiet:
            self.console.print(Text(message, style=style), soft_wrap=True)

    def say_whole(self, message: str) -> None:
        """One line to be copied, unless quiet: only the terminal wraps it, so a copy has no line break."""
        if not self.is_quiet:
            self.console.print(Text(message, style="dim"), no_wrap=True, overflow="ignore", crop=False)


class RunView:
    """Shows a run as its events come; a context manager, so that the terminal is left tidy.

    Args:
        screen: the streams.
        arms: the run's arms, the one whose text is shown first.
        ks: k of each arm.
        places: the rows' places, in order.
        streams_text: whether text goes to standard output (not with `--json`).
        token_pieces: cuts one output's text into tokens for `--show-drafts`; None shows text as it is released.
        tree_text: text of a token, where trees are drafted: one of them is drawn with `--show-drafts`.
        goes_on: whether to finish the work after the reader of the text has gone.
        most_tokens: limit of one output, from which the remaining time is estimated.
    """

    def __init__(
        self,
        screen: Screen,
        arms: Sequence[Decoding],
        ks: Sequence[int],
        places: Sequence[int],
        streams_text: bool,
        token_pieces: Callable[[], TokenPieces] | None = None,
        tree_text: Callable[[int], str] | None = None,
        goes_on: bool = False,
        most_tokens: int = 0,
    ) -> None:
        self.screen = screen
        self._pace, self._most_tokens = Pace(), most_tokens
        self._arms, self._ks, self._places = list(arms), list(ks), list(places)
        self._new_pieces, self._tree_text = token_pieces, tree_text
        self._first_tree: Emitted | None = None
        self._writer = Writer(screen.stdout, screen.stdout_colour, goes_on) if streams_text else None
        self._area: LiveArea | None = None
        self._texts: Texts | None = None
        self._token_pieces: dict[int, TokenPieces] = {}
        self._notices: dict[str, None] = {}
        self._cut: list[int] = []
        self._stack = ExitStack()

    def __enter__(self) -> RunView:
        """Open the live area, if there is one, and the first text."""
        if self._new_pieces is not None:
            self._show_legend()
        if self.screen.is_live:
            area = LiveArea(self.screen.console, self._content, self._writer, self.screen.is_shared)
            self._area = self._stack.enter_context(area)
        sink: Sink | None = self._area or self._writer
        if self._writer is not None and sink is not None:
            self._texts = Texts(self._places, sink)
        return self

    def __exit__(self, *exc: object) -> None:
        """Close the live area and say what was noticed meanwhile."""
        self._stack.close()
        if self._writer is not None:
            self._writer.end()
        if self._area is not None:
            for message in self._notices:
                self.screen.say(f"note: {message}", "yellow")
        if self._cut:
            which = (
                "the output is" if self._total == 1 else f"output {', '.join(str(i + 1) for i in sorted(self._cut))}:"
            )
            self.screen.say(
                f"note: {which} incomplete, because -n {self._most_tokens} cut it before it matched its JSON schema, "
                "pattern or choice; raise -n",
                "yellow",
            )

    def watch(self, arm: Decoding, event: Event) -> None:
        """Show one event."""
        if isinstance(event, Noticed):
            self._notice(event.message)
        elif arm is self._arms[0]:
            if self._texts is not None:
                self._show_text(self._texts, arm, event)
            if isinstance(event, Finished) and event.is_incomplete:
                self._cut.append(arm.passes[-1].by_id[event.sequence_id].index)
        if self._area is not None:
            self._area.refresh()
            return
        if self._writer is not None:
            self._writer.flush()
        breaks_text = self._writer is not None and self.screen.is_shared
        if not breaks_text and self._pace.is_due():
            self.screen.say(self._progress())

    def skip(self, place: int) -> None:
        """Wait no longer for a text that will not come."""
        if self._texts is not None:
            self._texts.end(place)

    def summary(self, promise: Promise, comparison: Comparison | None = None) -> None:
        """The final table on standard error, with the speed-up of a comparison."""
        if self.screen.is_quiet:
            return
        console = self.screen.console
        if self._first_tree is not None and self._tree_text is not None:
            console.print(drawn_tree(self._first_tree, self._tree_text, is_coloured=console.color_system is not None))
        console.print(run_table(self._columns(final=True)))
        if comparison is not None:
            console.print(_verdict(comparison), soft_wrap=True)
        if not promise.is_lossless:
            self.screen.say(
                f"lossless: false (--verify {promise.verify} does not follow the target's distribution)", "yellow"
            )

    def _show_text(self, texts: Texts, arm: Decoding, event: Event) -> None:
        by_id = arm.passes[-1].by_id
        if isinstance(event, Stepped):
            for emitted in event.emitted:
                if self._new_pieces is None:
                    pieces = plain_pieces(emitted.text)
                else:
                    if emitted.sequence_id not in self._token_pieces:
                        self._token_pieces[emitted.sequence_id] = self._new_pieces()
                    pieces = self._token_pieces[emitted.sequence_id].feed(emitted)
                    if self._first_tree is None and emitted.tree is not None:
                        self._first_tree = emitted
                texts.feed(by_id[emitted.sequence_id].index, pieces)
        elif isinstance(event, Finished):
            tail = self._token_pieces.pop(event.sequence_id, None)
            pieces = plain_pieces(event.text) if tail is None else tail.cut(event.text)
            place = by_id[event.sequence_id].index
            texts.feed(place, pieces)
            texts.end(place)
        elif isinstance(event, Failed):
            self._token_pieces.pop(event.sequence_id, None)
            texts.end(by_id[event.sequence_id].index)

    def _notice(self, message: str) -> None:
        """Say it once: now, or after the live area has gone."""
        if message not in self._notices and self._area is None:
            self.screen.say(f"note: {message}", "yellow")
        self._notices[message] = None

    def _columns(self, final: bool = False) -> list[Column]:
        return [
            Column(arm.name, k, arm.meter, arm.timing().decode_tokens_per_second if final else None)
            for arm, k in zip(self._arms, self._ks, strict=True)
        ]

    def _content(self) -> RenderableType:
        table = run_table(self._columns())
        is_long = self._pace.elapsed_seconds >= _SECONDS_WITHOUT_PROGRESS
        return Group(table, Text(self._progress(), style="dim")) if self._total > 1 or is_long else table

    @property
    def _total(self) -> int:
        return len(self._places) * len(self._arms)

    def _progress(self) -> str:
        """`3 of 8 finished, up to 4 together, 40 s elapsed, about 70 s left`; of a single output its tokens."""
        num_finished = sum(arm.meter.num_finished for arm in self._arms)
        time = self._pace.words(num_finished + sum(map(self._share_of_unfinished, self._arms)), self._total)
        if self._total == 1:
            return f"{counted(self._arms[0].meter.num_tokens, 'token')}, {time}"
        running = max(arm.meter.num_running for arm in self._arms)
        return f"{num_finished} of {self._total} finished, up to {running} together, {time}"

    def _share_of_unfinished(self, arm: Decoding) -> float:
        """How much of an arm's running outputs there is, each whole output as one."""
        if not arm.passes or not self._most_tokens:
            return 0.0
        outputs = arm.passes[-1].finished()
        lengths = [len(output.token_ids) for output in outputs if output.finish_reason is None and output.error is None]
        return sum(min(1.0, length / self._most_tokens) for length in lengths)

    def _show_legend(self) -> None:
        if self.screen.is_quiet:
            return
        legend = Text()
        for kind, meaning in LEGEND if self._tree_text is None else LEGEND_OF_TREES:
            if self.screen.stdout_colour:
                legend.append(meaning, STYLES[kind])
            else:
                legend.append(marked(Piece(meaning, kind)))
            legend.append("  ")
        self.screen.console.print(legend)


def _verdict(comparison: Comparison) -> Text:
    """The sentence under a comparison's table."""
    ratios = comparison.ratios()
    if not ratios:
        return Text("speed-up not measured: no prompt decoded a second token in both arms")
    text = Text("decode speed-up ")
    text.append(f"{number(comparison.speedup())}×", "bold")
    pairs = "1 pair" if len(ratios) == 1 else f"median of {len(ratios)} pairs, {min(ratios):.2f} to {max(ratios):.2f}"
    text.append(f" ({pairs}, interleaved); ")
    differences = comparison.differences()
    if not comparison.tokens_must_agree:
        text.append("tokens are not compared: this mode agrees in distribution, not token by token")
    elif comparison.equal is None:
        text.append("tokens were not compared")
    elif comparison.equal:
        text.append(f"tokens equal ({comparison.num_checked_tokens} checked)", "green")
    else:
        row, position = differences[0]
        text.append(
            f"tokens DIFFER in {counted(len(differences), 'output')}, first in prompt {row + 1} at token "
            f"{position + 1}: `specdec audit` says whether it is a near-tie",
            "bold red",
        )
    return text

"""Output of `chat`: the streaming answer, its line of acceptance statistics, the conversation as a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from specdec_cli.quantities import counted
from specdec_cli.report.live import LiveArea
from specdec_cli.report.pieces import Piece, plain_pieces
from specdec_cli.report.table import number, percent
from specdec_cli.report.texts import Writer

if TYPE_CHECKING:
    from specdec_cli.measure.chat.chat import ChatHistory, ChatTurn
    from specdec_cli.report.view import Screen


class ReplyView:
    """Shows one answer as it streams; a context manager, so that the terminal is left tidy.

    Args:
        screen: the streams.
        writer: takes the text; None shows none.
        is_live: whether the line under the text is redrawn as the answer grows.
        settings: draft and k, as the line shows them.
    """

    def __init__(self, screen: Screen, writer: Writer | None, is_live: bool, settings: str) -> None:
        self._screen, self._writer, self._settings = screen, writer, settings
        self._turn: ChatTurn | None = None
        self._ends_line = True
        self._area: LiveArea | None = None
        if is_live and writer is not None:
            is_shared = screen.is_shared or writer.stream is screen.console.file
            self._area = LiveArea(screen.console, self._line, writer, is_shared)

    def __enter__(self) -> ReplyView:
        """Draw the line."""
        if self._area is not None:
            self._area.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        """Remove the line and end the text's last line."""
        if self._area is not None:
            self._area.__exit__(*exc)
        if self._writer is not None and not self._ends_line:
            self._writer.put(Piece("\n"))
            self._writer.flush()
        if self._writer is not None:
            self._writer.end()

    def show(self, turn: ChatTurn, text: str) -> None:
        """Show an answer's new text and its statistics so far."""
        self._turn = turn
        for piece in plain_pieces(text):
            self._put(piece)
        if self._area is not None:
            self._area.refresh()
        elif self._writer is not None:
            self._writer.flush()

    def _put(self, piece: Piece) -> None:
        if self._writer is None:
            return
        self._ends_line = piece.text.endswith("\n")
        if self._area is not None:
            self._area.put(piece)
        else:
            self._writer.put(piece)

    def _line(self) -> Text:
        if self._turn is None:
            return Text(f"waiting for the first token · {self._settings}", style="dim")
        return Text(statistics_line(self._turn, self._settings), style="dim")


def settings_words(draft: str | None, k: int | None) -> str:
    """Draft and k of an answer, as far as they are known."""
    parts = [f"draft {draft}" if draft is not None else "", f"k {k}" if k is not None else ""]
    return " · ".join(part for part in parts if part) or "draft and k by the server"


def statistics_line(turn: ChatTurn, settings: str) -> str:
    """Tokens, speed and acceptance of an answer in one line."""
    rate, length = (turn.statistic(name) for name in ("acceptance_rate", "acceptance_length"))
    parts = [
        "" if turn.completion_tokens is None else counted(turn.completion_tokens, "token"),
        _speed(turn.timing.decode_tokens_per_second),
        "" if rate is None else f"acceptance rate {percent(rate)}",
        "" if length is None else f"acceptance length {number(length)}",
        _nodes(turn),
        settings,
        _cached(turn),
    ]
    return " · ".join(part for part in parts if part)


def _nodes(turn: ChatTurn) -> str:
    """How large the drafted trees were; nothing of chains."""
    nodes, drafts = turn.statistic("num_draft_nodes"), turn.statistic("num_drafts")
    return "" if not nodes or not drafts else f"{number(nodes / drafts, 1)} nodes per step"


def _speed(rate: float | None) -> str:
    return "" if rate is None else f"{number(rate, 1)} tokens/s"


def _cached(turn: ChatTurn) -> str:
    if not turn.cached_tokens or turn.prompt_tokens is None:
        return ""
    return f"{turn.cached_tokens} of {turn.prompt_tokens} prompt tokens cached"


def chat_markdown(history: ChatHistory, target: str) -> str:
    """The conversation as Markdown, each answer with its line of statistics."""
    parts = [f"# Conversation with {target}\n"]
    if history.system is not None:
        parts.append(f"## System\n\n{history.system}\n")
    for turn in history.turns:
        parts.append(f"## User\n\n{turn.prompt}\n")
        parts.append(f"## Assistant\n\n{turn.text.strip()}\n\n*{turn_line(turn)}*\n")
    return "\n".join(parts)


def turn_line(turn: ChatTurn) -> str:
    """The statistics line of a turn."""
    line = statistics_line(turn, settings_words(turn.draft, turn.num_speculative_tokens))
    return f"{line} · stopped" if turn.finish_reason == "abort" else line


def history_lines(turns: Sequence[ChatTurn]) -> list[str]:
    """The conversation in a line per message, for a terminal."""
    lines = []
    for place, turn in enumerate(turns, start=1):
        lines += [f"{place} user: {_short(turn.prompt)}", f"{place} assistant: {_short(turn.text)}"]
    return lines


def _short(text: str) -> str:
    line = " ".join("".join(piece.text for piece in plain_pieces(text)).split())
    return line if len(line) <= 100 else f"{line[:99]}…"

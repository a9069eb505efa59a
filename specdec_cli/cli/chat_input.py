"""Reads what the user of `chat` types: one message or command at a time, of one line or several."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specdec_cli.cli.terminal import colourful
from specdec_cli.errors import UsageError

_FENCE = '"""'
_PROMPT, _MORE = "> ", ". "

ReadLine = Callable[[str], str]
"""Reads a line, without its end; takes the words to show before it. Raises EOFError at the end of the input."""


@dataclass(frozen=True, slots=True)
class Typed:
    """A message, or a command.

    Args:
        text: what was typed.
        is_command: whether it begins with a slash, on a single line.
    """

    text: str
    is_command: bool


def read_typed(read_line: ReadLine) -> Typed | None:
    r"""The next message or command; None at the end of the input.

    A line that ends in a backslash continues on the next one; three double quotes begin and end a block of lines.
    """
    try:
        line = read_line(_PROMPT)
    except EOFError:
        return None
    if line.lstrip().startswith(_FENCE):
        return Typed(_block(line.lstrip().removeprefix(_FENCE), read_line), is_command=False)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1].removesuffix("\\")
        following = _line_or_end(read_line)
        if following is None:
            break
        lines.append(following)
    text = "\n".join(lines).strip()
    return Typed(text, is_command=text.startswith("/") and "\n" not in text)


def _block(first: str, read_line: ReadLine) -> str:
    """The lines up to the closing quotes, or to the end of the input."""
    lines = [first]
    while not lines[-1].rstrip().endswith(_FENCE):
        following = _line_or_end(read_line)
        if following is None:
            return "\n".join(lines).strip("\n")
        lines.append(following)
    lines[-1] = lines[-1].rstrip().removesuffix(_FENCE)
    return "\n".join(lines).strip("\n")


def _line_or_end(read_line: ReadLine) -> str | None:
    try:
        return read_line(_MORE)
    except EOFError:
        return None


def open_input() -> tuple[ReadLine, bool]:
    """The reader of standard input, and whether it is a terminal.

    Raises:
        UsageError: standard input is closed.
    """
    if sys.stdin is None:
        raise UsageError("standard input is closed", "run chat in a terminal, or give messages in a pipe")
    if not sys.stdin.isatty():
        return _read_piped, False
    if colourful(sys.stderr):
        editor = _prompt_toolkit()
        if editor is not None:
            return editor, True
    if sys.stdout.isatty():
        _load_readline()
        return input, True
    return _read_typed, True


def _read_piped(_: str) -> str:
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not valid UTF-8: {error.reason}", "give messages as UTF-8") from None
    except OSError as error:
        raise UsageError(f"standard input cannot be read: {error.strerror}", "give messages in a pipe") from error
    if not line:
        raise EOFError
    return line.removesuffix("\n").removesuffix("\r").removeprefix("\ufeff")


def _read_typed(shown: str) -> str:
    """A line from a terminal while standard output goes elsewhere."""
    sys.stderr.write(shown)
    sys.stderr.flush()
    return _read_piped(shown)


def _load_readline() -> None:
    """Line editing and history for `input`, where Python has them; the history is not written to a file."""
    try:
        import readline

        readline.set_auto_history(True)
    except ImportError:
        return


def _prompt_toolkit() -> ReadLine | None:
    """A multi-line editor if prompt_toolkit is installed (the extra `chat`): Alt-Enter adds a line."""
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.key_binding import KeyBindings
        from prompt_toolkit.output import create_output
    except ImportError:
        return None
    keys: Any = KeyBindings()

    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    session: Any = PromptSession(key_bindings=keys, output=create_output(stdout=sys.stderr))

    def read_line(shown: str) -> str:
        return str(session.prompt(shown))

    return read_line

"""The one error family. Raised deep with a sentence and a hint, caught once by the command line."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What the process's exit status says."""

    DONE = 0
    COULD_NOT_RUN = 1
    USAGE = 2
    GATE = 3
    INTERRUPTED = 130


class SpecdecError(Exception):
    """An error with one clear sentence for the person at the terminal.

    Args:
        message: what is wrong, with the value in backticks.
        hint: what to do about it, or None.
    """

    exit_code = ExitCode.COULD_NOT_RUN

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class RunError(SpecdecError):
    """It could not run: a model that does not load, memory, a port."""


class UsageError(SpecdecError):
    """A wrong option, recipe or input, or an incompatible pair."""

    exit_code = ExitCode.USAGE


class GateError(SpecdecError):
    """A gate was crossed: a regression, or an audit that found a difference."""

    exit_code = ExitCode.GATE


class QueueFull(SpecdecError):  # noqa: N818 - a state, reported as an answer
    """The queue has no room; `retry_after_seconds` says when it may have."""

    def __init__(self, num_waiting: int, retry_after_seconds: int = 1) -> None:
        super().__init__(f"the queue is full: `{num_waiting}` requests wait", "try again later")
        self.retry_after_seconds = retry_after_seconds


class Unavailable(SpecdecError):  # noqa: N818 - a state, reported as an answer
    """No requests are accepted now: a server loads or drains, or its engine has ended; `code` says which."""

    def __init__(self, message: str, code: str, retry_after_seconds: int = 5) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_seconds = retry_after_seconds

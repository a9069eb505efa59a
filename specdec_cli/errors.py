"""The one error family. Raised deep with a sentence and a hint, caught once by the command line; and suggestions."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum

from specdec_cli.libraries import blamed


class ExitCode(IntEnum):
    """The exit codes of the process."""

    DONE = 0
    COULD_NOT_RUN = 1
    USAGE = 2
    GATE = 3
    INTERRUPTED = 130
    TERMINATED = 143


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


class WeightsError(RunError):
    """The weights of a model can be read, and are not those of its configuration, or no numbers."""


class NotFiniteError(WeightsError):
    """A tensor of a model's file holds infinities or NaN, or scales that give them."""

    def __init__(self, weight: str, model: str) -> None:
        message = f"the weight `{weight}` of `{model}` holds numbers that are not finite"
        super().__init__(message, "copy or download the model again")


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


_DEBUG_HINT = "--debug shows the traceback; please report it as an issue"


def in_words(error: Exception) -> tuple[str, str | None, ExitCode]:
    """Sentence, hint and exit code of any error."""
    if isinstance(error, SpecdecError):
        return error.message, error.hint, error.exit_code
    if isinstance(error, OSError) and error.strerror:
        subject = f"`{error.filename}`: " if error.filename else "the system refused: "
        return f"{subject}{error.strerror}", None, ExitCode.COULD_NOT_RUN
    said = str(error).strip().split("\n")[0]
    if type(error).__name__ in ("OutOfMemoryError", "MemoryError") or "can't allocate memory" in said:
        hint = "decode fewer sequences at a time, or lower kv_cache_memory or max_model_len"
        return f"not enough memory{f': {said}' if said else ''}", hint, ExitCode.COULD_NOT_RUN
    message = f"unexpected {type(error).__name__}{f': {said}' if said else ''}"
    return *blamed(message, _DEBUG_HINT), ExitCode.COULD_NOT_RUN


_CLOSE, _PARTS_CLOSE = 0.75, 0.6
"""Least similarity of two words, and of the parts in which they differ, for one to be suggested for the other."""


def did_you_mean(word: object, known: Iterable[object]) -> str:
    """`; did you mean ...?` where something known is close, else nothing."""
    close = closest(str(word), [str(name) for name in known])
    return f"; did you mean `{close}`?" if close is not None else ""


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was most likely meant, or None.

    Dashes, underscores and capitals make no difference. A word of three letters or more may be the beginning of the one
    that was meant.
    """
    names = {_letters(name): name for name in reversed(list(known))}
    wanted = _letters(word)
    for close in difflib.get_close_matches(wanted, names, n=3, cutoff=_CLOSE):
        if _differ_little(wanted, close):
            return names[close]
    begun = [name for name in names if name.startswith(wanted)]
    return names[begun[0]] if len(wanted) > 2 and len(begun) == 1 else None


def _letters(word: str) -> str:
    """A word as it is compared."""
    return word.lower().replace("_", "-").strip("-")


def _differ_little(word: str, name: str) -> bool:
    """Whether the parts between dashes that only one of them has are alike: `x-key` is no slip for `x-model`."""
    parts, others = word.split("-"), name.split("-")
    rest = "-".join(part for part in parts if part not in others)
    other = "-".join(part for part in others if part not in parts)
    if not rest or other.startswith(rest):
        return True
    return bool(other) and difflib.SequenceMatcher(None, rest, other).ratio() >= _PARTS_CLOSE

"""Another engine's log, read for people: its reason for ending in one sentence, and its last useful lines."""

from __future__ import annotations

import re
from collections.abc import Iterator

from specdec_cli.text.printable import printable

_PROCESS = re.compile(r"^\([\w-]+(?: pid=\d+)?\) ?")
_LEVEL = re.compile(r"^(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d (?:\[[^\]]*\] ?)?")
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt)(?:: .*)?$")
_USAGE = re.compile(r"^[\w.-]+(?: [\w.-]+)*: error: (.*)$")
_LLAMACPP_ERROR = re.compile(
    r"^(?:\d+\.\d\d\.\d{3}\.\d{3} E [^:]*(?:::?[^ :]*)*|error(?: while handling argument \"[^\"]*\")?|xllamacpp): (.*)$"
)
"""llama.cpp's errors: those of its log, of which the first is the cause, of its options, and of its wheel."""
_OF_PYDANTIC = re.compile(r"^\s+(?:Value error, |Assertion failed, )?(.*?) \[type=\w+,.*$")
_FRAMES = ("Traceback (", 'File "', "During handling", "The above exception", "^", "~")
_BARS = re.compile(r"\d+%\||it/s|s/it")
_AFTERMATH = re.compile(
    r"^\[shutdown\]|^(?:INFO: +)?(?:Shutting down|Waiting for application|Application shutdown|Finished server process)"
    r"|nanobind|^- (?:leaked |\.\.\. skipped)"
)
"""How vLLM takes leave: uvicorn's and its own lines, and its C++ bindings' list of what was not freed."""
_WRAPPERS = ("Engine core initialization failed", "WorkerProc initialization failed", "EngineDeadError", "SystemExit")
_MOST_CHARACTERS = 300


def reason(log: str) -> str | None:
    """The engine's own words for why it ended; None where the log holds no error."""
    lines = list(_lines(log))
    refused = next((match[1] for line in lines if (match := _USAGE.match(line) or _LLAMACPP_ERROR.match(line))), None)
    if refused is not None:
        return _short(refused)
    places = [place for place, line in enumerate(lines) if _EXCEPTION.match(line)]
    wrapped = next((place for place in places if _is_wrapper(lines[place])), len(lines))
    causes = [place for place in places if place < wrapped] or [
        place for place in places if not _is_wrapper(lines[place])
    ]
    if not causes:
        return _short(lines[places[-1]]) if places else None
    return _short(_in_full(lines, causes[-1]))


def last_lines(log: str, most: int = 8) -> list[str]:
    """The last lines that say something: no traceback's frames, no progress bars, no shutdown, none twice in a row."""
    kept: list[str] = []
    is_code = False
    for line in _lines(log):
        text = line.strip()
        if text.startswith(_FRAMES):
            is_code = text.startswith('File "')
            continue
        if is_code and line.startswith("    "):
            continue
        is_code = False
        if text and not _BARS.search(text) and not _AFTERMATH.search(text) and kept[-1:] != [text]:
            kept.append(text)
    return [_short(line) for line in kept[-most:]]


def _lines(log: str) -> Iterator[str]:
    """Lines of a log without colours, process names and levels."""
    for line in _COLOUR.sub("", log).split("\n"):
        yield _LEVEL.sub("", _PROCESS.sub("", line.rstrip("\r").rpartition("\r")[2])).rstrip()


def _is_wrapper(line: str) -> bool:
    return any(word in line for word in _WRAPPERS)


def _in_full(lines: list[str], place: int) -> str:
    """An exception's line; of pydantic's, which speak in the lines below, the first field's reason."""
    if "validation error" not in lines[place]:
        return lines[place]
    below = (match[1] for line in lines[place + 1 : place + 6] if (match := _OF_PYDANTIC.match(line)))
    return next(below, lines[place])


def _short(line: str) -> str:
    shown = " ".join(printable(line).split())
    return shown if len(shown) <= _MOST_CHARACTERS else f"{shown[:_MOST_CHARACTERS]}…"

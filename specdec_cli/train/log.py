"""The log of a training run: one JSON object a line, each an event."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from specdec_cli.errors import RunError
from specdec_cli.train.disk import replace_text, writing
from specdec_cli.train.events import Saved, TrainingEvent

_EVENT: TypeAdapter[TrainingEvent] = TypeAdapter(TrainingEvent)


class TrainingLog:
    """A file that events are appended to.

    Args:
        path: of the file.
        step: steps taken so far; what an earlier run logged of later ones, which are taken again, is dropped.

    Attributes:
        events: all of them, those of earlier runs included.

    Raises:
        RunError: the file is damaged, or cannot be written.
    """

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        self.events: list[TrainingEvent] = [event for event in _read(path) if event.step <= step]
        replace_text(path, _lines(self.events))

    def add(self, event: TrainingEvent) -> None:
        """Append an event.

        Raises:
            RunError: the disk is full, or the file cannot be written.
        """
        self.events.append(event)
        with writing(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(_lines([event]))


def last_saved(path: Path) -> int:
    """The step of the last checkpoint that a log tells of; 0 without any.

    Raises:
        RunError: the log is damaged.
    """
    return max((event.step for event in _read(path) if isinstance(event, Saved)), default=0)


def _lines(events: Sequence[TrainingEvent]) -> str:
    return "".join(event.model_dump_json() + "\n" for event in events)


def _read(path: Path) -> Iterator[TrainingEvent]:
    """The whole lines of a log; the last one may be half written."""
    if not path.exists():
        return
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            yield _EVENT.validate_json(line)
        except ValidationError as error:
            message = f"line {number} of `{path}` is damaged"
            hint = "restore the file, or delete the line: the log has figures, and no weights"
            raise RunError(message, hint) from error

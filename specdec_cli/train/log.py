"""The log of a training run: one JSON object a line, each an event."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from specdec_cli.errors import RunError
from specdec_cli.train.disk import replace_text, writing
from specdec_cli.train.events import Evaluated, Trained, TrainingEvent

_FIELDS = {
    "step": {"loss", "matches_by_depth", "learning_rate", "num_tokens", "seconds"},
    "evaluation": {"k", "acceptance_length", "acceptance_rate", "acceptance_by_depth", "is_best", "seconds"},
    "checkpoint": set[str](),
}
"""What a row of each kind has beside its event and its step."""


class TrainingLog:
    """A file that events are appended to.

    Args:
        path: of the file.
        step: steps taken so far; what an earlier run logged of later ones, which are taken again, is dropped.

    Attributes:
        rows: all rows, those of earlier runs included.

    Raises:
        RunError: the file is damaged, or cannot be written.
    """

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        self.rows: list[dict[str, Any]] = [row for row in _read(path) if row["step"] <= step]
        replace_text(path, _lines(self.rows))

    def add(self, event: TrainingEvent) -> None:
        """Append an event.

        Raises:
            RunError: the disk is full, or the file cannot be written.
        """
        row = as_row(event)
        self.rows.append(row)
        with writing(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(_lines([row]))


def last_saved(path: Path) -> int:
    """The step of the last checkpoint that a log tells of; 0 without any.

    Raises:
        RunError: the log is damaged.
    """
    return max((int(row["step"]) for row in _read(path) if row["event"] == "checkpoint"), default=0)


def as_row(event: TrainingEvent) -> dict[str, Any]:
    """The JSON form of an event."""
    if isinstance(event, Trained):
        return {
            "event": "step",
            "step": event.step,
            "loss": event.loss,
            "matches_by_depth": [round(one, 4) for one in event.matches],
            "learning_rate": event.learning_rate,
            "num_tokens": event.num_tokens,
            "seconds": round(event.seconds, 4),
        }
    if isinstance(event, Evaluated):
        found = {"event": "evaluation", "step": event.step, **event.acceptance.as_dict()}
        return found | {"is_best": event.is_best, "seconds": round(event.seconds, 4)}
    return {"event": "checkpoint", "step": event.step}


def _lines(rows: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _read(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a log; the last one may be half written."""
    if not path.exists():
        return
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not _is_row(row):
            said = f"line {number} of `{path}` is damaged"
            raise RunError(said, "restore the file, or delete the line: the log has figures, and no weights")
        yield row


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return False
    fields = _FIELDS.get(str(row.get("event")))
    return fields is not None and fields <= row.keys()

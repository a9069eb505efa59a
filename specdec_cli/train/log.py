"""The log of a training run: one JSON object a line, each an event."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from specdec_cli.train.disk import writing
from specdec_cli.train.events import Evaluated, Trained, TrainingEvent


class TrainingLog:
    """A file that events are appended to.

    Args:
        path: of the file.
        step: steps taken so far; what an earlier run logged of later ones, which are taken again, is dropped.

    Attributes:
        rows: all rows, those of earlier runs included.
    """

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        self.rows: list[dict[str, Any]] = [row for row in _read(path) if row["step"] <= step]
        with writing(path):
            path.write_text(_lines(self.rows), encoding="utf-8")

    def add(self, event: TrainingEvent) -> None:
        """Append an event.

        Raises:
            RunError: the disk is full, or the file cannot be written.
        """
        row = as_row(event)
        self.rows.append(row)
        with writing(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(_lines([row]))


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


def _read(path: Path) -> Iterable[dict[str, Any]]:
    """The whole lines of a log."""
    if not path.exists():
        return
    for line in path.read_bytes().split(b"\n")[:-1]:
        yield json.loads(line)

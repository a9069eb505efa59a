"""The server's log on stderr, as text or as JSON, one line a record."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

_PLAIN = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", "color_message"}


def configure_logs(form: str, is_quiet: bool = False) -> None:
    """Send this package's records to stderr, and uvicorn's errors: its warnings tell of each request that is no HTTP.

    Args:
        form: `text` or `json`.
        is_quiet: errors only.
    """
    handler = _Stderr()
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    for name in ("specdec_cli", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(logging.INFO if name == "specdec_cli" and not is_quiet else logging.ERROR)


class _Stderr(logging.Handler):
    """Writes to what stderr is at that moment: a live table puts itself in its place."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


class JsonLines(logging.Formatter):
    """A JSON object per record, with everything that was given as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line = {"time": _time(record), "level": record.levelname.lower(), "message": record.getMessage()}
        line |= _facts(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)


class TextLines(logging.Formatter):
    """Time, level, message, then what was given as `extra`; control characters of strangers are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and a traceback below it where there is one."""
        facts = " ".join(f"{name}={_short(value)}" for name, value in _facts(record).items())
        message = "".join(c if c.isprintable() else repr(c)[1:-1] for c in record.getMessage())
        line = " ".join(part for part in (_time(record), record.levelname.lower(), message, facts) if part)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in record.__dict__.items() if name not in _PLAIN}


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return value if isinstance(value, str) and value.isprintable() and " " not in value else json.dumps(value)

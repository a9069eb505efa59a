"""The document of `chat`, `specdec.chat/1`."""

from __future__ import annotations

from typing import ClassVar

from specdec_cli.document import ResultDocument
from specdec_cli.measure.chat.chat import ChatTurn


class ChatDocument(ResultDocument):
    """A conversation; `target` answered, and `endpoint` is null for an engine of this process."""

    schema_name: ClassVar[str] = "specdec.chat/1"

    target: str
    endpoint: str | None
    system: str | None
    turns: list[ChatTurn]

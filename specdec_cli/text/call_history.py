"""Earlier tool calls as a chat template takes them: whole, cut by a token limit, or malformed, each as it is."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from pydantic_core import from_json

from specdec_cli.text.call_probe import CALL_ID, CALLED, written_call

if TYPE_CHECKING:
    from specdec_cli.text.tokenizer import Tokenizer

_TEXT = '{"probe_key": "probe'
"""Arguments that a token limit cut."""
_SHORT_ID = 9


class CallForm(Protocol):
    """A format of tool calls that writes them as text."""

    def write(self, calls: Sequence[tuple[str, str, Mapping[str, Any]]]) -> str:
        """The text of calls: of each its name, the text of its arguments, and what can be read of them."""
        ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class CallWriter:
    """One way to give earlier calls to a template.

    Args:
        takes_objects: arguments that are a JSON object are given as one, else as their text.
        takes_texts: other arguments are given as their text, else as an object of what can be read of them.
        has_short_ids: ids are cut to nine letters and digits, and missing ones are filled in.
        splits_turns: each call has a turn of its own, for templates that refuse several in one.
        form: calls are written into the turn's text in this format, for templates that read no calls.
    """

    takes_objects: bool = True
    takes_texts: bool = True
    has_short_ids: bool = False
    splits_turns: bool = False
    form: CallForm | None = None

    def turns(self, turn: dict[str, Any], calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """A turn with its calls; where it is split, its text and further fields stand in the first one."""
        if self.form is not None:
            functions = [(name, _text(arguments)) for name, arguments in map(_function, calls)]
            written = self.form.write([(name, text, _members(text)) for name, text in functions])
            return [turn | {"content": "\n".join(filter(None, (turn["content"], written)))}]
        objects = self._calls(calls)
        if not self.splits_turns:
            return [turn | {"tool_calls": objects}]
        rest = {"role": turn["role"], "content": ""}
        return [(rest if place else turn) | {"tool_calls": [call]} for place, call in enumerate(objects)]

    def _calls(self, tool_calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        calls = []
        for place, call in enumerate(tool_calls):
            name, arguments = _function(call)
            function = {"name": name, "arguments": self._arguments(arguments)}
            calls.append({**self._id(call.get("id"), place), "type": "function", "function": function})
        return calls

    def id_of(self, call_id: str) -> str:
        """A call's id."""
        if not self.has_short_ids:
            return call_id
        return re.sub(r"[^a-zA-Z0-9]", "", call_id)[-_SHORT_ID:].rjust(_SHORT_ID, "0")

    def _id(self, call_id: str | None, place: int) -> dict[str, str]:
        if call_id is None and not self.has_short_ids:
            return {}
        return {"id": self.id_of(str(place) if call_id is None else call_id)}

    def _arguments(self, arguments: Any) -> Any:
        text = _text(arguments)
        whole = _object(text or "{}")
        if whole is not None:
            return whole if self.takes_objects else text
        return text if self.takes_texts else _members(text)


@lru_cache(maxsize=32)
def call_writers(tokenizer: Tokenizer, chat_template: str, form: CallForm | None) -> tuple[CallWriter, ...]:
    """Ways to give a template its calls, best first; the first is what the template makes most of.

    Args:
        tokenizer: has the template.
        chat_template: the template, so that a changed one is looked at again.
        form: of the model's calls, for a template that ignores them; None if unknown.
    """
    of_object, of_text = written_call(tokenizer, {"probe_key": "probe value"}), written_call(tokenizer, _TEXT)
    takes_objects = of_object is not None and "probe value" in of_object
    takes_texts = of_text is not None and (_TEXT in of_text or json.dumps(_TEXT) in of_text)
    written = [text for text in (of_object, of_text) if text is not None]
    if form is not None and written and not any(CALLED in text or CALL_ID in text for text in written):
        return (CallWriter(form=form),)
    best = CallWriter(takes_objects or not takes_texts, takes_texts)
    others = (CallWriter(True, False), CallWriter(False, True), CallWriter(True, True))
    ways = tuple(dict.fromkeys((best, *others)))
    short = (CallWriter(way.takes_objects, way.takes_texts, has_short_ids=True) for way in ways)
    return (*ways, *short, CallWriter(best.takes_objects, best.takes_texts, splits_turns=True))


def _function(call: Mapping[str, Any]) -> tuple[str, Any]:
    """A call's name and its arguments as they were given."""
    return call["function"].get("name", ""), call["function"].get("arguments")


def _text(arguments: Any) -> str:
    """Arguments as their text, whatever a client sent."""
    return (
        arguments
        if isinstance(arguments, str)
        else ""
        if arguments is None
        else json.dumps(arguments, ensure_ascii=False)
    )


def _object(text: str) -> dict[str, Any] | None:
    """A JSON object, or None; so too where it spells half of a surrogate pair, which no tokenizer reads."""
    try:
        document = json.loads(text)
        json.dumps(document, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _members(text: str) -> dict[str, Any]:
    """The readable part of a truncated object; any other text under the name `arguments`."""
    try:
        document = from_json(text, allow_partial="trailing-strings")
    except ValueError:
        document = None
    if isinstance(document, dict):
        return document
    return {"arguments": text} if text.strip() else {}

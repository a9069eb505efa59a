"""The output items of a response, and the events that tell of each: reasoning, messages and function calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Event = dict[str, Any]

_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
_PARTS = {"reasoning": "reasoning_text", "message": "output_text"}


class ResponseItems:
    """Builds items from the deltas of one chat message; one item is open at a time.

    Args:
        request_id: part of the items' ids.
    """

    def __init__(self, request_id: str) -> None:
        self.items: list[dict[str, Any]] = []
        self._request_id = request_id
        self._is_open = False
        self._pending: list[Any] = []  # logprobs of tokens whose text is still to come

    def take(self, delta: Mapping[str, Any], logprobs: Mapping[str, Any] | None) -> Iterator[Event]:
        """Events of a delta. Logprobs wait for the text of their tokens; those of thoughts and calls have no place."""
        self._pending += logprobs["content"] if logprobs else ()
        if thought := delta.get("reasoning_content"):
            yield from self._say("reasoning", thought, [])
        if content := delta.get("content"):
            yield from self._say("message", content, self._pending)
        if any(name in delta for name in ("reasoning_content", "content", "tool_calls")):
            self._pending = []
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                yield from self._begin("function_call", call_id=call["id"], name=call["function"]["name"], arguments="")
            yield from self._argue(call["function"]["arguments"])

    def close(self, finish_reason: str) -> Iterator[Event]:
        """Events of the end; an answer without any text is one empty message."""
        if not self.items:
            yield from self._begin("message", role="assistant")
        if self._pending and self._is_open and self.items[-1]["type"] == "message":
            yield from self._say("message", "", self._pending)
        yield from self._end("incomplete" if finish_reason == "length" else "completed")

    def _say(self, kind: str, text: str, logprobs: list[Any]) -> Iterator[Event]:
        if not self._is_open or self.items[-1]["type"] != kind:
            fields: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            yield from self._begin(kind, **fields)
        part = self.items[-1]["content"][0]
        part["text"] += text
        details: dict[str, Any] = {"delta": text}
        if kind == "message":
            part["logprobs"] += logprobs
            details["logprobs"] = logprobs
        yield self._about(f"response.{_PARTS[kind]}.delta", content_index=0, **details)

    def _argue(self, text: str) -> Iterator[Event]:
        if text:
            self.items[-1]["arguments"] += text
            yield self._about("response.function_call_arguments.delta", delta=text)

    def _begin(self, kind: str, **fields: Any) -> Iterator[Event]:
        yield from self._end("completed")
        item_id = f"{_PREFIXES[kind]}_{self._request_id}_{len(self.items)}"
        item = {"id": item_id, "type": kind, "status": "in_progress", **fields}
        if kind in _PARTS:
            item["content"] = []
        self.items.append(item)
        self._is_open = True
        yield self._whole("response.output_item.added")
        if kind in _PARTS:
            part: dict[str, Any] = {"type": _PARTS[kind], "text": ""}
            part |= {"annotations": [], "logprobs": []} if kind == "message" else {}
            yield self._about("response.content_part.added", content_index=0, part=_copy(part))
            item["content"].append(part)

    def _end(self, status: str) -> Iterator[Event]:
        if not self._is_open:
            return
        self._is_open = False
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            details = {"name": item["name"], "arguments": item["arguments"]}
            yield self._about("response.function_call_arguments.done", **details)
        else:
            part = item["content"][0]
            details = {"text": part["text"]} | ({"logprobs": part["logprobs"]} if "logprobs" in part else {})
            yield self._about(f"response.{part['type']}.done", content_index=0, **details)
            yield self._about("response.content_part.done", content_index=0, part=part)
        yield self._whole("response.output_item.done")

    def _about(self, kind: str, **facts: Any) -> Event:
        """An event of the item that is open."""
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **facts}

    def _whole(self, kind: str) -> Event:
        item = self.items[-1]
        shown = item | ({"content": [_copy(part) for part in item["content"]]} if "content" in item else {})
        return {"type": kind, "output_index": len(self.items) - 1, "item": shown}


def _copy(part: Mapping[str, Any]) -> dict[str, Any]:
    """A part as it is now; lists in it would grow."""
    return {name: list(value) if isinstance(value, list) else value for name, value in part.items()}

"""The answer to `POST /v1/responses`: a chat's deltas become items, whole or as OpenAI's typed events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from specdec_cli.serve.answer.respond import CompletionAnswer, sse
from specdec_cli.serve.answer.response_items import Event, ResponseItems
from specdec_cli.serve.request.responses_protocol import ResponsesRequest

if TYPE_CHECKING:
    from specdec_cli.engine.jobs.records import Delta
    from specdec_cli.serve.errors import ApiError
    from specdec_cli.serve.request.prepare import Prepared

_ECHOED = ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")


class ResponseAnswer(CompletionAnswer):
    """Folds the deltas of one request for a response; used as `CompletionAnswer` is.

    Args:
        prepared: the job and plan of the chat that a response became, and its body, whose settings it repeats.
        per_token: one event for each token instead of one for each step.
    """

    def __init__(self, prepared: Prepared, per_token: bool = False) -> None:
        super().__init__(prepared, per_token)
        assert isinstance(prepared.body, ResponsesRequest), "`prepare_response` keeps the body"
        job = prepared.jobs[0]
        self._items = ResponseItems(job.request_id)
        self._num_events = 0
        self._settings = _settings(prepared.body) | {
            "id": f"resp_{job.request_id}",
            "created_at": int(time.time()),
            "model": prepared.plan.model.names[0],
            "temperature": job.params.temperature,
            "top_p": job.params.top_p,
        }

    def document(self) -> dict[str, Any]:
        """The whole response."""
        for delta in self._deltas[0]:
            for _ in self._fold(delta):
                pass
        return self._ended()

    def opening(self) -> list[dict[str, Any]]:
        """Events before any delta."""
        response = self._response("in_progress")
        return [self._event({"type": f"response.{name}", "response": response}) for name in ("created", "in_progress")]

    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Events of one delta; errors as in `CompletionAnswer`."""
        self._count(index, delta)
        return [self._event(event) for event in self._fold(delta)]

    def closing(self) -> list[dict[str, Any]]:
        """The event that holds the whole response."""
        response = self._ended()
        return [self._event({"type": f"response.{response['status']}", "response": response})]

    def event(self, document: Mapping[str, Any]) -> bytes:
        """A server-sent event under its type."""
        return f"event: {document['type']}\n".encode() + sse(document)

    def failure(self, error: ApiError) -> bytes:
        """The last event of a response that an error ended."""
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        failed = {"code": code, "message": error.message, "param": error.param, "type": error.type}
        response = self._response("failed") | {"error": failed, "output": self._items.items}
        return self.event(self._event({"type": "response.failed", "response": response}))

    end = b""

    def _event(self, event: Mapping[str, Any]) -> dict[str, Any]:
        self._num_events += 1
        return {"type": event["type"], "sequence_number": self._num_events - 1, **event}

    def _fold(self, delta: Delta) -> Iterator[Event]:
        """Events of a delta; token by token where each has logprobs, so that they stand with their own item."""
        choice = self._choices[0]
        is_apart = self._per_token or choice.job.params.logprobs is not None
        for part in choice.apart(delta) if is_apart else [delta]:
            for chunk in self._streamed(0, part):
                yield from self._items.take(chunk["delta"], chunk["logprobs"])
                if chunk["finish_reason"] is not None:
                    yield from self._items.close(chunk["finish_reason"])

    def _ended(self) -> dict[str, Any]:
        is_cut = self._choices[0].finish_reason == "length"
        response = self._response("incomplete" if is_cut else "completed")
        response |= {"output": self._items.items, "usage": _usage(self._usage()), "metrics": self._metrics()}
        return response | (
            {"incomplete_details": {"reason": "max_output_tokens"}} if is_cut else {"completed_at": int(time.time())}
        )

    def _response(self, status: str) -> dict[str, Any]:
        fixed: dict[str, Any] = {
            "object": "response",
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": [],
        }
        return self._settings | fixed | {"usage": None}


def _settings(request: ResponsesRequest) -> dict[str, Any]:
    """The request's settings, as a response repeats them; nothing is stored, whatever it asked for."""
    choice, text = request.tool_choice or "auto", request.text
    shape = {"type": "text"}
    if text is not None and text.format is not None:
        shape = text.format.model_dump(by_alias=True, exclude_none=True)
    reasoning = request.reasoning
    return {
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "store": False,
        "text": {"format": shape},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "truncation": "disabled",
        **{name: getattr(request, name) for name in _ECHOED if getattr(request, name) is not None},
    }


def _usage(chat: Mapping[str, Any]) -> dict[str, Any]:
    """A chat's usage under the names of this API."""
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, **chat.get("prompt_tokens_details", {})},
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0, **chat["completion_tokens_details"]},
        "total_tokens": chat["total_tokens"],
    }

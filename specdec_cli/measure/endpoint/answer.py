"""A streamed answer and its clock: when its text came, and how many tokens the server says it has."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec_cli.measure.endpoint.request_counts import AnswerCounts, request_counts, together, whole
from specdec_cli.text.printable import printable

_TEXT = ("content", "reasoning_content", "reasoning", "thinking", "refusal")
_CALLS = ("tool_calls", "function_call")
_BROKEN_OFF = ("error", "abort", "aborted", "cancelled", "canceled")


@dataclass(slots=True)
class Answer:
    """The outcome of one request, in seconds since it was sent.

    Args:
        sent: the clock's reading then.
        arrivals: when each chunk with output in it came: text, reasoning or tool calls.
        end_s: when the stream ended.
        finish_s: when the finish reason came; None without one.
        finish_reason: in the server's words.
        completion_tokens: as the server's `usage` counts them; None where it sends none, or one that cannot be right.
            Chunks are not tokens.
        invalid_usage: the number of tokens that cannot be right, as the server wrote it.
        num_bytes: size of the stream's events.
        prompt_tokens: likewise.
        cached_tokens: of the prompt, those that the server had in its cache, as it says.
        model: the name of the model that answered, as it says.
        is_done: whether the server marked the stream's end.
        opened_connection: whether the request had to open one, which its times hold.
        calls_tools: whether it holds a tool call.
        speculation: its own counts of speculation; None where the server sends none.
        token_ids: of the output, where the request asks for `return_token_ids`; empty where the server sends none.
        stop_reason: the stop string or token that ended it, as vLLM says; None of others.
    """

    sent: float
    arrivals: list[float] = field(default_factory=list)
    end_s: float = 0.0
    finish_s: float | None = None
    finish_reason: str | None = None
    completion_tokens: int | None = None
    invalid_usage: str | None = None
    num_bytes: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    model: str | None = None
    is_done: bool = False
    opened_connection: bool = False
    calls_tools: bool = False
    speculation: AnswerCounts | None = None
    token_ids: list[int] = field(default_factory=list)
    stop_reason: int | str | None = None
    _parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The answer's text, without its reasoning."""
        return "".join(self._parts)

    @property
    def num_tokens(self) -> int | None:
        """Output tokens by the server's usage; None where it counts none although there is output."""
        return None if self.completion_tokens == 0 and self.arrivals else self.completion_tokens

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first output; None for an answer without any."""
        return self.arrivals[0] if self.arrivals else None

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each output token after the first; None of a single chunk, or without a count of at least two."""
        tokens = self.num_tokens
        if len(self.arrivals) < 2 or tokens is None or tokens < 2:
            return None
        end = self.arrivals[-1] if self.finish_s is None else self.finish_s
        return (max(end, self.arrivals[-1]) - self.arrivals[0]) / (tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between one chunk with output and the next."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def fault(self) -> str | None:
        """Reason why a stream that has ended is no whole answer; None if it is."""
        if not self.is_done and self.finish_reason is None:
            return "the server ended its stream before the answer was finished"
        if self.finish_reason in _BROKEN_OFF:
            return f"the server broke off its answer: its finish_reason is `{self.finish_reason}`"
        if self.finish_reason is None and not self.arrivals and self.completion_tokens is None:
            return "the server's stream holds no answer: no text, no finish_reason, no usage"
        return None

    def feed(self, chunk: dict[str, Any], now: float) -> None:
        """Add one chunk of the stream, which came at `now` on the clock."""
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self._count(usage.get("completion_tokens"))
            self.prompt_tokens = _updated(usage.get("prompt_tokens"), self.prompt_tokens)
            details = usage.get("prompt_tokens_details")
            cached = details.get("cached_tokens") if isinstance(details, dict) else None
            self.cached_tokens = _updated(cached, self.cached_tokens)
        if isinstance(chunk.get("model"), str) and chunk["model"]:
            self.model = chunk["model"]
        counts = request_counts(chunk)
        if counts is not None and (self.speculation is None or len(counts.counts) >= len(self.speculation.counts)):
            self.speculation = counts  # usage, which has totals alone, may come after the engine's own counts
        choices = chunk.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        if self._keep(choice):
            self.arrivals.append(now - self.sent)
        if choice.get("finish_reason"):
            self.finish_reason, self.finish_s = str(choice["finish_reason"]), now - self.sent
            reason = choice.get("stop_reason")
            self.stop_reason = reason if isinstance(reason, int | str) else None

    def check_usage(self, most: object) -> None:
        """Take back a usage of more tokens than were requested and than the stream has bytes.

        Args:
            most: tokens that the request allows; None for any number.
        """
        if isinstance(most, int) and (self.completion_tokens or 0) > max(most, self.num_bytes):
            self.completion_tokens, self.invalid_usage = None, str(self.completion_tokens)[:40]

    def _count(self, given: object) -> None:
        """Take the server's number of tokens so far, unless it sends none."""
        if given is not None:
            self.completion_tokens = whole(given)
            self.invalid_usage = printable(json.dumps(given))[:40] if self.completion_tokens is None else None

    def _keep(self, choice: dict[str, Any]) -> bool:
        """Whether a chunk's choice carries output; its text is kept."""
        delta = choice.get("delta")
        parts = delta if isinstance(delta, dict) else {}
        text = choice.get("text") or parts.get("content")
        if isinstance(text, str):
            self._parts.append(text)
        ids = choice.get("token_ids")
        if isinstance(ids, list):
            self.token_ids += [token for token in ids if isinstance(token, int)]
        has_calls = any(parts.get(key) for key in _CALLS)
        self.calls_tools = self.calls_tools or has_calls
        return has_calls or bool(text) or any(isinstance(parts.get(key), str) and parts[key] for key in _TEXT)


def own_counts(answers: Sequence[Answer]) -> AnswerCounts | None:
    """Counts of several answers by their own; None unless each of them counts its steps."""
    counted = [answer.speculation for answer in answers if answer.speculation is not None]
    has_all = len(counted) == len(answers) and all(own.has_steps for own in counted)
    return together(counted) if counted and has_all else None


def _updated(value: object, known: int | None) -> int | None:
    """A count of tokens, or the earlier one if the value is none."""
    count = whole(value)
    return known if count is None else count

"""A streamed answer and its clock: when its text came, and how many tokens the server says it has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Answer:
    """What came of one request, in seconds since it was sent.

    Args:
        sent: the clock's reading then.
        arrivals: when each chunk with text in it came.
        end_s: when the stream ended.
        finish_s: when the server said why it finished; None where it did not say.
        finish_reason: in its words.
        completion_tokens: as the server's `usage` counts them; None where it sends none. Chunks are not tokens.
        prompt_tokens: likewise.
    """

    sent: float
    arrivals: list[float] = field(default_factory=list)
    end_s: float = 0.0
    finish_s: float | None = None
    finish_reason: str | None = None
    completion_tokens: int | None = None
    prompt_tokens: int | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first text; None for an answer without any."""
        return self.arrivals[0] if self.arrivals else None

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each output token after the first; None without a count of at least two."""
        if not self.arrivals or self.completion_tokens is None or self.completion_tokens < 2:
            return None
        end = self.arrivals[-1] if self.finish_s is None else self.finish_s
        return (end - self.arrivals[0]) / (self.completion_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between one chunk with text and the next."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]

    def feed(self, chunk: dict[str, Any], now: float) -> None:
        """Take one chunk of the stream that came at `now` on the clock."""
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self.completion_tokens = _whole(usage.get("completion_tokens"))
            self.prompt_tokens = _whole(usage.get("prompt_tokens"))
        choices = chunk.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        if _text_of(choice):
            self.arrivals.append(now - self.sent)
        if choice.get("finish_reason"):
            self.finish_reason, self.finish_s = str(choice["finish_reason"]), now - self.sent


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _text_of(choice: dict[str, Any]) -> bool:
    """Whether a chunk's choice carries output: text, or a message's content, reasoning or tool calls."""
    delta = choice.get("delta")
    parts = delta if isinstance(delta, dict) else {}
    said = (choice.get("text"), *(parts.get(key) for key in ("content", "reasoning_content", "reasoning")))
    return any(isinstance(text, str) and text for text in said) or bool(parts.get("tool_calls"))

"""One choice of an answer while it grows: its text, tokens, calls, and which tokens were drafted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specdec_cli.engine.jobs.records import Delta
from specdec_cli.events import SpeculativeCounts
from specdec_cli.serve.answer.logprobs import CompletionLogprobs, TokenWords, joined
from specdec_cli.serve.request.reasoning import ThoughtCounter
from specdec_cli.serve.tools.calls import ToolDelta

if TYPE_CHECKING:
    from specdec_cli.engine.jobs.records import Job
    from specdec_cli.events import Emitted
    from specdec_cli.serve.request.prepare import ResponsePlan
    from specdec_cli.text.stream import TextStream


class Choice:
    """Folds a job's deltas.

    Args:
        job: what is decoded.
        echoed: text before the output's; None without an echo.
        plan: of the answer.
    """

    def __init__(self, job: Job, echoed: str | None, plan: ResponsePlan) -> None:
        self.job = job
        self.counts = SpeculativeCounts()
        self.draft_steps: list[tuple[int, int]] = []  # drafted and accepted tokens, kept for detailed metrics only
        self.token_ids: list[int] = []
        self.num_cached_tokens: int | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._plan = plan
        self._tokenizer = tokenizer = plan.model.tokenizer
        self._words = TokenWords(tokenizer, plan.request.return_tokens_as_token_ids is True, plan.skip_special)
        self._echoed = echoed
        self._logprobs = CompletionLogprobs(self._words)
        self._parser = plan.tools.parser() if plan.tools is not None else None
        self._thoughts = plan.reasoning.reader() if plan.reasoning is not None else None
        self._counter = (
            ThoughtCounter(plan.reasoning, tokenizer) if plan.reasoning is not None and tokenizer is not None else None
        )
        self._has_answer = plan.reasoning is None
        self._stream: TextStream | None = None
        self._is_apart = False
        self._keeps_steps = plan.model.serve.per_request_spec_decode_metrics == "detailed"

    def observe(self, delta: Delta) -> None:
        """Count what a step gave; of each delta once, before it is taken apart."""
        for step in delta.steps:
            self.counts.add(step)
            self.token_ids += step.tokens
            if self._keeps_steps and step.num_drafted:
                self.draft_steps.append((step.num_drafted, step.num_accepted))
        if self._counter is not None:
            self._counter.count(delta.token_ids, is_last=delta.finish_reason is not None)
        if delta.num_cached_tokens is not None:
            self.num_cached_tokens = delta.num_cached_tokens
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    def text(self, delta: Delta) -> str:
        """The text that a delta adds: the echo first, the stop string last if requested."""
        text, self._echoed = (self._echoed or "") + delta.text, None
        if delta.finish_reason is not None and self._plan.request.include_stop_str_in_output:
            text += self._stop_text(delta.stop_reason)
        return text

    def deltas(self, delta: Delta) -> list[dict[str, Any]]:
        """OpenAI's `delta` objects for what a delta adds to a chat message."""
        text, deltas = self.text(delta), []
        if self._thoughts is not None:
            thought, text = self._split(text, is_last=delta.finish_reason is not None)
            deltas = [{"reasoning_content": thought, "reasoning": thought}] if thought else []
        if self._parser is None:
            return [*deltas, *([{"content": text}] if text else [])]
        if not self._has_answer:
            return deltas
        calls = self._parser.feed(text) + (self._parser.finish() if delta.finish_reason is not None else [])
        if delta.finish_reason == "stop" and self._parser.num_calls:
            self.finish_reason = "tool_calls"
        return [*deltas, *(self._tool_delta(tool_delta) for tool_delta in calls)]

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Tokens of its thinking so far; None where thinking is not read."""
        return None if self._counter is None else self._counter.num_tokens

    def _split(self, text: str, is_last: bool) -> tuple[str, str]:
        """The next text as thought, where that is shown, and answer."""
        assert self._thoughts is not None, "only the text of a model whose thinking is read is split"
        thought, answer = self._thoughts.feed(text)
        if is_last:
            rest = self._thoughts.finish()
            thought, answer = thought + rest[0], answer + rest[1]
        self._has_answer |= bool(answer)
        is_shown = self._plan.reasoning is not None and self._plan.reasoning.is_shown
        return thought if is_shown else "", answer

    def logprobs(self, delta: Delta) -> dict[str, Any] | None:
        """The `logprobs` of a delta's tokens, and of an echoed prompt's before them."""
        if self._plan.is_chat:
            return None if self.job.params.logprobs is None else self._words.chat(delta.logprobs)
        logprobs: dict[str, Any] | None = None
        if self._echoed is not None and self.job.prompt_logprobs is not None:
            logprobs = self._logprobs.prompt(self.job.token_ids, delta.prompt_logprobs, self._echoed)
            self._logprobs.offset = len(self._echoed)
        elif self._echoed is not None:
            self._logprobs.offset = len(self._echoed)
        if self.job.params.logprobs is None:
            return logprobs
        return joined(logprobs, self._logprobs.output(delta.logprobs))

    def speculative(self, delta: Delta) -> dict[str, Any]:
        """Which of a delta's tokens were drafted, for the page."""
        parts = [delta] if self._is_apart else self._by_token(delta)
        tokens = [
            {"text": part.text, "accepted": part.num_accepted > 0} for part in parts if part.text or part.token_ids
        ]
        nodes = {"num_draft_nodes": delta.num_nodes} if delta.num_nodes > delta.num_drafted else {}
        return {"num_drafted": delta.num_drafted, **nodes, "num_accepted": delta.num_accepted, "tokens": tokens}

    def apart(self, delta: Delta) -> list[Delta]:
        """A delta as deltas of one token each; their counts and texts add up to its own."""
        self._is_apart = True
        return self._by_token(delta)

    def _by_token(self, delta: Delta) -> list[Delta]:
        """A delta as deltas of one token each; the last one has the text that is left. Give it every delta once."""
        tokens, text, begin = delta.token_ids, delta.text, 0
        is_stop_token = bool(tokens) and tokens[-1] == delta.stop_reason
        lengths = [
            self._released(token, len(tokens) - i) for i, token in enumerate(tokens[:-1] if is_stop_token else tokens)
        ]
        if len(tokens) <= 1:
            return [delta]
        parts = []
        for part, length in zip(
            (part for step in delta.steps for part in _token_parts(step)), (*lengths, 0), strict=False
        ):
            parts.append(Delta((replace(part, text=text[begin : begin + length]),)))
            begin += length
        last = parts[-1].steps[0]
        parts[-1] = replace(delta, steps=(replace(last, text=last.text + text[begin:]),), rest="", prompt_logprobs=())
        parts[0] = replace(parts[0], prompt_logprobs=delta.prompt_logprobs)
        return parts

    def _released(self, token: int, num_left: int) -> int:
        """Characters that a token releases, by a stream like the engine's own; `num_left` tokens end with it."""
        if self._tokenizer is None:
            return 0
        if self._stream is None:
            params = self.job.params
            self._stream = self._tokenizer.stream(params.stop, skip_special_tokens=params.skip_special_tokens)
        if self._stream.stop is not None:
            return 0
        place = len(self.token_ids) - num_left
        return len(self._stream.feed([token], int(place < self.job.params.min_tokens - 1)).text)

    def _stop_text(self, stop_reason: int | str | None) -> str:
        if stop_reason is None or isinstance(stop_reason, str):
            return stop_reason or ""
        if self._tokenizer is None or self._tokenizer.is_silent(stop_reason, self._plan.skip_special):
            return ""
        return self._tokenizer.piece(stop_reason)

    def _tool_delta(self, delta: ToolDelta) -> dict[str, Any]:
        if delta.content:
            return {"content": delta.content}
        function = {"arguments": delta.arguments}
        if delta.name is None:
            return {"tool_calls": [{"index": delta.index, "function": function}]}
        assert self._plan.tools is not None, "only a plan of tools reads calls"
        call_id = self._plan.tools.call_id(delta.index, delta.name)
        call = {"index": delta.index, "id": call_id, "type": "function", "function": {"name": delta.name, **function}}
        return {"tool_calls": [call]}


def _token_parts(step: Emitted) -> Iterator[Emitted]:
    """A step token by token: an accepted one counts for itself, the refused ones for the step's last token."""
    kept = min(step.num_accepted, len(step.tokens))
    for i, token in enumerate(step.tokens):
        accepted, is_last = int(i < kept), i == len(step.tokens) - 1
        yield replace(
            step,
            tokens=(token,),
            num_drafted=accepted + (step.num_drafted - kept if is_last else 0),
            num_accepted=accepted,
            num_nodes=accepted + (step.num_nodes - kept if is_last else 0),
            ranks=step.ranks if is_last else (),
            logprobs=step.logprobs[i : i + 1],
        )

"""One choice of an answer while it grows: its text, tokens, calls, and which tokens were drafted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specdec_cli.engine.jobs.records import StepCounts
from specdec_cli.events import SpeculativeCounts
from specdec_cli.serve.answer.logprobs import CompletionLogprobs, TokenWords, joined
from specdec_cli.serve.request.reasoning import ThoughtCounter
from specdec_cli.serve.tools.calls import ToolDelta

if TYPE_CHECKING:
    from specdec_cli.engine.jobs.records import Delta, Job
    from specdec_cli.serve.request.prepare import ResponsePlan
    from specdec_cli.text.stream import TextStream
    from specdec_cli.text.tokenizer import Tokenizer


class Choice:
    """Folds a job's deltas.

    Args:
        job: what is decoded.
        echoed: text before the output's; None without an echo.
        plan: of the answer.
        tokenizer: of the model.
    """

    def __init__(self, job: Job, echoed: str | None, plan: ResponsePlan, tokenizer: Tokenizer | None) -> None:
        self.job = job
        self.counts = SpeculativeCounts()
        self.token_ids: list[int] = []
        self.num_cached_tokens: int | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._plan = plan
        self._tokenizer = tokenizer
        self._words = TokenWords(tokenizer, plan.as_token_ids, plan.skip_special)
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

    def observe(self, delta: Delta) -> None:
        """Count what a step gave; of each delta once, before it is taken apart."""
        begin = 0
        for step in delta.counts:
            if (
                self.token_ids or step.num_drafted
            ):  # the first token, which a prompt's forward gives, belongs to no step
                self.counts.add_step(*step)
            self.token_ids += delta.token_ids[begin : begin + step.num_tokens]
            begin += step.num_tokens
        if self._counter is not None:
            self._counter.count(delta.token_ids, is_last=delta.finish_reason is not None)
        if delta.num_cached_tokens is not None:
            self.num_cached_tokens = delta.num_cached_tokens
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    def text(self, delta: Delta) -> str:
        """The text that a delta adds: the echo first, the stop string last if requested."""
        text, self._echoed = (self._echoed or "") + delta.text, None
        if delta.finish_reason is not None and self._plan.include_stop:
            text += self._stop_text(delta.stop_reason)
        return text

    def deltas(self, delta: Delta) -> list[dict[str, Any]]:
        """OpenAI's `delta` objects for what a delta adds to a chat message."""
        text, found = self.text(delta), []
        if self._thoughts is not None:
            thought, text = self._split(text, is_last=delta.finish_reason is not None)
            found = [{"reasoning_content": thought, "reasoning": thought}] if thought else []
        if self._parser is None:
            return [*found, *([{"content": text}] if text else [])]
        if not self._has_answer:
            return found
        calls = self._parser.feed(text) + (self._parser.finish() if delta.finish_reason is not None else [])
        if delta.finish_reason == "stop" and self._parser.num_calls:
            self.finish_reason = "tool_calls"
        return [*found, *(self._tool_delta(one) for one in calls)]

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Tokens of its thinking so far; None where thinking is not read."""
        return None if self._counter is None else self._counter.num_tokens

    def _split(self, text: str, is_last: bool) -> tuple[str, str]:
        """The next text as thought, where that is shown, and answer."""
        assert self._thoughts is not None, "only the text of a model whose thinking is read is split"
        thought, said = self._thoughts.feed(text)
        if is_last:
            rest = self._thoughts.finish()
            thought, said = thought + rest[0], said + rest[1]
        self._has_answer |= bool(said)
        is_shown = self._plan.reasoning is not None and self._plan.reasoning.is_shown
        return thought if is_shown else "", said

    def logprobs(self, delta: Delta) -> dict[str, Any] | None:
        """The `logprobs` of a delta's tokens, and of an echoed prompt's before them."""
        if self._plan.kind == "chat":
            return None if self.job.params.logprobs is None else self._words.chat(delta.logprobs)
        found: dict[str, Any] | None = None
        if self._echoed is not None and self.job.prompt_logprobs is not None:
            found = self._logprobs.prompt(self.job.token_ids, delta.prompt_logprobs, self._echoed)
            self._logprobs.offset = len(self._echoed)
        elif self._echoed is not None:
            self._logprobs.offset = len(self._echoed)
        if self.job.params.logprobs is None:
            return found
        return joined(found, self._logprobs.output(delta.logprobs))

    def speculative(self, delta: Delta) -> dict[str, Any]:
        """Which of a delta's tokens were drafted, for the page."""
        texts = ([delta.text] if delta.text or delta.token_ids else []) if self._is_apart else self._pieces(delta)
        is_accepted = [bool(one.num_accepted) for one in _by_token(delta)] or [False] * len(texts)
        tokens = [{"text": text, "accepted": was} for text, was in zip(texts, is_accepted, strict=False)]
        nodes = {"num_draft_nodes": delta.num_nodes} if delta.num_nodes > delta.num_drafted else {}
        return {"num_drafted": delta.num_drafted, **nodes, "num_accepted": delta.num_accepted, "tokens": tokens}

    def apart(self, delta: Delta) -> Iterator[Delta]:
        """A delta as deltas of one token each; their counts and texts add up to its own."""
        num = len(delta.token_ids)
        texts = self._pieces(delta)
        self._is_apart = True
        if num <= 1:
            yield delta
            return
        for i, (text, its) in enumerate(zip(texts, _by_token(delta), strict=True)):
            is_last = i == num - 1
            yield replace(
                delta,
                text=text,
                token_ids=delta.token_ids[i : i + 1],
                num_drafted=its.num_drafted,
                num_accepted=its.num_accepted,
                num_nodes=its.num_nodes,
                ranks=its.ranks,
                steps=(),
                logprobs=delta.logprobs[i : i + 1],
                finish_reason=delta.finish_reason if is_last else None,
                stop_reason=delta.stop_reason if is_last else None,
                prompt_logprobs=delta.prompt_logprobs if i == 0 else (),
            )

    def _pieces(self, delta: Delta) -> list[str]:
        """A delta's text by its tokens; the last one has what is left. Every delta must pass, in order, once."""
        if not delta.token_ids:
            return [delta.text] if delta.text else []
        lengths = [len(self._fed(i, token, delta)) for i, token in enumerate(delta.token_ids)]
        texts, begin = [], 0
        for length in lengths[:-1]:
            texts.append(delta.text[begin : begin + length])
            begin += length
        return [*texts, delta.text[begin:]]

    def _fed(self, i: int, token: int, delta: Delta) -> str:
        """Text that a token releases, by a stream like the engine's own."""
        if self._tokenizer is None:
            return ""
        if self._stream is None:
            params = self.job.params
            self._stream = self._tokenizer.stream(params.stop, skip_special_tokens=params.skip_special_tokens)
        is_stop_token = i == len(delta.token_ids) - 1 and token == delta.stop_reason
        if is_stop_token or self._stream.stop is not None:
            return ""
        place = len(self.token_ids) - len(delta.token_ids) + i
        return self._stream.feed([token], int(place < self.job.params.min_tokens - 1)).text

    def _stop_text(self, stop_reason: int | str | None) -> str:
        if stop_reason is None or isinstance(stop_reason, str):
            return stop_reason or ""
        if self._tokenizer is None or self._tokenizer.is_silent(stop_reason, self._plan.skip_special):
            return ""
        return self._tokenizer.piece(stop_reason)

    def _tool_delta(self, one: ToolDelta) -> dict[str, Any]:
        if one.content:
            return {"content": one.content}
        function = {"arguments": one.arguments}
        if one.name is None:
            return {"tool_calls": [{"index": one.index, "function": function}]}
        assert self._plan.tools is not None, "only a plan of tools reads calls"
        call_id = self._plan.tools.call_id(one.index, one.name)
        call = {"index": one.index, "id": call_id, "type": "function", "function": {"name": one.name, **function}}
        return {"tool_calls": [call]}


def _by_token(delta: Delta) -> list[StepCounts]:
    """Each token's share of its step: an accepted one counts for itself, the refused ones for the step's last token."""
    found = []
    for step in delta.counts:
        kept = min(step.num_accepted, step.num_tokens)
        own = [StepCounts(1, int(i < kept), int(i < kept), int(i < kept), ()) for i in range(step.num_tokens)]
        own[-1] = own[-1]._replace(
            num_drafted=own[-1].num_drafted + step.num_drafted - kept,
            num_nodes=own[-1].num_nodes + step.num_nodes - kept,
            ranks=step.ranks,
        )
        found += own
    return found

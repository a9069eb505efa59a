"""Deltas become the answer: one document, or the chunks of a stream, in OpenAI's shapes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from specdec_cli import __version__
from specdec_cli.sampling.grammar import GrammarError
from specdec_cli.serve.answer.acceptance import sglang_details, vllm_metrics
from specdec_cli.serve.answer.choice import Choice
from specdec_cli.serve.answer.logprobs import joined
from specdec_cli.serve.errors import ApiError, as_api_error

if TYPE_CHECKING:
    from specdec_cli.engine.jobs.records import Delta
    from specdec_cli.serve.request.prepare import Prepared

DONE = b"data: [DONE]\n\n"
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


class CompletionAnswer:
    """Folds the deltas of one HTTP request; not thread-safe, lives on the event loop.

    Non-streaming: `observe(i, delta)` for every delta, then `document()`.
    Streaming: `opening()`, then `chunks(i, delta)` for every delta, then `closing()`; each gives JSON documents, sent
    with `event`, and `end` is sent last; `failure` tells of an error in between.

    Args:
        prepared: the request's jobs and plan; delta i is of job i.
        per_token: one chunk for each token (`--stream-interval 1`) instead of one for each step.
        created: Unix seconds; now if not given.
    """

    def __init__(self, prepared: Prepared, per_token: bool = False, created: int | None = None) -> None:
        self._plan = plan = prepared.plan
        self._options = plan.request.stream_options
        self._per_token = per_token
        self._deltas: list[list[Delta]] = [[] for _ in prepared.jobs]
        self._told_prompts: set[int] = set()  # completions' choices whose prompt's token ids are out
        n = plan.n
        self._choices = [
            Choice(job, plan.echoed[i // n] if plan.echoed else None, plan) for i, job in enumerate(prepared.jobs)
        ]
        prefix, kind = ("chatcmpl", "chat.completion") if plan.is_chat else ("cmpl", "text_completion")
        self._head = {
            "id": f"{prefix}-{prepared.jobs[0].request_id}",
            "object": f"{kind}.chunk" if plan.is_chat and plan.request.stream else kind,
            "created": int(time.time()) if created is None else created,
            "model": plan.model.names[0],
            "system_fingerprint": f"specdec-{__version__}",
        }

    @property
    def streams(self) -> bool:
        """Whether the client wants chunks as they come."""
        return self._plan.request.stream is True

    @property
    def is_done(self) -> bool:
        """Whether every choice has its finish reason."""
        return all(choice.finish_reason is not None for choice in self._choices)

    def observe(self, index: int, delta: Delta) -> None:
        """Take what a step gave choice `index`.

        Raises:
            ApiError: the delta carries an error.
        """
        self._count(index, delta)
        self._deltas[index].append(delta)

    def document(self) -> dict[str, Any]:
        """The whole answer; every choice must have ended."""
        assert self.is_done, "an answer is whole when every choice has ended"
        choices = [self._whole(index) for index in range(len(self._choices))]
        return {
            **self._head,
            **self._prompt_ids(),
            "choices": choices,
            "usage": self._usage(),
            "metrics": self._metrics(),
            **self._sglext(),
        }

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before any delta: a chat's role."""
        if not self._plan.is_chat:
            return []
        first = {"role": "assistant", "content": ""}
        return [
            self._chunk({"index": i, "delta": first, "logprobs": None, "finish_reason": None}) | self._prompt_ids()
            for i in range(len(self._choices))
        ]

    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Chunks of one delta of choice `index`; none where it shows nothing.

        Raises:
            ApiError: the delta carries an error; send its `body()` as the last event.
        """
        self._count(index, delta)
        parts = self._choices[index].apart(delta) if self._per_token else [delta]
        return [self._chunk(choice) for part in parts for choice in self._streamed(index, part)]

    def closing(self) -> list[dict[str, Any]]:
        """Chunks after the last delta: SGLang's extension and usage, if asked for."""
        sglext = self._sglext()
        extra = [{**self._head, "choices": [], **sglext}] if sglext else []
        if not (self._options and self._options.include_usage):
            return extra
        return [*extra, {**self._head, "choices": [], "usage": self._usage(), "metrics": self._metrics()}]

    def event(self, document: Mapping[str, Any]) -> bytes:
        """A chunk as a server-sent event."""
        return sse(document)

    def failure(self, error: ApiError) -> bytes:
        """The event of an error that ended a stream."""
        return sse(error.body())

    end: bytes = DONE
    """The last bytes of a stream."""

    def refusal(self, error: BaseException) -> ApiError:
        """The answer to a request that an error ended; where its grammar did, that field is named."""
        of_grammar = error if isinstance(error, GrammarError) else error.__cause__
        if isinstance(of_grammar, GrammarError):
            return as_api_error(of_grammar, self._plan.constraint)
        return as_api_error(error)

    def _count(self, index: int, delta: Delta) -> None:
        if delta.error is not None:
            raise self.refusal(delta.error) from delta.error
        self._choices[index].observe(delta)

    def _whole(self, index: int) -> dict[str, Any]:
        """A choice of the document."""
        choice, deltas = self._choices[index], self._deltas[index]
        logprobs: dict[str, Any] | None = None
        texts, message = [], _Message(has_reasoning=self._plan.reasoning is not None)
        for delta in deltas:
            more = choice.logprobs(delta)
            logprobs = logprobs if more is None else joined_choice(logprobs, more)
            if self._plan.is_chat:
                message.add(choice.deltas(delta))
            else:
                texts.append(choice.text(delta))
        body: dict[str, Any] = {"message": message.as_dict()} if self._plan.is_chat else {"text": "".join(texts)}
        ends = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        return {"index": index, **body, "logprobs": logprobs, **ends, **self._token_ids(index, choice.token_ids)}

    def _streamed(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """A delta as choices of chunks: one, or one for each piece of a tool call."""
        choice, plan = self._choices[index], self._plan
        logprobs = choice.logprobs(delta)
        details = {"speculative": choice.speculative(delta)} if plan.details else {}
        bodies: list[dict[str, Any]]
        nothing: dict[str, Any]
        if plan.is_chat:
            bodies, nothing = [{"delta": part} for part in choice.deltas(delta)], {"delta": {}}
        else:
            text = choice.text(delta)
            bodies, nothing = ([{"text": text}] if text else []), {"text": ""}
        has_ended = delta.finish_reason is not None
        says_more = bool(delta.token_ids) and (logprobs is not None or plan.details or plan.request.return_token_ids)
        if not bodies and (has_ended or says_more):
            bodies = [nothing]
        choices: list[dict[str, Any]] = [
            {"index": index, **body, "logprobs": None, "finish_reason": None} for body in bodies
        ]
        if choices:
            choices[0] |= {"logprobs": logprobs, **details, **self._token_ids(index, delta.token_ids)}
        if has_ended:
            choices[-1] |= {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        return choices

    def _token_ids(self, index: int, token_ids: Iterable[int]) -> dict[str, Any]:
        if not self._plan.request.return_token_ids:
            return {}
        if self._plan.is_chat or index in self._told_prompts:
            return {"token_ids": list(token_ids)}
        self._told_prompts.add(index)
        prompt = self._plan.prompts[index // self._plan.n]
        return {"token_ids": list(token_ids), "prompt_token_ids": list(prompt)}

    def _prompt_ids(self) -> dict[str, Any]:
        """A conversation's token ids, beside all choices; a completion's stand with its first token ids."""
        is_asked = self._plan.request.return_token_ids and self._plan.is_chat
        return {"prompt_token_ids": list(self._plan.prompts[0])} if is_asked else {}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head, "choices": [choice]}
        if self._options and self._options.continuous_usage_stats:
            chunk["usage"] = self._usage()
        elif self._options and self._options.include_usage:
            chunk["usage"] = None
        return chunk

    def _usage(self) -> dict[str, Any]:
        num_prompt = sum(map(len, self._plan.prompts))
        num_output = sum(len(choice.token_ids) for choice in self._choices)
        accepted = sum(choice.counts.num_accepted_tokens for choice in self._choices)
        drafted = sum(choice.counts.num_draft_tokens for choice in self._choices)
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }
        thought = [choice.num_reasoning_tokens for choice in self._choices if choice.num_reasoning_tokens is not None]
        if thought:
            usage["completion_tokens_details"]["reasoning_tokens"] = sum(thought)
        # A prompt's first choice says what was there before the request; the others share what that one has fed.
        firsts = self._choices[:: self._plan.n]
        cached = [choice.num_cached_tokens for choice in firsts if choice.num_cached_tokens is not None]
        if cached:
            usage["prompt_tokens_details"] = {"cached_tokens": sum(cached)}
        return usage

    def _metrics(self) -> dict[str, Any]:
        """Acceptance of the request's only choice, by vLLM's field names; null for several, and if the server has no k.

        A choice that decoded without a draft has counts of 0.
        """
        level, k = self._plan.model.serve.per_request_spec_decode_metrics, self._k(self._choices[0])
        is_told = level != "none" and len(self._choices) == 1 and (k or self._plan.model.num_speculative_tokens)
        figures = vllm_metrics(self._choices[0], k, is_detailed=level == "detailed") if is_told else None
        return {"speculative_decoding": figures}

    def _sglext(self) -> dict[str, Any]:
        """SGLang's extension, if the request asks for it."""
        if not self._plan.request.return_spec_tokens_details:
            return {}
        return {"sglext": sglang_details(self._choices, [self._k(choice) for choice in self._choices])}

    def _k(self, choice: Choice) -> int:
        """Most tokens of a choice's drafts: the request's own, else the server's."""
        own = choice.job.num_speculative_tokens
        return self._plan.model.num_speculative_tokens if own is None else own


class _Message:
    """A chat's message, joined from deltas."""

    def __init__(self, has_reasoning: bool) -> None:
        self._has_reasoning = has_reasoning
        self._thought = ""
        self._content = ""
        self._calls: list[dict[str, Any]] = []

    def add(self, deltas: Iterable[Mapping[str, Any]]) -> None:
        for delta in deltas:
            self._thought += delta.get("reasoning_content", "")
            self._content += delta.get("content", "")
            for call in delta.get("tool_calls", ()):
                function = call["function"]
                if "id" in call:
                    self._calls.append({"id": call["id"], "type": "function", "function": dict(function)})
                else:
                    self._calls[call["index"]]["function"]["arguments"] += function["arguments"]

    def as_dict(self) -> dict[str, Any]:
        content = self._content if self._content or not (self._calls or self._thought) else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._has_reasoning:
            message |= dict.fromkeys(("reasoning_content", "reasoning"), self._thought or None)
        return {**message, "tool_calls": self._calls} if self._calls else message


def joined_choice(first: dict[str, Any] | None, second: dict[str, Any]) -> dict[str, Any]:
    """Two `logprobs` of one choice, of either API."""
    if first is not None and "content" in second:
        return {**first, "content": first["content"] + second["content"]}
    return joined(first, second)


def compact(document: Mapping[str, Any]) -> bytes:
    """JSON without needless whitespace, UTF-8."""
    return _ENCODER.encode(document).encode("utf-8", "replace")


def sse(document: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + compact(document) + b"\n\n"

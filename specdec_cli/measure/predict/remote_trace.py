"""A trace through servers that hold the models: the target's text with its log-probabilities, scored by the draft.

The target decodes each prompt once and gives its tokens' ids and log-probabilities. The draft's server reads the same
ids and gives each token's log-probability (`echo` with `logprobs`), which is log q; the token is q's likeliest where
nothing in `top_logprobs` is above it. Nothing here needs weights or a tokenizer.

Servers give log-probabilities before temperature, top-k and so on. So p and q are known at temperature 1 without any
further processing, and at temperature 0, where they are one-hot.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specdec_cli.engine.prompts import PromptRow
from specdec_cli.errors import RunError, UsageError
from specdec_cli.measure.endpoint.endpoint import Endpoint
from specdec_cli.measure.endpoint.request_fields import seed_of
from specdec_cli.measure.predict.draft_trace import ModelTrace
from specdec_cli.measure.predict.trace import Trace, TracedPrompt
from specdec_cli.quantities import counted
from specdec_cli.recipe.schema import Sampling
from specdec_cli.sampling.params import SamplingParams

_TIE = 1e-6  # nats within which two log-probabilities are the same number, printed twice
_PROCESSED = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
_ROUNDED_UP = 0.01  # nats above 0 that the logarithm of 1 may be in low precision
_LARGEST_ID = 2**31 - 1
_WRONG_KIND = (AttributeError, LookupError, OverflowError, TypeError, ValueError)
_NO_TEXT = re.compile(r"bytes:|token_id:\d|.*\ufffd")
_FEWEST_TOKENS = 8  # of which half must be the same text, to tell servers with one tokenizer from others
Watch = Callable[[int, int], None]


def check_sampling(sampling: Sampling) -> None:
    """Refuse sampling whose probabilities no server tells.

    Raises:
        UsageError: a temperature other than 0 and 1, or anything that changes the distribution.
    """
    if sampling.temperature not in (0, 1):
        message = (
            f"servers give probabilities at temperature 1, and `sampling.temperature` is `{sampling.temperature:g}`"
        )
        raise UsageError(message, "predict at --temperature 0 or 1")
    neutral = Sampling()
    for name in _PROCESSED:
        if getattr(sampling, name) != getattr(neutral, name):
            message = f"servers give probabilities before `sampling.{name}` applies, so acceptance cannot be predicted"
            raise UsageError(message, "leave it out of the recipe")


@dataclass(frozen=True, slots=True)
class _DecodedAnswer:
    """A target's answer: token ids of a prompt and its output, and the output's log-probabilities and texts."""

    prompt: list[int]
    output: list[int]
    logprobs: list[float]
    texts: list[str]


@dataclass(frozen=True, slots=True)
class RemoteTracer:
    """Traces prompts through servers.

    Args:
        target: the target's server, open.
        model: the name that it is asked for.
        rows: the prompts.
        sampling: of every prompt, checked by `check_sampling`.
        chat: whether prompts are messages.
        concurrency: requests at a time.
        beyond: tokens to decode behind each output's end, for engines that draft past it (`DRAFTS_PAST_END`).

    Attributes:
        texts: of each prompt's output tokens, once the target is traced.
    """

    target: Endpoint
    model: str
    rows: Sequence[PromptRow]
    sampling: Sampling
    chat: bool
    concurrency: int
    beyond: int = 0
    texts: list[list[str]] = field(init=False, default_factory=list)

    async def trace_target(self, watch: Watch) -> Trace:
        """Let the target decode every prompt.

        Raises:
            EndpointError: a request failed.
            RunError: the server gives no token ids or no log-probabilities, or answers nothing.
        """
        answers: list[_DecodedAnswer] = await self._all([self._decode(row) for row in self.rows], watch)
        prompts = [self._traced(row, answer) for row, answer in zip(self.rows, answers, strict=True)]
        if all(len(prompt.output) < 2 for prompt in prompts):  # a step begins behind the first token
            message = f"`{self.target.address.root}` gave no answer of two tokens or more, so nothing can be predicted"
            raise RunError(message, "raise -n, or give other prompts")
        self.texts[:] = [answer.texts for answer in answers]
        is_greedy = self.sampling.temperature == 0
        log_p = [0.0 if is_greedy else value for answer in answers for value in answer.logprobs]
        highest = max((token for prompt in prompts for token in (*prompt.token_ids, *prompt.output)), default=0)
        return Trace(self.model, highest + 1, (), None, prompts, np.array(log_p, dtype=np.float32))

    def _traced(self, row: PromptRow, answer: _DecodedAnswer) -> TracedPrompt:
        most, longest = self._most(row), len(answer.prompt) + self._most(row) + self.beyond
        beyond = max(len(answer.output) - most, 0)
        tokens = tuple(answer.prompt), tuple(answer.output)
        return TracedPrompt(*tokens, longest, self._params(row), row.category, beyond)

    async def trace_draft(self, trace: Trace, draft: Endpoint, model: str, watch: Watch) -> ModelTrace:
        """Let the draft's server score the target's text.

        Args:
            trace: the target's.
            draft: the draft's server, open.
            model: the name that it is asked for.
            watch: called with the prompts done and in all.

        Raises:
            EndpointError: a request failed.
            RunError: the server scores no prompts, or has another tokenizer.
        """
        scored: list[_ScoredAnswer] = await self._all([_score(draft, model, prompt) for prompt in trace.prompts], watch)
        _check_tokenizer(draft.address.root, self.texts, [answer.texts for answer in scored])
        log_q = np.array([value for answer in scored for value in answer.log_q], dtype=np.float32)
        is_argmax = np.array([is_top for answer in scored for is_top in answer.is_argmax], dtype=np.bool_)
        return ModelTrace(log_q, is_argmax, np.zeros(len(log_q), dtype=np.bool_), None)

    async def _all(self, asked: Sequence[Awaitable[Any]], watch: Watch) -> list[Any]:
        places, done = asyncio.Semaphore(self.concurrency), 0

        async def limited(work: Awaitable[Any]) -> Any:
            nonlocal done
            async with places:
                reply = await work
            done += 1
            watch(done, len(asked))
            return reply

        tasks = [asyncio.create_task(limited(work)) for work in asked]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _decode(self, row: PromptRow) -> _DecodedAnswer:
        """The target's answer to a prompt."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self._most(row) + self.beyond,
            "temperature": self.sampling.temperature,
            "seed": self._params(row).seed,
            "return_token_ids": True,
        }
        for name in ("ignore_eos", "min_tokens"):
            if getattr(self.sampling, name):
                body[name] = getattr(self.sampling, name)
        for name in ("stop", "stop_token_ids"):
            if getattr(self.sampling, name):
                body[name] = list(getattr(self.sampling, name))
        if self.chat:
            body |= {"messages": row.chat(), "logprobs": True, "top_logprobs": 0}
            reply = await self.target.whole("/chat/completions", body)
        else:
            body |= {"prompt": row.prompt, "logprobs": 1}
            reply = await self.target.whole("/completions", body)
        root = self.target.address.root
        try:
            return _read_answer(reply, root)
        except _WRONG_KIND:
            raise _wrong_figures(root) from None

    def _most(self, row: PromptRow) -> int:
        return row.max_new_tokens or self.sampling.max_new_tokens

    def _params(self, row: PromptRow) -> SamplingParams:
        seed = seed_of(row, self.sampling.seed)
        return SamplingParams(
            max_new_tokens=self._most(row), temperature=self.sampling.temperature, seed=seed, ignore_eos=True
        )


def _read_answer(reply: dict[str, Any], root: str) -> _DecodedAnswer:
    choice = reply["choices"][0]
    prompt = choice.get("prompt_token_ids") or reply.get("prompt_token_ids")
    output = choice.get("token_ids")
    if not prompt or output is None:
        message = f"`{root}` gives no token ids (`return_token_ids`)"
        raise RunError(message, "vLLM (0.10.2 and later) and specdec give them")
    logprobs = choice.get("logprobs") or {}
    values, texts = logprobs.get("token_logprobs"), logprobs.get("tokens")
    if values is None:
        content = logprobs.get("content") or ()
        values, texts = ([item.get(key) for item in content] for key in ("logprob", "token"))
    if len(values) != len(output):
        raise RunError(
            f"`{root}` gives {len(values)} log-probabilities for {counted(len(output), 'token')}", "check its log"
        )
    ids = [[_token_id(item) for item in some] for some in (prompt, output)]
    return _DecodedAnswer(ids[0], ids[1], list(map(_logprob, values)), texts or [])


@dataclass(frozen=True, slots=True)
class _ScoredAnswer:
    """Of each output token: its log-probability under the draft, whether it is the likeliest one, and its text."""

    log_q: list[float]
    is_argmax: list[bool]
    texts: list[str]


async def _score(draft: Endpoint, model: str, prompt: TracedPrompt) -> _ScoredAnswer:
    """The draft's reading of an output."""
    body = {
        "model": model,
        "prompt": [*prompt.token_ids, *prompt.output],
        "max_tokens": 1,  # vLLM refuses 0; the token behind the text is left out
        "temperature": 0,
        "echo": True,
        "logprobs": 1,
    }
    reply = await draft.whole("/completions", body)
    root = draft.address.root
    try:
        return _read_scores(reply, root, len(prompt.token_ids), len(prompt.token_ids) + len(prompt.output))
    except _WRONG_KIND:
        raise _wrong_figures(root) from None


def _read_scores(reply: dict[str, Any], root: str, begin: int, end: int) -> _ScoredAnswer:
    logprobs = reply["choices"][0].get("logprobs") or {}
    values, best = logprobs.get("token_logprobs") or [], logprobs.get("top_logprobs") or []
    if len(values) < end or len(best) < end or any(value is None for value in values[begin:end]):
        message = f"`{root}` does not score the prompt's tokens (`echo` with `logprobs`)"
        raise RunError(message, "vLLM and specdec do; llama.cpp does not")
    log_q = list(map(_logprob, values[begin:end]))
    tops = [_is_top(value, top) for value, top in zip(log_q, best[begin:end], strict=True)]
    return _ScoredAnswer(log_q, tops, (logprobs.get("tokens") or [])[begin:end])


def _is_top(value: float, alternatives: Any) -> bool:
    highest = max((_logprob(logprob) for logprob in (alternatives or {}).values()), default=value)
    return bool(value >= highest - _TIE)


def _token_id(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST_ID:
        raise ValueError("not the id of a token")
    return value


def _logprob(value: Any) -> float:
    number = float(value)
    if not number <= _ROUNDED_UP:  # nor is NaN
        raise ValueError("not the logarithm of a probability")
    return number


def _wrong_figures(root: str) -> RunError:
    message = f"`{root}` answers with token ids or log-probabilities that are none"
    return RunError(message, "it needs `return_token_ids` and `logprobs` as vLLM and specdec give them")


def _check_tokenizer(root: str, written: Sequence[Sequence[str]], read: Sequence[Sequence[str]]) -> None:
    """Refuse a draft's server that reads the target's token ids as other text.

    Servers may show spaces in another way, so a few tokens may differ. Parts of a letter and tokens that are shown by
    their ids do not count.
    """
    pairs = [
        (str(ours).strip(), str(theirs).strip())
        for our_texts, their_texts in zip(written, read, strict=True)
        for ours, theirs in zip(our_texts, their_texts, strict=False)  # one of them may give no texts
    ]
    readable = [pair for pair in pairs if all(text and not _NO_TEXT.match(text) for text in pair)]
    differing = [(ours, theirs) for ours, theirs in readable if ours != theirs]
    if len(readable) >= _FEWEST_TOKENS and 2 * len(differing) >= len(readable):
        ours, theirs = differing[0]
        message = (
            f"`{root}` has another tokenizer than the target's server: it reads `{theirs}` where that wrote `{ours}`"
        )
        raise RunError(message, "name the server of a draft with the target's tokenizer")

"""A trace through servers that hold the models: the target's text with its log-probabilities, scored by the draft.

The target decodes each prompt once and gives its tokens' ids and log-probabilities. The draft's server reads the same
ids and gives each token's log-probability (`echo` with `logprobs`), which is log q; the token is q's likeliest where
nothing in `top_logprobs` is above it. Nothing here needs weights or a tokenizer.

Servers give log-probabilities before temperature, top-k and so on. So p and q are known at temperature 1 without any
further processing, and at temperature 0, where they are one-hot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdec_cli.engine.prompts import PromptRow
from specdec_cli.errors import RunError, UsageError
from specdec_cli.measure.endpoint.endpoint import Endpoint
from specdec_cli.measure.endpoint.request_fields import seed_of
from specdec_cli.measure.predict.draft_trace import ModelTrace
from specdec_cli.measure.predict.trace import Trace, TracedPrompt
from specdec_cli.recipe.schema import Sampling
from specdec_cli.sampling.params import SamplingParams

_TIE = 1e-6  # nats within which two log-probabilities are the same number, printed twice
_PROCESSED = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
Watch = Callable[[int, int], None]


def check_sampling(sampling: Sampling) -> None:
    """Refuse sampling whose probabilities no server tells.

    Raises:
        UsageError: a temperature other than 0 and 1, or anything that changes the distribution.
    """
    if sampling.temperature not in (0, 1):
        said = f"servers give probabilities at temperature 1, and `sampling.temperature` is `{sampling.temperature:g}`"
        raise UsageError(said, "predict at --temperature 0 or 1")
    neutral = Sampling()
    for name in _PROCESSED:
        if getattr(sampling, name) != getattr(neutral, name):
            said = f"servers give probabilities before `sampling.{name}` applies, so acceptance cannot be predicted"
            raise UsageError(said, "leave it out of the recipe")


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
    """

    target: Endpoint
    model: str
    rows: Sequence[PromptRow]
    sampling: Sampling
    chat: bool
    concurrency: int
    beyond: int = 0

    async def trace_target(self, watch: Watch) -> Trace:
        """Let the target decode every prompt.

        Raises:
            EndpointError: a request failed.
            RunError: the server gives no token ids or no log-probabilities.
        """
        answers = await self._all([self._decode(row) for row in self.rows], watch)
        prompts = [
            self._traced(row, prompt, output) for row, (prompt, output, _) in zip(self.rows, answers, strict=True)
        ]
        is_greedy = self.sampling.temperature == 0
        log_p = [0.0 if is_greedy else value for _, _, logprobs in answers for value in logprobs]
        highest = max((token for prompt in prompts for token in (*prompt.token_ids, *prompt.output)), default=0)
        return Trace(self.model, highest + 1, (), None, prompts, np.array(log_p, dtype=np.float32))

    def _traced(self, row: PromptRow, prompt: Sequence[int], output: Sequence[int]) -> TracedPrompt:
        most = self._most(row)
        return TracedPrompt(
            tuple(prompt),
            tuple(output),
            len(prompt) + most + self.beyond,
            self._params(row),
            row.category,
            beyond=max(len(output) - most, 0),
        )

    async def trace_draft(self, trace: Trace, draft: Endpoint, model: str, watch: Watch) -> ModelTrace:
        """Let the draft's server score the target's text.

        Args:
            trace: the target's.
            draft: the draft's server, open.
            model: the name that it is asked for.
            watch: told how many of all prompts are done.

        Raises:
            EndpointError: a request failed.
            RunError: the server scores no prompts.
        """
        scored = await self._all([_score(draft, model, prompt) for prompt in trace.prompts], watch)
        log_q = np.array([value for one in scored for value, _ in one], dtype=np.float32)
        is_argmax = np.array([is_top for one in scored for _, is_top in one], dtype=np.bool_)
        return ModelTrace(log_q, is_argmax, np.zeros(len(log_q), dtype=np.bool_), None)

    async def _all(self, asked: Sequence[Awaitable[Any]], watch: Watch) -> list[Any]:
        places, done = asyncio.Semaphore(self.concurrency), 0

        async def one(work: Awaitable[Any]) -> Any:
            nonlocal done
            async with places:
                found = await work
            done += 1
            watch(done, len(asked))
            return found

        tasks = [asyncio.create_task(one(work)) for work in asked]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _decode(self, row: PromptRow) -> tuple[list[int], list[int], list[float]]:
        """Token ids of a prompt and its output, and the output's log-probabilities."""
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
            found = await self.target.whole("/chat/completions", body)
        else:
            body |= {"prompt": row.prompt, "logprobs": 1}
            found = await self.target.whole("/completions", body)
        return _read_answer(found, self.target.address.root)

    def _most(self, row: PromptRow) -> int:
        return row.max_new_tokens or self.sampling.max_new_tokens

    def _params(self, row: PromptRow) -> SamplingParams:
        seed = seed_of(row, self.sampling.seed)
        return SamplingParams(
            max_new_tokens=self._most(row), temperature=self.sampling.temperature, seed=seed, ignore_eos=True
        )


def _read_answer(found: dict[str, Any], root: str) -> tuple[list[int], list[int], list[float]]:
    choice = found["choices"][0]
    prompt = choice.get("prompt_token_ids") or found.get("prompt_token_ids")
    output = choice.get("token_ids")
    if not prompt or output is None:
        said = f"`{root}` gives no token ids (`return_token_ids`)"
        raise RunError(said, "vLLM (0.10.2 and later) and specdec give them")
    logprobs = choice.get("logprobs") or {}
    values = logprobs.get("token_logprobs")
    if values is None:
        values = [one["logprob"] for one in logprobs.get("content") or ()]
    if len(values) != len(output):
        raise RunError(f"`{root}` gives {len(values)} log-probabilities for {len(output)} tokens", "check its log")
    return list(prompt), list(output), [float(value) for value in values]


async def _score(draft: Endpoint, model: str, prompt: TracedPrompt) -> list[tuple[float, bool]]:
    """Of each output token: its log-probability under the draft, and whether it is the likeliest one."""
    body = {
        "model": model,
        "prompt": [*prompt.token_ids, *prompt.output],
        "max_tokens": 1,  # vLLM refuses 0; the token behind the text is left out
        "temperature": 0,
        "echo": True,
        "logprobs": 1,
    }
    found = await draft.whole("/completions", body)
    logprobs = found["choices"][0].get("logprobs") or {}
    values, best = logprobs.get("token_logprobs") or [], logprobs.get("top_logprobs") or []
    begin, end = len(prompt.token_ids), len(prompt.token_ids) + len(prompt.output)
    if len(values) < end or len(best) < end or any(value is None for value in values[begin:end]):
        said = f"`{draft.address.root}` does not score the prompt's tokens (`echo` with `logprobs`)"
        raise RunError(said, "vLLM and specdec do; llama.cpp does not")
    return [(float(value), _is_top(value, top)) for value, top in zip(values[begin:end], best[begin:end], strict=True)]


def _is_top(value: float, alternatives: Any) -> bool:
    highest = max((float(one) for one in (alternatives or {}).values()), default=value)
    return bool(value >= highest - _TIE)

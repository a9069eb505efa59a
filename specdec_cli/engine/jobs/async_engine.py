"""The engine for asyncio: requests from any number of tasks are decoded together on one thread."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any, Self

from specdec_cli.call_checks import checked_call
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.jobs.bridge import Bridge
from specdec_cli.engine.jobs.records import Delta, Job
from specdec_cli.engine.loading import LoadProgress, loads_like
from specdec_cli.engine.outputs import Output
from specdec_cli.engine.requests import Prompt, as_many, params_of, spread
from specdec_cli.errors import Unavailable, UsageError
from specdec_cli.recipe.schema import Recipe
from specdec_cli.sampling.grammar import Grammar
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.timing import timing_of
from specdec_cli.verification import rule_of

if TYPE_CHECKING:
    from specdec_cli.engine.jobs.ticket import Ticket


class AsyncEngine:
    """Runs an engine on a thread of its own, for any number of asyncio tasks.

    Examples:
        async with AsyncEngine.load() as engine:
            async for delta in engine.stream("Once upon a time"):
                print(delta.text, end="")
            first, second = await asyncio.gather(engine.generate("One day"), engine.generate("The dog"))

    Args:
        engine: idle; only this object may use it from now on.
        max_waiting: most requests that wait beside those that run; None for no limit.
    """

    @checked_call("AsyncEngine")
    def __init__(self, engine: Engine, *, max_waiting: int | None = None) -> None:
        if max_waiting is not None and max_waiting < 0:
            raise UsageError(
                f"max_waiting is out of range: `{max_waiting}`", "it must be at least 0; None has no limit"
            )
        if engine.has_work:
            raise UsageError("the engine already decodes requests", "finish them first, or give AsyncEngine its own")
        self.engine = engine
        self._max_waiting = sys.maxsize if max_waiting is None else max_waiting
        self._bridge: Bridge | None = None
        self._is_closed = False
        self._numbers = itertools.count()

    @classmethod
    @loads_like(Engine.load)
    def load(cls, *given: Any, **named: Any) -> Self:
        """Load a target and a draft, as `Engine.load`, whose arguments it takes.

        Examples:
            async with AsyncEngine.load("./my-model", "ngram", max_model_len=2048) as engine:
                print(await engine.generate("Once upon a time"))

        Raises:
            UsageError: an unknown argument, method or value, or a draft that does not fit the target.
            RunError: a model that does not load.
        """
        return cls(Engine.load(*given, **named))

    @classmethod
    @checked_call()
    def from_recipe(
        cls,
        recipe: str | Recipe,
        *,
        trust_remote_code: bool = False,
        others: tuple[str, ...] = (),
        progress: LoadProgress | None = None,
    ) -> Self:
        """Load the engine that a recipe describes, as `Engine.from_recipe`."""
        return cls(Engine.from_recipe(recipe, trust_remote_code=trust_remote_code, others=others, progress=progress))

    def __repr__(self) -> str:
        """The engine and its state."""
        state = "closed" if self._is_closed else "running" if self._bridge else "idle"
        return f"AsyncEngine({self.engine!r}, {state})"

    async def __aenter__(self) -> Self:
        """Return the engine; its thread starts with the first request."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it."""
        await self.close()

    async def close(self) -> None:
        """End the thread after its current step; open requests fail with `Unavailable`. Closing again does nothing."""
        self._is_closed = True
        if self._bridge is not None:
            await asyncio.to_thread(self._bridge.stop)

    @checked_call()
    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        num_speculative_tokens: int | None = None,
        *,
        tree: str | None = None,
        draft: str | None = None,
        prediction: Items[int] | None = None,
        grammar: Grammar | None = None,
        cache_salt: str | None = None,
    ) -> AsyncIterator[Delta]:
        """Decode one prompt and yield its deltas as they come; the last one has a `finish_reason`.

        Leaving the loop or cancelling the task aborts the request. The other arguments are those of `Engine.add`.

        Examples:
            async for delta in engine.stream("Once upon a time", SamplingParams(max_new_tokens=64)):
                print(delta.text, end="", flush=True)

        Raises:
            UsageError: a prompt or parameter that the engine does not accept.
            QueueFull: more requests wait than `max_waiting` allows.
            Unavailable: the engine was closed.
        """
        ticket = self._submit(
            prompt,
            params_of(params),
            num_speculative_tokens,
            tree=tree,
            draft=draft,
            prediction=None if prediction is None else tuple(prediction),
            grammar=grammar,
            cache_salt=cache_salt or "",
        )
        try:
            async for delta in ticket:
                if delta.error is not None:
                    raise delta.error
                yield delta
        finally:
            ticket.cancel()

    @checked_call()
    async def generate(
        self,
        prompts: Prompt | Items[Prompt],
        params: SamplingParams | Items[SamplingParams] | None = None,
        num_speculative_tokens: int | None = None,
    ) -> list[Output]:
        """Decode prompts together with all other requests and return their results in the prompts' order.

        Cancelling the task aborts all of them, as does the first that fails.

        Raises:
            UsageError: a prompt or parameter that the engine does not accept.
            QueueFull: more requests wait than `max_waiting` allows.
            Unavailable: the engine was closed.
        """
        many = as_many(prompts)
        tickets: list[Ticket] = []
        try:
            for prompt, own_params in zip(many, spread(params, len(many)), strict=True):
                tickets.append(self._submit(prompt, own_params, num_speculative_tokens, whole=True))
            return [
                await self._output(index, prompt, ticket)
                for index, (prompt, ticket) in enumerate(zip(many, tickets, strict=True))
            ]
        finally:
            for ticket in tickets:
                ticket.cancel()

    def _submit(
        self, prompt: Prompt, params: SamplingParams, num_speculative_tokens: int | None, **fields: Any
    ) -> Ticket:
        """Queue a job, whose other fields are given by their names."""
        tokens = tuple(self.engine.encode(prompt))
        job = Job(str(next(self._numbers)), tokens, params, num_speculative_tokens, **fields)
        return self._started().submit(job)

    def _started(self) -> Bridge:
        """The bridge, whose thread starts with the first request."""
        if self._is_closed:
            raise Unavailable("the engine is closed", "closed")
        if self._bridge is None:
            self._bridge = Bridge(self.engine, max_waiting=self._max_waiting)
            self._bridge.start()
        return self._bridge

    async def _output(self, index: int, prompt: Prompt, ticket: Ticket) -> Output:
        """The complete result of a request."""
        job, record, engine = ticket.job, ticket.record, self.engine
        text = prompt if isinstance(prompt, str) else None
        if text is None and engine.tokenizer is not None:
            text = engine.tokenizer.decode(list(job.token_ids))
        output = Output(index, text, list(job.token_ids), speculative=record.speculative)
        output.lossless = rule_of(engine.options.verify, job.params.temperature).is_lossless
        output.logprobs = None if job.params.logprobs is None else []
        async for delta in ticket:
            if delta.error is not None:
                raise delta.error
            output.text += delta.text
            output.token_ids += delta.token_ids
            if output.logprobs is not None:
                output.logprobs += delta.logprobs
            output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
        if record.first_token is not None and record.last_token is not None:
            num_decoded = len(output.token_ids) - 1
            output.timing = timing_of(record.arrived, record.first_token, record.last_token, num_decoded)
        return output

"""Compiles the grammars of requests: on a thread of their own, in a short queue, as long as the client is there."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from starlette.requests import Request

from specdec_cli.recipe.schema import Serve
from specdec_cli.serve.errors import ApiError
from specdec_cli.serve.http.client_watch import while_connected
from specdec_cli.serve.http.watched_pool import WatchedPool

if TYPE_CHECKING:
    from specdec_cli.sampling.grammar import Grammar
    from specdec_cli.serve.constraint import Constraint
    from specdec_cli.text.tokenizer import Tokenizer

_MAX_OPEN = 64
_MASK_SECONDS = 0.5


class GrammarQueue:
    """Queue in which grammars wait and are compiled, apart from the work of other requests."""

    def __init__(self, serve: Serve) -> None:
        from specdec_cli.sampling.grammar_sandbox import GrammarCompiler, GrammarLimits

        self.pool = WatchedPool(1, "specdec-grammar")
        limits = GrammarLimits(serve.max_grammar_seconds, serve.max_grammar_memory_bytes, _MASK_SECONDS)
        self._compiler = GrammarCompiler(limits)
        self._timeout_seconds = serve.request_timeout_seconds
        self._num_open = 0

    async def compile(self, request: Request, constraint: Constraint, tokenizer: Tokenizer) -> Grammar:
        """The grammar of a request whose body was read.

        Raises:
            ApiError: 400 naming the field, 429 where too many wait, 499 (for the log) where the client went away, 504.
        """
        from specdec_cli.sampling.grammar_sandbox import Cancellation

        if self._num_open >= _MAX_OPEN:
            message = f"`{constraint.param}` cannot be compiled now: {_MAX_OPEN} other grammars wait for that"
            raise ApiError(429, message, param=constraint.param, code="queue_full", headers={"Retry-After": "1"})
        self._num_open += 1
        loop, cancellation = asyncio.get_running_loop(), Cancellation()
        work = loop.run_in_executor(self.pool, constraint.compile, tokenizer, self._compiler, cancellation)
        try:
            before = "its request was prepared"
            return await while_connected(work, request.receive, self._timeout_seconds, before)
        except TimeoutError:
            raise ApiError(504, "the request could not be prepared in time", code="timeout") from None
        finally:
            self._num_open -= 1
            cancellation.cancel()

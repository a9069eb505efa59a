"""Work for a client that waits for it: it ends when the client disconnects or the time is up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

from specdec_cli.serve.errors import ClientGoneError

Result = TypeVar("Result")


async def while_connected(
    work: Awaitable[Result], receive: Receive, seconds: float | None, before: str = "its request was answered"
) -> Result:
    """The result of work for a client whose body was read.

    Args:
        work: cancelled when it is no longer wanted; what it raises then is dropped.
        receive: of the request.
        seconds: how long it may take; None for ever.
        before: what the client did not wait for, where it disconnects.

    Raises:
        ClientGoneError: the client disconnected.
        TimeoutError: the time is up.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_until_gone(receive))
    try:
        await asyncio.wait({task, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise ClientGoneError(before)
        raise TimeoutError
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(gone, task, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

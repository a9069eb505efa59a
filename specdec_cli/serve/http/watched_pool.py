"""A thread pool that knows how long its threads have been at their work."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class WatchedPool(ThreadPoolExecutor):
    """Threads for work that must not run on the event loop."""

    def __init__(self, num_threads: int, name: str) -> None:
        super().__init__(num_threads, thread_name_prefix=name)
        self._num_threads = num_threads
        self._began: dict[object, float] = {}

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue work."""
        return super().submit(self._timed, fn, *args, **kwargs)

    def _timed(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        work = object()
        self._began[work] = time.monotonic()
        try:
            return fn(*args, **kwargs)
        finally:
            del self._began[work]

    @property
    def is_busy(self) -> bool:
        """Whether any thread works."""
        return bool(self._began)

    @property
    def stuck_seconds(self) -> float:
        """How long every thread has been at the same work; 0 while one is free."""
        began = tuple(self._began.values())
        return time.monotonic() - max(began) if len(began) >= self._num_threads else 0.0

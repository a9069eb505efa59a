"""Drafted tokens that a device has and the host has not read yet: negative numbers stand for them.

A draft's graph leaves its guess on the device, where the target's graph takes it from. The host waits once, for the
target's result, and the guess has come with it by then. Until it is read, contexts carry stand-ins.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from specdec_cli.errors import RunError

_FIRST = -2  # -1 is a token that only fills a shape, or that is none


class PendingTokens:
    """A guess of several rows on its way to the host.

    Args:
        tokens: [B, most] int64 on its device, at a place of its own; -1 where a largest logit was no finite number.
    """

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens
        self._most = tokens.shape[1]
        self._here = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=tokens.is_cuda)
        self._here.copy_(tokens, non_blocking=True)
        cuda: Any = torch.cuda
        self._arrival = cuda.Event() if tokens.is_cuda else None
        if self._arrival is not None:
            self._arrival.record(cuda.current_stream(tokens.device))
        self._values: list[int] | None = None

    @property
    def is_read(self) -> bool:
        """Whether the host knows the tokens."""
        return self._values is not None

    @property
    def is_whole(self) -> bool:
        """Whether all of them are tokens; it reads them."""
        return min(self._read()) >= 0

    def check(self, name: str, hint: str) -> None:
        """Refuse a guess that the host has read by now and that holds something else than tokens.

        Raises:
            RunError: a largest logit was no finite number.
        """
        if self.is_read and not self.is_whole:
            raise RunError(f"the draft `{name}` gave no finite number as its largest logit", hint)

    def stand_ins(self, row: int, num: int) -> list[int]:
        """The placeholder for the first tokens of a row."""
        begin = _FIRST - row * self._most
        return list(range(begin, begin - num, -1))

    def known(self, context: Iterable[int]) -> list[int]:
        """A context with the tokens themselves, which the host may wait for; 0, as it was fed, for an invalid one."""
        values = self._read()
        return [max(values[_FIRST - token], 0) if token <= _FIRST else token for token in context]

    def _read(self) -> list[int]:
        if self._values is None:
            if self._arrival is not None and not self._arrival.query():
                self._arrival.synchronize()
            self._values = self._here.flatten().tolist()
        return self._values


def put_in(tokens: Tensor, unread: Tensor) -> Tensor:
    """Tokens with unread ones in place of their stand-ins, on their device.

    Args:
        tokens: int64, any shape.
        unread: the tokens behind the stand-ins, [n] int64.
    """
    is_stand_in = tokens <= _FIRST
    replaced = unread[torch.where(is_stand_in, _FIRST - tokens, 0)]
    return torch.where(is_stand_in, replaced, tokens).clamp(min=0)

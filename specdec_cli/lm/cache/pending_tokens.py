"""Drafted tokens that a device has and the host has not read yet: negative numbers stand for them.

A draft's graph leaves its guess on the device, where the target's graph takes it from. The host waits once, for the
target's result, and the guess has come with it by then. Until it is read, contexts carry stand-ins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from specdec_cli.drafted import Drafted
from specdec_cli.errors import RunError
from specdec_cli.transfer import HostCopy

_FIRST = -2  # -1 is a token that only fills a shape, or that is none


class PendingTokens:
    """A guess of several rows on its way to the host.

    Args:
        tokens: [B, most] int64 on its device, at a place of its own; -1 where a largest logit was no finite number.
        paths: of nodes of trees that the device has chosen: the nodes on the path to each, its own among them, as the
            bits of a mask [B, most] int64; 0 for a node that is missing, none of which comes before another. None where
            the host knows the trees.
    """

    def __init__(self, tokens: Tensor, paths: Tensor | None = None) -> None:
        self.tokens, self.paths = tokens, paths
        self._left_out = set[int]()
        self._most = tokens.shape[1]
        self._copy = HostCopy([tokens] if paths is None else [tokens, paths])
        self._values: list[list[int]] | None = None

    @property
    def is_read(self) -> bool:
        """Whether the host knows the tokens."""
        return self._values is not None

    @property
    def is_whole(self) -> bool:
        """Whether all of them are tokens; it reads them."""
        values = self._read()[0]
        rows = (row for row in range(len(self.tokens)) if row not in self._left_out)
        return all(token >= 0 for row in rows for token in values[row * self._most : (row + 1) * self._most])

    def leave_out(self, rows: Iterable[int]) -> None:
        """Whatever it holds for rows whose sequences were released is no fault."""
        self._left_out.update(rows)

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
        values = self._read()[0]
        return [max(values[_FIRST - token], 0) if token <= _FIRST else token for token in context]

    def known_nodes(self, drafted: Drafted) -> Drafted:
        """Drafted nodes with the tokens themselves and with their parents, a missing one's being the context's end."""
        nodes = drafted
        if self.paths is not None:
            masks = [self._read()[1][_FIRST - token] for token in drafted.tokens]
            parents = [(mask & (1 << node) - 1).bit_length() - 1 for node, mask in enumerate(masks)]
            nodes = Drafted(drafted.tokens, parents)
        return nodes.with_tokens(self.known(drafted.tokens))

    def num_found(self, drafted: Drafted) -> int:
        """How many first nodes of these are not missing."""
        if self.paths is None:
            return len(drafted)
        return sum(self._read()[1][_FIRST - token] != 0 for token in drafted.tokens)

    def _read(self) -> list[list[int]]:
        if self._values is None:
            self._values = self._copy.read().flatten(1).tolist()
        return self._values


def shifted(tokens: Sequence[int], num: int) -> Sequence[int]:
    """Tokens whose stand-ins stand for unread ones behind so many of other guesses."""
    return [token - num if token <= _FIRST else token for token in tokens] if num else tokens


def put_in(tokens: Tensor, unread: Tensor) -> Tensor:
    """Tokens with unread ones in place of their stand-ins, on their device.

    Args:
        tokens: int64, any shape.
        unread: the tokens behind the stand-ins, [n] int64.
    """
    return torch.where(tokens <= _FIRST, stood_for(tokens, unread), tokens).clamp(min=0)


def stood_for(tokens: Tensor, unread: Tensor) -> Tensor:
    """The unread values [n] int64 that stand-ins among tokens stand for; 0 for all other tokens."""
    is_stand_in = tokens <= _FIRST
    return torch.where(is_stand_in, unread[torch.where(is_stand_in, _FIRST - tokens, 0)], 0)

"""The block pool: which blocks of KV cache are free, which are shared, and which to hand out next.

A block that was published under a key stays findable after its last holder, until its space is needed: the one
that was left first goes first. It counts as free all the while.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice


class BlockPool:
    """Hands out block numbers 0..num_blocks-1, neighbours first, so that a sequence's keys tend to lie in one piece.

    Args:
        num_blocks: blocks in all.
        on_forget: told of each key under which no block can be found any longer.

    Attributes:
        num_free: blocks without a holder, findable or not.
    """

    def __init__(self, num_blocks: int, on_forget: Callable[[bytes], None] = lambda _: None) -> None:
        self.num_blocks = num_blocks
        self._on_forget = on_forget
        self.num_free = num_blocks
        self._taken = bytearray(num_blocks)  # held, or findable
        self._num_holders = [0] * num_blocks
        self._keys: dict[int, bytes] = {}
        self._by_key: dict[bytes, int] = {}
        self._left: dict[int, None] = {}  # findable and without a holder, in the order in which they were left

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """`count` free blocks; the block behind `after` comes first where it is free."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} are free"
        for block in list(islice(self._left, max(0, count - (self.num_free - len(self._left))))):
            self._forget(block)
        blocks: list[int] = []
        cursor = self.num_blocks if after is None else after + 1
        while len(blocks) < count:
            if cursor >= self.num_blocks or self._taken[cursor]:
                cursor = self._roomiest_start(count - len(blocks))
            self._taken[cursor] = self._num_holders[cursor] = 1
            blocks.append(cursor)
            cursor += 1
        self.num_free -= count
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Take blocks back from one holder; a sequence's last block is the first to lose what is in it."""
        for block in reversed(blocks):
            assert self._num_holders[block], f"block {block} was given back twice"
            self._num_holders[block] -= 1
            if self._num_holders[block]:
                continue
            self.num_free += 1
            if block in self._keys:
                self._left[block] = None
            else:
                self._taken[block] = 0

    def publish(self, block: int, key: bytes) -> None:
        """Make a held block findable; where another one is under this key already, that one stays."""
        assert self._num_holders[block], f"block {block} is published without a holder"
        if key not in self._by_key and block not in self._keys:
            self._by_key[key] = block
            self._keys[block] = key

    def __contains__(self, key: bytes) -> bool:
        """Whether a block can be found under a key."""
        return key in self._by_key

    def share(self, key: bytes) -> int | None:
        """The block under a key, with one holder more; None where there is none."""
        block = self._by_key.get(key)
        if block is None:
            return None
        if not self._num_holders[block]:
            del self._left[block]
            self.num_free -= 1
        self._num_holders[block] += 1
        return block

    def withdraw(self, block: int) -> bool:
        """Make a held block unfindable before writing to it; False if another sequence holds it too."""
        assert self._num_holders[block], f"block {block} is withdrawn without a holder"
        if self._num_holders[block] > 1:
            return False
        key = self._keys.pop(block, None)
        if key is not None:
            del self._by_key[key]
            self._on_forget(key)
        return True

    def check(self, held: Sequence[int]) -> None:
        """Assert that exactly the blocks in `held` are held, each by as many as name it."""
        holders, expected = Counter(held), [0] * self.num_blocks
        for block, num in holders.items():
            expected[block] = num
        assert self.num_free + len(holders) == self.num_blocks, "free + used blocks differ from the total"
        assert self._num_holders == expected, "holders differ from the books"
        assert all(self._taken[block] for block in (*holders, *self._left)), "a held block is marked free"
        assert self._taken.count(1) == len(holders) + len(self._left), "a block without a holder is shared"
        assert all(self._keys[block] == key for key, block in self._by_key.items()), "a key leads to another block"

    def _forget(self, block: int) -> None:
        key = self._keys.pop(block)
        del self._left[block], self._by_key[key]
        self._taken[block] = 0
        self._on_forget(key)

    def _roomiest_start(self, count: int) -> int:
        """Where a new piece should start: inside the longest free run, leaving its left neighbour room to grow."""
        best_start, best_length, start = -1, 0, self._taken.find(0)
        while start >= 0:
            stop = self._taken.find(1, start)
            stop = self.num_blocks if stop < 0 else stop
            if stop - start > best_length:
                best_start, best_length = start, stop - start
            start = self._taken.find(0, stop)
        assert best_start >= 0, "a block was wanted from a full pool"
        room = min(best_length // 2, best_length - count)
        return best_start + max(0, room) if best_start > 0 else best_start

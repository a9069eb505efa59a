"""The block pool: which blocks of KV cache are free, and which to hand out next."""

from __future__ import annotations


class BlockPool:
    """Hands out block numbers 0..num_blocks-1, neighbours first, so that a sequence's keys tend to lie in one piece.

    Args:
        num_blocks: blocks in all.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._taken = bytearray(num_blocks)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """`count` free blocks; the block behind `after` comes first where it is free."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} are free"
        blocks: list[int] = []
        cursor = self.num_blocks if after is None else after + 1
        while len(blocks) < count:
            if cursor >= self.num_blocks or self._taken[cursor]:
                cursor = self._roomiest_start()
            self._taken[cursor] = 1
            blocks.append(cursor)
            cursor += 1
        self.num_free -= count
        return blocks

    def free(self, blocks: list[int]) -> None:
        """Take blocks back."""
        for block in blocks:
            assert self._taken[block], f"block {block} was given back twice"
            self._taken[block] = 0
        self.num_free += len(blocks)

    def check(self, held: list[int]) -> None:
        """Assert that exactly the blocks in `held` are taken, each once."""
        assert len(set(held)) == len(held), "a block is held twice"
        assert self.num_free + len(held) == self.num_blocks, "free + used blocks differ from the total"
        assert all(self._taken[block] for block in held), "a held block is marked free"
        assert self._taken.count(1) == len(held), "a block is taken that nobody holds"

    def _roomiest_start(self) -> int:
        """Where a new piece should start: inside the longest free run, leaving its left neighbour room to grow."""
        best_start, best_length, start = -1, 0, self._taken.find(0)
        while start >= 0:
            stop = self._taken.find(1, start)
            stop = self.num_blocks if stop < 0 else stop
            if stop - start > best_length:
                best_start, best_length = start, stop - start
            start = self._taken.find(0, stop)
        assert best_start >= 0, "a block was wanted from a full pool"
        return best_start + best_length // 2 if best_start > 0 else best_start

"""Cached contexts: the blocks of each sequence. Contexts with a common prefix share full blocks.

A whole block is found again by its key, a hash of all tokens up to its end and of the sequence's salt. It is published
once a context has grown past it, is never written while it can be found by others, and outlives its sequence in the
pool. Sequences without a salt share nothing.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence

from specdec_cli.drafted import NOTHING
from specdec_cli.errors import RunError
from specdec_cli.lm.cache.blocks import BlockPool
from specdec_cli.lm.cache.held import Feed, Held
from specdec_cli.lm.cache.snapshots import Snapshots
from specdec_cli.lm.door import Row

Moves = Sequence[tuple[int, int]]
"""Slots to copy from, and slots to copy to."""


class Contexts:
    """The books of a cache.

    Args:
        name: of the model, for the error of a full cache.
        num_blocks: blocks in all.
        block_size: tokens in a block.
        move: copies keys and values from slots to others, (from, to) one after another; of each from ≥ to, ascending.
        num_snapshots: states that are kept of a sequence; 0 for a model without a state.
    """

    def __init__(
        self, name: str, num_blocks: int, block_size: int, move: Callable[[Moves], None], num_snapshots: int = 0
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.held: dict[int, Held] = {}
        self._name = name
        self._block_size = block_size
        self._move = move
        self._num_snapshots = num_snapshots
        self._places: list[int] = []  # without a sequence, of those that had one
        self._num_places = 0

    def adopt(self, handle: int, context: Sequence[int], salt: str) -> int:
        """Begin a sequence with the longest cached prefix of its context; at least one token is left to feed.

        Nothing is shared where a state belongs to a prefix beside its keys and values.

        Returns:
            How many tokens it holds.
        """
        assert handle not in self.held, "a sequence adopts before it is scored"
        if self._num_snapshots:
            return 0
        held = self.held[handle] = Held(salt=salt)
        size, before = self._block_size, root_key(salt)
        for start in range(0, len(context) - size, size):
            before = block_key(before, context[start : start + size])
            block = self.pool.share(before)
            if block is None:
                break
            held.blocks.append(block)
            held.keys.append(before)
        held.tokens = list(context[: len(held.blocks) * size])
        held.in_one_piece = _neighbours(held.blocks)
        return len(held.tokens)

    def feeds(self, rows: Sequence[Row], is_long: bool) -> list[Feed]:
        """Cut each row's cache back to what its context shares with it, and reserve blocks for the rest.

        Raises:
            RunError: the cache has too few free blocks.
        """
        feeds = []
        for row in rows:
            held = self._held(row.handle)
            held.settle()
            self._straighten(held, row.context)
            context = [*row.context, *row.drafted.tokens]
            tree = NOTHING if row.drafted.is_chain else row.drafted
            num_text = len(context) - len(tree)
            most = min(len(context) - row.num_logits, num_text)
            keep = held.common_prefix(context, most) if held.is_long == is_long else 0
            held.is_long = is_long
            if held.snapshots is not None:
                keep = held.snapshots.restorable(keep)
            feeds.append(Feed(held, context, self._cut(held, keep), row.num_logits, row.unread, tree, num_text))
        missing = [-(-len(feed.context) // self._block_size) - len(feed.held.blocks) for feed in feeds]
        if sum(missing) > self.pool.num_free:
            raise RunError(
                f"the KV cache of `{self._name}` is full: {sum(missing)} blocks wanted, {self.pool.num_free} free",
                "run fewer sequences together, or give the cache more memory",
            )
        for feed, count in zip(feeds, missing, strict=True):
            if count:
                blocks = feed.held.blocks
                blocks += self.pool.allocate(count, after=blocks[-1] if blocks else None)
                feed.held.in_one_piece = _neighbours(blocks)
            if feed.held.snapshots is not None:
                feed.held.snapshots.make_room(len(feed.context))
        return feeds

    def release(self, handle: int) -> None:
        """Forget a sequence and give its blocks back; unknown handles are fine."""
        held = self.held.pop(handle, None)
        if held is not None:
            held.settle()
            self._publish(held, held.num_text)
            self.pool.free(held.blocks)
            if held.snapshots is not None:
                self._places.append(held.snapshots.place)

    def spoil(self, held: Held) -> list[int]:
        """Drop a sequence with NaN keys or values; returns its blocks without another holder."""
        alone = [block for block in held.blocks if self.pool.withdraw(block)]
        self.pool.free(held.blocks)
        held.tokens, held.blocks, held.keys, held.in_one_piece, held.tree = [], [], [], True, NOTHING
        return alone

    def check(self) -> None:
        """Assert that the pool's books and the sequences' agree, and that each holds the blocks that it needs."""
        self.pool.check([block for held in self.held.values() for block in held.blocks])
        for handle, held in self.held.items():
            needed = -(-len(held.tokens) // self._block_size)
            assert len(held.blocks) == needed, f"sequence {handle} holds {len(held.blocks)} blocks, needs {needed}"
        taken = [held.snapshots.place for held in self.held.values() if held.snapshots is not None]
        assert sorted([*taken, *self._places]) == list(range(self._num_places)), "two sequences share a state"

    def _held(self, handle: int) -> Held:
        """A sequence's books; a new one's are empty."""
        held = self.held.get(handle)
        if held is None:
            held = self.held[handle] = Held()
            if self._num_snapshots:
                if not self._places:
                    self._places.append(self._num_places)
                    self._num_places += 1
                held.snapshots = Snapshots(self._places.pop(), self._num_snapshots)
        return held

    def _straighten(self, held: Held, context: Sequence[int]) -> None:
        """Move the keys and values of the path that a context takes through a drafted tree behind the text."""
        start, size, blocks = held.num_text, self._block_size, held.blocks
        places = [(start + node, start + i) for i, node in enumerate(held.take_path(context)) if node != i]
        if places:
            self._move([(blocks[a // size] * size + a % size, blocks[b // size] * size + b % size) for a, b in places])

    def _cut(self, held: Held, keep: int) -> int:
        """Cut back to `keep` tokens, or to a full block if another sequence reads the block to write next."""
        whole, rest = divmod(keep, self._block_size)
        if rest and whole < len(held.keys) and not self.pool.withdraw(held.blocks[whole]):
            keep -= rest
        del held.tokens[keep:]
        del held.keys[whole:]
        num_blocks = -(-keep // self._block_size)
        if num_blocks < len(held.blocks):
            self.pool.free(held.blocks[num_blocks:])
            del held.blocks[num_blocks:]
            held.in_one_piece = _neighbours(held.blocks)
        self._publish(held, keep)
        return keep

    def _publish(self, held: Held, num_tokens: int) -> None:
        """Make the whole blocks among the first tokens findable."""
        if held.salt is None or held.is_long:
            return
        size = self._block_size
        for i in range(len(held.keys), num_tokens // size):
            before = held.keys[-1] if held.keys else root_key(held.salt)
            held.keys.append(block_key(before, held.tokens[i * size : (i + 1) * size]))
            self.pool.publish(held.blocks[i], held.keys[-1])


def root_key(salt: str) -> bytes:
    """The key before a sequence's first block."""
    return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16, person=b"salt").digest()


def block_key(before: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a block, from that of the one before it."""
    return hashlib.blake2b(array("q", tokens).tobytes(), digest_size=16, key=before).digest()


def _neighbours(blocks: list[int]) -> bool:
    """Whether blocks lie side by side, in order."""
    return not blocks or blocks == list(range(blocks[0], blocks[0] + len(blocks)))

"""Cached contexts: the blocks of each sequence. Contexts with a common prefix share full blocks.

A whole block is found again by its key, a hash of all tokens up to its end and of the sequence's salt. It is published
once a context has grown past it, is never written while it can be found by others, and outlives its sequence in the
pool. Sequences without a salt share nothing. Where a state belongs to a prefix, it is shared up to a stored snapshot.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from typing import Protocol

from specdec_cli.drafted import NOTHING
from specdec_cli.errors import RunError
from specdec_cli.lm.cache.blocks import BlockPool
from specdec_cli.lm.cache.held import Feed, Held
from specdec_cli.lm.cache.prefix_states import PrefixStates
from specdec_cli.lm.cache.snapshots import Snapshots
from specdec_cli.lm.door import Row

Moves = Sequence[tuple[int, int]]
"""Slots to copy from, and slots to copy to."""


class Keeper(Protocol):
    """Where keys, values and states are: a model's forward (`lm.forward.forward`)."""

    def move(self, moves: Moves) -> None:
        """Copy keys and values from slots to others, one after another; of each from ≥ to, ascending."""
        ...

    def move_states(self, snapshots: Snapshots, moves: Moves) -> None:
        """Copy the states that a sequence keeps of some of its places to others, likewise."""
        ...

    def restore(self, slot: int, snapshots: Snapshots, length: int) -> None:
        """Give a sequence that begins with so many cached tokens the states of their snapshot."""
        ...

    def keep(self, slot: int, snapshots: Snapshots, length: int) -> None:
        """Make a snapshot of the states that a sequence keeps after so many tokens."""
        ...


class Contexts:
    """The books of a cache.

    Args:
        name: of the model, for the error of a full cache.
        num_blocks: blocks in all.
        block_size: tokens in a block.
        keeper: has what the books are of.
        num_snapshots: states that are kept of a sequence; 0 for a model without a state.
        prefix_states: snapshots at the ends of cached prefixes; None shares no prefix of a model with a state.
    """

    def __init__(
        self,
        name: str,
        num_blocks: int,
        block_size: int,
        keeper: Keeper,
        num_snapshots: int = 0,
        prefix_states: PrefixStates | None = None,
    ) -> None:
        self._prefix_states = prefix_states or PrefixStates(0, block_size)
        self.pool = BlockPool(num_blocks, self._prefix_states.forget)
        self.held: dict[int, Held] = {}
        self._name = name
        self._block_size = block_size
        self._keeper = keeper
        self._num_snapshots = num_snapshots
        self._places: list[int] = []  # without a sequence, of those that had one
        self._num_places = 0

    def adopt(self, handle: int, context: Sequence[int], salt: str) -> int:
        """Begin a sequence with the longest cached prefix of its context; at least one token is left to feed.

        Returns:
            How many tokens it holds.
        """
        assert handle not in self.held, "a sequence adopts before it is scored"
        held = self._begin(handle, salt)
        held.keys = self._cached_prefix(context, salt)
        length = len(held.keys) * self._block_size
        if held.snapshots is not None and length:
            self._keeper.restore(self._prefix_states.use(held.keys[-1]), held.snapshots, length)
            held.snapshots.oldest = length
        held.blocks = [block for key in held.keys if (block := self.pool.share(key)) is not None]
        held.tokens = list(context[:length])
        held.in_one_piece = _neighbours(held.blocks)
        return length

    def _cached_prefix(self, context: Sequence[int], salt: str) -> list[bytes]:
        """Keys of the first whole blocks that a context can share, up to a snapshot where a state belongs to them."""
        keys, key, size = list[bytes](), root_key(salt), self._block_size
        for start in range(0, len(context) - size, size):
            key = block_key(key, context[start : start + size])
            if key not in self.pool:
                break
            keys.append(key)
        while self._num_snapshots and keys and keys[-1] not in self._prefix_states:
            keys.pop()
        return keys

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
            assert not self._num_snapshots or len(tree) < self._num_snapshots, "a tree has more nodes than kept states"
            most = min(len(context) - row.num_logits, num_text)
            keep = held.common_prefix(context, most) if held.is_long == is_long else 0
            held.is_long = is_long
            feeds.append(Feed(held, context, self._cut_back(held, keep), row.num_logits, row.unread, tree, num_text))
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
                self._reserve(feed)
        return feeds

    def _reserve(self, feed: Feed) -> None:
        """Reserve slots for the states after every interval and after the whole blocks of a prompt's chunk."""
        size, interval, length = self._block_size, self._prefix_states.interval, feed.num_text
        lengths = set(range(feed.keep // interval * interval + interval, length + 1, interval))
        if feed.num_tokens - feed.num_logits >= size:  # a prompt's: the same one again feeds its last token
            lengths.add((length - (feed.num_logits > 0)) // size * size)
        self._reserve_at(sorted(lengths), feed.held)

    def _reserve_at(self, lengths: Iterable[int], held: Held) -> None:
        """Reserve slots for the states after some lengths, where others may share them."""
        if held.snapshots is None or held.salt is None or held.is_long:
            return
        for length in lengths:
            slot = self._prefix_states.reserve()
            if slot is not None:
                held.snapshots.reserved[length] = slot

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
        self._publish(held, 0)
        return alone

    def check(self) -> None:
        """Assert that the pool's books and the sequences' agree, and that each holds the blocks that it needs."""
        self.pool.check([block for held in self.held.values() for block in held.blocks])
        for handle, held in self.held.items():
            needed = -(-len(held.tokens) // self._block_size)
            assert len(held.blocks) == needed, f"sequence {handle} holds {len(held.blocks)} blocks, needs {needed}"
        snapshots = [held.snapshots for held in self.held.values() if held.snapshots is not None]
        taken = [one.place for one in snapshots]
        assert sorted([*taken, *self._places]) == list(range(self._num_places)), "two sequences share a state"
        self._prefix_states.check([slot for one in snapshots for slot in one.reserved.values()])

    def _held(self, handle: int) -> Held:
        """A sequence's books; a new one's are empty."""
        return self.held.get(handle) or self._begin(handle, None)

    def _begin(self, handle: int, salt: str | None) -> Held:
        """The empty books of a new sequence."""
        held = self.held[handle] = Held(salt=salt)
        if self._num_snapshots:
            if not self._places:
                self._places.append(self._num_places)
                self._num_places += 1
            held.snapshots = Snapshots(self._places.pop(), self._num_snapshots)
        return held

    def _straighten(self, held: Held, context: Sequence[int]) -> None:
        """Move what is kept of the path that a context takes through a drafted tree behind the text."""
        start, size, blocks = held.num_text, self._block_size, held.blocks
        path = held.take_path(context)
        places = [(start + node, start + i) for i, node in enumerate(path) if node != i]
        if places:
            slots = [(blocks[a // size] * size + a % size, blocks[b // size] * size + b % size) for a, b in places]
            self._keeper.move(slots)
        if path and held.snapshots is not None:
            self._keeper.move_states(held.snapshots, places)
            interval, end = self._prefix_states.interval, start + len(path)
            self._reserve_at(range(start // interval * interval + interval, end + 1, interval), held)
            for length, slot in held.snapshots.reserved.items():
                if length > start:
                    self._keeper.keep(slot, held.snapshots, length)

    def _cut_back(self, held: Held, keep: int) -> int:
        """Cut back to `keep` tokens, or to fewer, from which the sequence can go on."""
        keep = self._cut(held, keep)
        if held.snapshots is None:
            return keep
        restorable = held.snapshots.restorable(keep)
        return keep if restorable == keep else self._cut(held, restorable)

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
        """Make the whole blocks among the first tokens findable, and the snapshots that were stored for them."""
        size, snapshots = self._block_size, held.snapshots
        shared = range(0) if held.salt is None or held.is_long else range(len(held.keys), num_tokens // size)
        for i in shared:
            key = held.keys[-1] if held.keys else root_key(held.salt or "")
            held.keys.append(key := block_key(key, held.tokens[i * size : (i + 1) * size]))
            self.pool.publish(held.blocks[i], key)
            if snapshots is not None and (i + 1) * size in snapshots.reserved and key in self.pool:
                self._prefix_states.store(key, snapshots.reserved.pop((i + 1) * size))
        if snapshots is not None:
            self._prefix_states.give_back(snapshots.reserved.values())
            snapshots.reserved.clear()


def root_key(salt: str) -> bytes:
    """The key before a sequence's first block."""
    return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16, person=b"salt").digest()


def block_key(before: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a block, from that of the one before it."""
    return hashlib.blake2b(array("q", tokens).tobytes(), digest_size=16, key=before).digest()


def _neighbours(blocks: list[int]) -> bool:
    """Whether blocks lie side by side, in order."""
    return not blocks or blocks == list(range(blocks[0], blocks[0] + len(blocks)))

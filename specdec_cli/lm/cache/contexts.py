"""Cached contexts: the blocks of each sequence, and what a row feeds of it.

Contexts with a common prefix share full blocks.
A whole block is found again by its key, a hash of all tokens up to its end and of the sequence's salt. It is published
once a context has grown past it, is never written while it can be found by others, and outlives its sequence in the
pool. Sequences without a salt share nothing. Where a state belongs to a prefix, it is shared up to a stored snapshot.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from specdec_cli.drafted import NOTHING, Drafted
from specdec_cli.errors import RunError
from specdec_cli.lm.cache.blocks import BlockPool
from specdec_cli.lm.cache.pending_tokens import PendingTokens
from specdec_cli.lm.cache.prefix_states import PrefixStates
from specdec_cli.lm.cache.snapshots import Snapshots
from specdec_cli.lm.door import Row

if TYPE_CHECKING:
    from specdec_cli.lm.hidden_states import HiddenStates

Moves = Sequence[tuple[int, int]]
"""Slots to copy from, and slots to copy to."""


@dataclass(slots=True)
class CachedSequence:
    """The cached context of one sequence.

    Args:
        tokens: the tokens whose keys and values are cached; a drafted tree's nodes come last, in their order.
        blocks: hold these keys and values, in order.
        in_one_piece: whether these are neighbours.
        is_long: whether keys were turned by long rope's long frequencies.
        salt: shares blocks with sequences of the same salt; None shares none.
        keys: the keys of its first whole blocks, which were published.
        unread: tokens that stand-ins among them stand for.
        tree: the nodes at the end, each of which has read its own path alone; a chain's are text like any other.
        snapshots: of the state that recurrent layers carry; None without such layers.
        num_reserved: tokens that its blocks are to have room for while the device goes on without the host
            (`lm.forward.device_rounds`).
    """

    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    in_one_piece: bool = True
    is_long: bool = False
    salt: str | None = None
    keys: list[bytes] = field(default_factory=list)
    unread: PendingTokens | None = None
    tree: Drafted = NOTHING
    snapshots: Snapshots | None = None
    num_reserved: int = 0

    @property
    def num_text(self) -> int:
        """How many of the tokens are text, one after the other."""
        return len(self.tokens) - len(self.tree)

    def record(self, tokens: list[int], unread: PendingTokens | None, tree: Drafted = NOTHING) -> None:
        """Note the tokens that are cached now."""
        self.tokens, self.unread, self.tree = tokens, unread, tree

    def take_path(self, context: Sequence[int]) -> tuple[int, ...]:
        """Turn the path that the context takes through the tree into text; returns its nodes, and drops all others."""
        tree, start = self.tree, self.num_text
        path: tuple[int, ...] = ()
        if len(tree) and self.tokens[:start] == context[:start]:
            path = tree.follow(context[start:])
        self.tokens[start:] = [tree.tokens[node] for node in path]
        self.tree = NOTHING
        return path

    def settle(self) -> None:
        """Replace stand-ins by the tokens themselves, which the host may wait for."""
        if self.unread is not None:
            self.tokens = self.unread.known(self.tokens)
            self.tree = self.unread.known_nodes(self.tree)
            self.unread = None

    def common_prefix(self, context: list[int], limit: int) -> int:
        """How many first tokens of the context are cached, at most `limit`."""
        length = min(len(self.tokens), limit)
        if self.tokens[:length] == context[:length]:
            return length
        return next(i for i in range(length) if self.tokens[i] != context[i])


@dataclass(slots=True)
class ForwardInput:
    """One row's input to a forward pass.

    Args:
        sequence: whose row it is.
        context: text and drafted tokens, in the order of their places in the cache.
        keep: how many of them are cached; the others are fed.
        num_logits: logits are wanted after the last so many.
        unread: tokens that stand-ins among them stand for.
        tree: the nodes at the end of the context where they are no chain; a chain's are text like any other.
        num_text: places before the tree.
        is_tapped: hidden states of the fed tokens are wanted.
        states: these [fed tokens, taps, hidden], once a forward has run.
    """

    sequence: CachedSequence
    context: list[int]
    keep: int
    num_logits: int
    unread: PendingTokens | None = None
    tree: Drafted = NOTHING
    num_text: int = 0
    is_tapped: bool = False
    states: HiddenStates | None = None

    def position(self, place: int) -> int:
        """The position in its text of what stands at a place: a node's is its depth behind the context."""
        if not len(self.tree) or place < self.num_text:
            return place
        return self.num_text + self.tree.depth(place - self.num_text) - 1

    @property
    def positions(self) -> Sequence[int]:
        """Positions of the fed tokens."""
        fed = range(self.keep, len(self.context))
        return [self.position(place) for place in fed] if len(self.tree) else fed

    @property
    def ancestors(self) -> Sequence[int]:
        """Ancestors of the fed tokens as 64-bit masks (`Drafted.ancestors`), a node itself included; 0 for text."""
        nodes = range(self.keep - self.num_text, len(self.context) - self.num_text)
        return [self.tree.ancestors(node) if node >= 0 else 0 for node in nodes]

    @property
    def num_tokens(self) -> int:
        """Number of fed tokens."""
        return len(self.context) - self.keep

    def cut(self, num_tokens: int) -> list[ForwardInput]:
        """The first `num_tokens` fed tokens, and the rest if there are more."""
        if self.num_tokens <= num_tokens:
            return [self]
        stop = self.keep + num_tokens
        later = min(self.num_logits, len(self.context) - stop)
        first = replace(self, context=self.context[:stop], num_logits=self.num_logits - later)
        return [first, replace(self, keep=stop, num_logits=later)]

    def settle(self) -> None:
        """Replace stand-ins by the tokens themselves, which the host may wait for."""
        if self.unread is not None:
            self.context = self.unread.known(self.context)
            self.tree = self.unread.known_nodes(self.tree)
            self.unread = None


class CacheStorage(Protocol):
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
    """Cached contexts: which blocks hold which tokens of which sequence.

    Args:
        name: of the model, for the error of a full cache.
        num_blocks: blocks in all.
        block_size: tokens in a block.
        storage: stores the keys, values and states tracked here.
        num_snapshots: states that are kept of a sequence; 0 for a model without a state.
        prefix_states: snapshots at the ends of cached prefixes; None shares no prefix of a model with a state.
    """

    def __init__(
        self,
        name: str,
        num_blocks: int,
        block_size: int,
        storage: CacheStorage,
        num_snapshots: int = 0,
        prefix_states: PrefixStates | None = None,
    ) -> None:
        self._prefix_states = prefix_states or PrefixStates(0, block_size)
        self.pool = BlockPool(num_blocks, self._prefix_states.forget)
        self.sequences: dict[int, CachedSequence] = {}
        self._name = name
        self._block_size = block_size
        self._storage = storage
        self._num_snapshots = num_snapshots
        self._places: list[int] = []  # without a sequence, of those that had one
        self._num_places = 0

    def adopt(self, handle: int, context: Sequence[int], salt: str) -> int:
        """Begin a sequence with the longest cached prefix of its context; at least one token is left to feed.

        Returns:
            How many tokens it holds.
        """
        assert handle not in self.sequences, "a sequence adopts before it is scored"
        sequence = self._begin(handle, salt)
        sequence.keys = self._cached_prefix(context, salt)
        length = len(sequence.keys) * self._block_size
        if sequence.snapshots is not None and length:
            self._storage.restore(self._prefix_states.use(sequence.keys[-1]), sequence.snapshots, length)
            sequence.snapshots.oldest = length
        sequence.blocks = [block for key in sequence.keys if (block := self.pool.share(key)) is not None]
        sequence.tokens = list(context[:length])
        sequence.in_one_piece = _neighbours(sequence.blocks)
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

    def feeds(self, rows: Sequence[Row], is_long: bool) -> list[ForwardInput]:
        """Cut each row's cache back to what its context shares with it, and reserve blocks for the rest.

        Raises:
            RunError: the cache has too few free blocks.
        """
        feeds = []
        for row in rows:
            sequence = self.sequences.get(row.handle) or self._begin(row.handle, None)
            sequence.settle()
            if sequence.tree:
                self._straighten(sequence, row.context)
            context = [*row.context, *row.drafted.tokens]
            assert 0 <= row.num_logits <= len(context), "more logits wanted than there are tokens"
            tree = NOTHING if row.drafted.is_chain else row.drafted
            num_text = len(context) - len(tree)
            assert not self._num_snapshots or len(tree) < self._num_snapshots, "a tree has more nodes than kept states"
            most = min(len(context) - row.num_logits, num_text)
            keep = sequence.common_prefix(context, most) if sequence.is_long == is_long else 0
            sequence.is_long = is_long
            keep = self._cut_back(sequence, keep)
            is_tapped = row.tapped is not None
            feeds.append(ForwardInput(sequence, context, keep, row.num_logits, row.unread, tree, num_text, is_tapped))
        missing = [-(-len(feed.context) // self._block_size) - len(feed.sequence.blocks) for feed in feeds]
        if sum(missing) > self.pool.num_free:
            raise RunError(
                f"the KV cache of `{self._name}` is full: {sum(missing)} blocks wanted, {self.pool.num_free} free",
                "run fewer sequences together, or give the cache more memory",
            )
        for feed, count in zip(feeds, missing, strict=True):
            if count:
                blocks = feed.sequence.blocks
                blocks += self.pool.allocate(count, after=blocks[-1] if blocks else None)
                feed.sequence.in_one_piece = _neighbours(blocks)
            if feed.sequence.snapshots is not None:
                feed.sequence.snapshots.make_room(len(feed.context))
                self._reserve(feed)
        return feeds

    def _reserve(self, feed: ForwardInput) -> None:
        """Reserve slots for the states after every interval and after the whole blocks of a prompt's chunk."""
        size, interval, length = self._block_size, self._prefix_states.interval, feed.num_text
        lengths = set(range(feed.keep // interval * interval + interval, length + 1, interval))
        if feed.num_tokens - feed.num_logits >= size:  # a prompt's: the same one again feeds its last token
            lengths.add((length - (feed.num_logits > 0)) // size * size)
        self._reserve_at(sorted(lengths), feed.sequence)

    def _reserve_at(self, lengths: Iterable[int], sequence: CachedSequence) -> None:
        """Reserve slots for the states after some lengths, where others may share them."""
        if sequence.snapshots is None or sequence.salt is None or sequence.is_long:
            return
        for length in lengths:
            slot = self._prefix_states.reserve()
            if slot is not None:
                sequence.snapshots.reserved[length] = slot

    def reserve(self, lengths: Mapping[int, int], most_blocks: int) -> bool:
        """Have blocks for so many tokens of sequences, by their handles, at most so many blocks of each.

        Returns:
            Whether there are enough; where too few are free, none is taken.
        """
        missing = {
            handle: -(-length // self._block_size) - len(self.sequences[handle].blocks)
            for handle, length in lengths.items()
        }
        most = max(-(-length // self._block_size) for length in lengths.values())
        if most > most_blocks or sum(max(count, 0) for count in missing.values()) > self.pool.num_free:
            return False
        for handle, count in missing.items():
            sequence = self.sequences[handle]
            if count > 0:
                sequence.blocks += self.pool.allocate(count, after=sequence.blocks[-1] if sequence.blocks else None)
                sequence.in_one_piece = _neighbours(sequence.blocks)
            sequence.num_reserved = max(sequence.num_reserved, lengths[handle])
        return True

    def follow(self, handle: int, text: list[int], *, is_last: bool) -> None:
        """Note the text that a sequence has cached, as the device says; its last round gives reserved blocks back."""
        sequence = self.sequences[handle]
        sequence.record(text, None)
        if is_last:
            self._cut(sequence, len(text))
        else:
            self._publish(sequence, len(text))

    def release(self, handle: int) -> None:
        """Forget a sequence and give its blocks back; unknown handles are fine."""
        sequence = self.sequences.pop(handle, None)
        if sequence is not None:
            sequence.settle()
            self._publish(sequence, sequence.num_text)
            self.pool.free(sequence.blocks)
            if sequence.snapshots is not None:
                self._places.append(sequence.snapshots.place)

    def spoil(self, sequence: CachedSequence) -> list[int]:
        """Drop a sequence with NaN keys or values; returns its blocks without another holder."""
        alone = [block for block in sequence.blocks if self.pool.withdraw(block)]
        self.pool.free(sequence.blocks)
        sequence.tokens, sequence.blocks, sequence.keys = [], [], []
        sequence.in_one_piece, sequence.tree = True, NOTHING
        self._publish(sequence, 0)
        return alone

    def check(self) -> None:
        """Assert that pool and sequences agree on the blocks, and that each sequence holds as many as it needs."""
        self.pool.check([block for sequence in self.sequences.values() for block in sequence.blocks])
        for handle, sequence in self.sequences.items():
            needed = -(-max(len(sequence.tokens), sequence.num_reserved) // self._block_size)
            assert len(sequence.blocks) == needed, (
                f"sequence {handle} holds {len(sequence.blocks)} blocks, needs {needed}"
            )
        snapshots = [sequence.snapshots for sequence in self.sequences.values() if sequence.snapshots is not None]
        taken = [snapshot.place for snapshot in snapshots]
        assert sorted([*taken, *self._places]) == list(range(self._num_places)), "two sequences share a state"
        self._prefix_states.check([slot for snapshot in snapshots for slot in snapshot.reserved.values()])

    def _begin(self, handle: int, salt: str | None) -> CachedSequence:
        """A new sequence, of which nothing is cached."""
        sequence = self.sequences[handle] = CachedSequence(salt=salt)
        if self._num_snapshots:
            if not self._places:
                self._places.append(self._num_places)
                self._num_places += 1
            sequence.snapshots = Snapshots(self._places.pop(), self._num_snapshots)
        return sequence

    def _straighten(self, sequence: CachedSequence, context: Sequence[int]) -> None:
        """Keep the path that a context takes through the drafted tree: move its keys, values and states to the text."""
        start, size, blocks = sequence.num_text, self._block_size, sequence.blocks
        path = sequence.take_path(context)
        places = [(start + node, start + i) for i, node in enumerate(path) if node != i]
        if places:
            slots = [(blocks[a // size] * size + a % size, blocks[b // size] * size + b % size) for a, b in places]
            self._storage.move(slots)
        if path and sequence.snapshots is not None:
            self._storage.move_states(sequence.snapshots, places)
            interval, end = self._prefix_states.interval, start + len(path)
            self._reserve_at(range(start // interval * interval + interval, end + 1, interval), sequence)
            for length, slot in sequence.snapshots.reserved.items():
                if length > start:
                    self._storage.keep(slot, sequence.snapshots, length)

    def _cut_back(self, sequence: CachedSequence, keep: int) -> int:
        """Cut back to `keep` tokens, or to fewer, from which the sequence can go on."""
        keep = self._cut(sequence, keep)
        if sequence.snapshots is None:
            return keep
        restorable = sequence.snapshots.restorable(keep)
        return keep if restorable == keep else self._cut(sequence, restorable)

    def _cut(self, sequence: CachedSequence, keep: int) -> int:
        """Cut back to `keep` tokens, or to a full block if another sequence reads the block to write next."""
        sequence.num_reserved = 0
        whole, rest = divmod(keep, self._block_size)
        if rest and whole < len(sequence.keys) and not self.pool.withdraw(sequence.blocks[whole]):
            keep -= rest
        del sequence.tokens[keep:]
        del sequence.keys[whole:]
        num_blocks = -(-keep // self._block_size)
        if num_blocks < len(sequence.blocks):
            self.pool.free(sequence.blocks[num_blocks:])
            del sequence.blocks[num_blocks:]
            sequence.in_one_piece = _neighbours(sequence.blocks)
        self._publish(sequence, keep)
        return keep

    def _publish(self, sequence: CachedSequence, num_tokens: int) -> None:
        """Make the whole blocks among the first tokens findable, and the snapshots that were stored for them."""
        size, snapshots = self._block_size, sequence.snapshots
        is_shared = sequence.salt is not None and not sequence.is_long
        for i in range(len(sequence.keys), num_tokens // size) if is_shared else ():
            key = sequence.keys[-1] if sequence.keys else root_key(sequence.salt or "")
            sequence.keys.append(key := block_key(key, sequence.tokens[i * size : (i + 1) * size]))
            self.pool.publish(sequence.blocks[i], key)
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

"""Cached contexts: the blocks of each sequence. Contexts with a common prefix share full blocks.

A whole block is found again by its key, a hash of all tokens up to its end and of the sequence's salt. It is published
once a context has grown past it, is never written while it can be found by others, and outlives its sequence in the
pool. Sequences without a salt share nothing.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from specdec_cli.errors import RunError
from specdec_cli.lm.cache.blocks import BlockPool
from specdec_cli.lm.cache.unread import Unread
from specdec_cli.lm.door import Row


@dataclass(slots=True)
class Held:
    """The cached context of one sequence.

    Args:
        tokens: whose keys and values are cached.
        blocks: where, in order.
        in_one_piece: whether these are neighbours.
        is_long: whether keys were turned by long rope's long frequencies.
        salt: shares blocks with sequences of the same salt; None shares none.
        keys: of its first whole blocks, those that were published.
        unread: tokens that stand-ins among them stand for.
    """

    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    in_one_piece: bool = True
    is_long: bool = False
    salt: str | None = None
    keys: list[bytes] = field(default_factory=list)
    unread: Unread | None = None

    def hold(self, tokens: list[int], unread: Unread | None) -> None:
        """Take note of what is cached now."""
        self.tokens, self.unread = tokens, unread

    def settle(self) -> None:
        """Put the tokens themselves in the place of what stands for them."""
        if self.unread is not None:
            self.tokens, self.unread = self.unread.known(self.tokens), None

    def common_prefix(self, context: list[int], limit: int) -> int:
        """How many first tokens of the context are cached, at most `limit`."""
        length = min(len(self.tokens), limit)
        if self.tokens[:length] == context[:length]:
            return length
        return next(i for i in range(length) if self.tokens[i] != context[i])


@dataclass(slots=True)
class Feed:
    """One row's part of a forward: tokens from `keep` on, the last `num_logits` of which want logits."""

    held: Held
    context: list[int]
    keep: int
    num_logits: int
    unread: Unread | None = None

    @property
    def num_tokens(self) -> int:
        """How many are fed."""
        return len(self.context) - self.keep

    def cut(self, num_tokens: int) -> list[Feed]:
        """So many tokens and, if there are more, the rest."""
        if self.num_tokens <= num_tokens:
            return [self]
        stop = self.keep + num_tokens
        later = min(self.num_logits, len(self.context) - stop)
        first = replace(self, context=self.context[:stop], num_logits=self.num_logits - later)
        return [first, replace(self, keep=stop, num_logits=later)]

    def settle(self) -> None:
        """Put the tokens themselves in the place of what stands for them."""
        if self.unread is not None:
            self.context, self.unread = self.unread.known(self.context), None


class Contexts:
    """The books of a cache.

    Args:
        name: of the model, for the error of a full cache.
        num_blocks: blocks in all.
        block_size: tokens in a block.
    """

    def __init__(self, name: str, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.held: dict[int, Held] = {}
        self._name = name
        self._block_size = block_size

    def adopt(self, handle: int, context: Sequence[int], salt: str) -> int:
        """Begin a sequence with the longest cached prefix of its context; at least one token is left to feed.

        Returns:
            How many tokens it holds.
        """
        assert handle not in self.held, "a sequence adopts before it is scored"
        held = self.held[handle] = Held(salt=salt)
        size, before = self._block_size, _root(salt)
        for start in range(0, len(context) - size, size):
            before = _key(before, context[start : start + size])
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
            RunError: the cache has too few free blocks, or a row's drafted tokens are no chain.
        """
        feeds = []
        for row in rows:
            held = self.held.setdefault(row.handle, Held())
            held.settle()
            context = row.as_chain()
            keep = held.common_prefix(context, len(context) - row.num_logits) if held.is_long == is_long else 0
            held.is_long = is_long
            feeds.append(Feed(held, context, self._cut(held, keep), row.num_logits, row.unread))
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
        return feeds

    def release(self, handle: int) -> None:
        """Forget a sequence and give its blocks back; unknown handles are fine."""
        held = self.held.pop(handle, None)
        if held is not None:
            held.settle()
            self._publish(held, len(held.tokens))
            self.pool.free(held.blocks)

    def spoil(self, held: Held) -> list[int]:
        """Drop a sequence with NaN keys or values; returns its blocks without another holder."""
        alone = [block for block in held.blocks if self.pool.withdraw(block)]
        self.pool.free(held.blocks)
        held.tokens, held.blocks, held.keys, held.in_one_piece = [], [], [], True
        return alone

    def check(self) -> None:
        """Assert that the pool's books and the sequences' agree, and that each holds the blocks that it needs."""
        self.pool.check([block for held in self.held.values() for block in held.blocks])
        for handle, held in self.held.items():
            needed = -(-len(held.tokens) // self._block_size)
            assert len(held.blocks) == needed, f"sequence {handle} holds {len(held.blocks)} blocks, needs {needed}"

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
            before = held.keys[-1] if held.keys else _root(held.salt)
            held.keys.append(_key(before, held.tokens[i * size : (i + 1) * size]))
            self.pool.publish(held.blocks[i], held.keys[-1])


def _root(salt: str) -> bytes:
    return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16, person=b"salt").digest()


def _key(before: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a block, from that of the one before it."""
    return hashlib.blake2b(array("q", tokens).tobytes(), digest_size=16, key=before).digest()


def _neighbours(blocks: list[int]) -> bool:
    """Whether blocks lie side by side, in order."""
    return not blocks or blocks == list(range(blocks[0], blocks[0] + len(blocks)))

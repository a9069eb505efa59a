"""How much KV cache each model gets: the engine plans with this before it runs, and `doctor` without loading anything.

Models on one device share what is left there beside their weights and one step's logits. By default their caches take
half of that, in rooms for equally many tokens: blocks of a draft beyond the target's, or of the target beyond the
draft's, could not be used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

from specdec_cli.drafted import MOST_NODES
from specdec_cli.errors import RunError

MOST_BLOCKS_APART = 64
"""A prefix that misses the next snapshot is read again from the one before: at most so many blocks."""
SPARE_TOKENS = 16
"""Room of a draft with another tokenizer for what it cuts into more tokens as the text grows."""
KVCacheBytes = int | None | Callable[[int, int], int | None]
_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class CacheNeed:
    """The requirements of one model's cache.

    Args:
        name: of the model.
        block_bytes: of one block's keys and values.
        num_blocks: number of blocks that give every sequence room for its whole context.
        state_bytes: of the states that recurrent layers keep of all sequences, beside the blocks.
        prefix_state_bytes: of a snapshot of them at the end of a cached prefix; 0 where prefixes are not shared.
        tokens_per_token: of this model's, for one of the target's: 1 unless their tokenizers differ.
    """

    name: str
    block_bytes: int
    num_blocks: int
    state_bytes: int = 0
    prefix_state_bytes: int = 0
    tokens_per_token: float = 1.0

    @property
    def planned_block_bytes(self) -> int:
        """Bytes to plan for a block: with its share of the fewest snapshots, but no more of them than of the block."""
        return self.block_bytes + min(self.block_bytes, -(-self.prefix_state_bytes // MOST_BLOCKS_APART))

    def beside(self, num_blocks: int) -> int:
        """Blocks for as much text as so many of the target's are for."""
        return int(num_blocks * self.tokens_per_token)

    def least_beside(self, num_blocks: int) -> int:
        """The fewest blocks beside so many of the target's.

        A draft with another tokenizer guesses nothing for texts that its cache has no room for.
        """
        return min(self.beside(num_blocks), num_blocks)

    def num_within(self, num_bytes: int) -> int:
        """Most blocks that so many bytes hold beside the states; blocks of a model without attention take none."""
        left, block_bytes = num_bytes - self.state_bytes, self.planned_block_bytes
        if left < 0:
            return 0
        return min(self.num_blocks, left // block_bytes) if block_bytes else self.num_blocks


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The cache of one model.

    Args:
        num_blocks: of keys and values.
        num_prefix_states: snapshots of recurrent states at the ends of cached prefixes.
    """

    num_blocks: int
    num_prefix_states: int = 0

    @property
    def blocks_apart(self) -> int:
        """N: a snapshot is stored after every N-th block of a text. They cover all blocks, or N is the largest."""
        if not self.num_prefix_states:
            return MOST_BLOCKS_APART
        return min(-(-self.num_blocks // self.num_prefix_states), MOST_BLOCKS_APART)

    def num_bytes(self, need: CacheNeed) -> int:
        """Memory of all of it."""
        of_prefixes = self.num_prefix_states * need.prefix_state_bytes
        return self.num_blocks * need.block_bytes + need.state_bytes + of_prefixes


@dataclass(frozen=True, slots=True)
class Room:
    """A device's memory, as models that run together may use it.

    Args:
        left_bytes: beside all weights and a step's logits.
        whole_bytes: what a share of the memory is a share of: a GPU's memory, the RAM that was free before loading.
        weight_bytes: what the models' weights take of it.
    """

    left_bytes: int
    whole_bytes: int
    weight_bytes: int


def logits_bytes(num_seqs: int, num_rows: int, width: int) -> int:
    """Memory of a step's logits, float32: `num_rows` of each sequence."""
    return num_seqs * num_rows * width * _FLOAT32_BYTES


def blocks_wanted(num_seqs: int, context: int, num_drafted: int, block_size: int) -> int:
    """Blocks with which so many sequences each have room for a whole context and drafted tokens."""
    return num_seqs * -(-(context + num_drafted) // block_size)


def draft_blocks_wanted(
    num_seqs: int,
    context: int,
    target_context: int,
    num_drafted: int,
    block_size: int,
    tokens_per_token: float = 1.0,
) -> int:
    """Blocks with which a draft has room for whatever the target has room for.

    The scheduler counts the target's blocks, and a request may bring a larger tree than the engine's. So a draft has as
    many blocks as the target, or, where its own context is shorter, room for the largest tree behind each context.

    Args:
        num_seqs: sequences that run together.
        context: the draft's limit.
        target_context: the target's.
        num_drafted: most drafted tokens of a sequence by the engine's options.
        block_size: tokens in a block.
        tokens_per_token: the draft's for one of the target's.
    """
    most_drafted = max(num_drafted, MOST_NODES)
    if tokens_per_token != 1.0:
        target_context = ceil(target_context * tokens_per_token)
        num_drafted, most_drafted = (ceil(num * tokens_per_token) + SPARE_TOKENS for num in (num_drafted, most_drafted))
    of_target = blocks_wanted(num_seqs, target_context, num_drafted, block_size)
    return min(of_target, blocks_wanted(num_seqs, min(context, target_context), most_drafted, block_size))


def plan_caches(needs: Sequence[CacheNeed], room: Room, num_seqs: int, given: KVCacheBytes = None) -> list[CachePlan]:
    """The cache of each model. Snapshots of states get what the blocks leave, at most one for each block.

    Args:
        needs: of the models that run on one device, at least one.
        room: the device's.
        num_seqs: sequences that run together: each needs a block.
        given: bytes of each cache; None shares half of what is left; a function is asked for the bytes of all with
            `whole_bytes` and `weight_bytes`.

    Raises:
        RunError: there is no room for a block of each sequence, or less memory than was asked for.
    """
    left = max(room.left_bytes, 0)
    if callable(given):
        share = given(room.whole_bytes, room.weight_bytes)
        budget = left // 2 if share is None else min(share, left)
    else:
        budget = left // 2
    if isinstance(given, int):
        planned = [_with_snapshots(need, need.num_within(given), given) for need in needs]
    else:
        most = _blocks_within(budget - sum(need.state_bytes for need in needs), needs)
        planned = _share_rest(needs, [min(need.num_blocks, need.beside(most)) for need in needs], budget)
    taken = sum(plan.num_bytes(need) for plan, need in zip(planned, needs, strict=True))
    if taken > left:
        raise RunError(
            f"the KV cache was to take {_gigabytes(taken)}, and {_gigabytes(left)} are left beside the weights",
            "lower engine.kv_cache_memory, max_num_seqs or max_model_len, or leave kv_cache_memory to auto",
        )
    short = [
        need for plan, need in zip(planned, needs, strict=True) if plan.num_blocks < min(num_seqs, need.num_blocks)
    ]
    if short:
        num_bytes = given if isinstance(given, int) else budget
        raise RunError(
            f"no room for the KV cache of `{short[0].name}`: {num_bytes:,} bytes are too few for a block of each of "
            f"{num_seqs} sequences",
            "run fewer sequences together, give the cache more memory, or choose a smaller model",
        )
    return planned


def _share_rest(needs: Sequence[CacheNeed], num_blocks: Sequence[int], budget: int) -> list[CachePlan]:
    """Plans with so many blocks, whose snapshots share evenly what is left of a budget."""
    pairs = list(zip(needs, num_blocks, strict=True))
    taken = [CachePlan(num).num_bytes(need) for need, num in pairs]
    num_sharing = sum(need.prefix_state_bytes > 0 for need in needs)
    share = max(budget - sum(taken), 0) // max(num_sharing, 1)
    return [_with_snapshots(need, num, of_blocks + share) for (need, num), of_blocks in zip(pairs, taken, strict=True)]


def _with_snapshots(need: CacheNeed, num_blocks: int, num_bytes: int) -> CachePlan:
    """A cache of so many blocks with the snapshots that fit into so many bytes beside them."""
    if not need.prefix_state_bytes:
        return CachePlan(num_blocks)
    left = max(num_bytes - CachePlan(num_blocks).num_bytes(need), 0)
    return CachePlan(num_blocks, min(num_blocks, left // need.prefix_state_bytes))


def check_draft_room(target_tokens: int, draft_tokens: int, wanted_tokens: int) -> None:
    """Refuse a draft whose cache cannot follow the target's.

    Args:
        target_tokens: room that the draft must have beside the target's cache (`CacheNeed.least_beside`).
        draft_tokens: room of the draft's.
        wanted_tokens: with which the draft's has room for everything.

    Raises:
        RunError: the draft's is smaller.
    """
    if draft_tokens < min(target_tokens, wanted_tokens):
        raise RunError(
            f"the draft's KV cache has room for `{draft_tokens}` tokens, fewer than the target's `{target_tokens}`",
            "give the caches more memory, or lower max_num_seqs or max_model_len",
        )


def _blocks_within(budget: int, needs: Sequence[CacheNeed]) -> int:
    """The largest number of the target's blocks that every cache can have room beside that wants so much."""
    rest = sorted(needs, key=lambda need: need.num_blocks / need.tokens_per_token)
    while rest:
        most = int(max(budget, 0) // max(sum(need.planned_block_bytes * need.tokens_per_token for need in rest), 1))
        if rest[0].beside(most) < rest[0].num_blocks or len(rest) == 1:
            return most
        budget -= rest[0].num_blocks * rest[0].planned_block_bytes
        rest = rest[1:]
    return 0


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"

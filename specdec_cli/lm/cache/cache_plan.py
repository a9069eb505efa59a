"""How much KV cache each model gets: the engine plans with this before it runs, and `doctor` without loading anything.

Models on one device share what is left there beside their weights and one step's logits. By default their caches take
half of that, in rooms for equally many tokens: blocks of a draft beyond the target's, or of the target beyond the
draft's, could not be used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdec_cli.drafted import MOST_NODES
from specdec_cli.errors import RunError

KVCacheBytes = int | None | Callable[[int, int], int | None]
_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class CacheNeed:
    """The requirements of one model's cache.

    Args:
        name: of the model.
        block_bytes: of one block's keys and values.
        num_blocks: with which every sequence has room for its whole context.
        state_bytes: of the states that recurrent layers keep of all sequences, beside the blocks.
    """

    name: str
    block_bytes: int
    num_blocks: int
    state_bytes: int = 0

    def num_within(self, num_bytes: int) -> int:
        """Most blocks that so many bytes hold beside the states; blocks of a model without attention take none."""
        left = num_bytes - self.state_bytes
        if left < 0:
            return 0
        return min(self.num_blocks, left // self.block_bytes) if self.block_bytes else self.num_blocks


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


def draft_blocks_wanted(num_seqs: int, context: int, target_context: int, num_drafted: int, block_size: int) -> int:
    """Blocks with which a draft has room for whatever the target has room for.

    The scheduler counts the target's blocks, and a request may bring a larger tree than the engine's. So a draft has as
    many blocks as the target, or, where its own context is shorter, room for the largest tree behind each context.

    Args:
        num_seqs: sequences that run together.
        context: the draft's limit.
        target_context: the target's.
        num_drafted: most drafted tokens of a sequence by the engine's options.
        block_size: tokens in a block.
    """
    of_target = blocks_wanted(num_seqs, target_context, num_drafted, block_size)
    most_drafted = max(num_drafted, MOST_NODES)
    return min(of_target, blocks_wanted(num_seqs, min(context, target_context), most_drafted, block_size))


def plan_blocks(needs: Sequence[CacheNeed], room: Room, num_seqs: int, given: KVCacheBytes = None) -> list[int]:
    """Blocks of each model's cache.

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
        planned = [need.num_within(given) for need in needs]
    else:
        most = _blocks_within(budget - sum(need.state_bytes for need in needs), needs)
        planned = [min(need.num_blocks, most) for need in needs]
    taken = sum(num * need.block_bytes + need.state_bytes for num, need in zip(planned, needs, strict=True))
    if taken > left:
        raise RunError(
            f"the KV cache was to take {_gigabytes(taken)}, and {_gigabytes(left)} are left beside the weights",
            "lower engine.kv_cache_memory, max_num_seqs or max_model_len, or leave kv_cache_memory to auto",
        )
    short = next((need for num, need in zip(planned, needs, strict=True) if num < min(num_seqs, need.num_blocks)), None)
    if short is not None:
        each = given if isinstance(given, int) else budget
        raise RunError(
            f"no room for the KV cache of `{short.name}`: {each:,} bytes are too few for a block of each of {num_seqs} "
            "sequences",
            "run fewer sequences together, give the cache more memory, or choose a smaller model",
        )
    return planned


def check_draft_room(target_tokens: int, draft_tokens: int, wanted_tokens: int) -> None:
    """Refuse a draft whose cache cannot follow the target's.

    Args:
        target_tokens: room of the target's cache.
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
    """The largest number of blocks that every cache can have that wants so many."""
    rest = sorted(needs, key=lambda need: need.num_blocks)
    while rest:
        most = max(budget, 0) // max(sum(need.block_bytes for need in rest), 1)
        if most < rest[0].num_blocks or len(rest) == 1:
            return most
        budget -= rest[0].num_blocks * rest[0].block_bytes
        rest = rest[1:]
    return 0


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"

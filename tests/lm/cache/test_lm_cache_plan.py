"""Who gets how much KV cache: rooms for equally many tokens, and nothing beyond what is left."""

import pytest

from specdec_cli.errors import RunError
from specdec_cli.lm.cache.cache_plan import (
    CacheNeed,
    CachePlan,
    KVCacheBytes,
    Room,
    check_draft_room,
    draft_blocks_wanted,
    logits_bytes,
    plan_caches,
)


def need(block_bytes: int, num_blocks: int) -> CacheNeed:
    return CacheNeed(f"m{block_bytes}", block_bytes, num_blocks)


def plan_blocks(needs: list[CacheNeed], room: Room, num_seqs: int, given: KVCacheBytes = None) -> list[int]:
    return [plan.num_blocks for plan in plan_caches(needs, room, num_seqs, given)]


def room(left: int, whole: int = 0, weights: int = 0) -> Room:
    return Room(left, whole, weights)


@pytest.mark.parametrize(
    ("left", "needs", "planned"),
    [
        (10_000, [need(10, 40)], [40]),
        (1_000, [need(10, 90)], [50]),
        (1_000, [need(8, 90), need(2, 90)], [50, 50]),
        (1_000, [need(8, 90), need(2, 20)], [57, 20]),
        (1_000, [need(8, 30), need(2, 900)], [30, 130]),
        (1_000, [need(8, 20), need(2, 20), need(1, 30)], [20, 20, 30]),
        (1_001, [need(3, 999), need(3, 999), need(4, 999)], [50, 50, 50]),
    ],
)
def test_caches_share_half_of_what_is_left(left: int, needs, planned: list[int]) -> None:
    assert plan_blocks(needs, room(left), 1) == planned
    assert sum(n * one.block_bytes for n, one in zip(planned, needs, strict=True)) <= left // 2


def test_a_share_is_of_the_whole_memory_and_never_more_than_is_left() -> None:
    asked = []

    def ninety_percent(whole: int, weights: int) -> int:
        asked.append((whole, weights))
        return whole * 9 // 10 - weights

    needs = [need(8, 900), need(2, 900)]
    assert plan_blocks(needs, room(700, 1_000, 300), 1, ninety_percent) == [60, 60]
    assert plan_blocks(needs, room(500, 1_000, 300), 1, ninety_percent) == [50, 50]
    assert asked == [(1_000, 300)] * 2
    assert plan_blocks(needs, room(500), 1, lambda *_: None) == [25, 25]


def test_bytes_are_for_each_cache() -> None:
    assert plan_blocks([need(8, 90), need(2, 90)], room(1_000), 1, 400) == [50, 90]


@pytest.mark.parametrize("left", [0, -5, 579])
def test_more_than_is_left_is_refused(left: int) -> None:
    with pytest.raises(RunError, match="KV cache was to take"):
        plan_blocks([need(8, 90), need(2, 90)], room(left), 1, 400)


def test_more_than_is_left_may_be_named_where_less_is_wanted() -> None:
    assert plan_blocks([need(8, 10)], room(100), 1, 10**12) == [10]


@pytest.mark.parametrize(("left", "given"), [(-1, None), (0, None), (159, None), (10_000, 79), (159, lambda *_: 79)])
def test_every_sequence_needs_a_block(left: int, given) -> None:
    with pytest.raises(RunError, match="no room for the KV cache of `m10`"):
        plan_blocks([need(10, 100)], room(left), 8, given)
    assert plan_blocks([need(10, 100)], room(10_000), 8, 80) == [8]


def test_a_draft_s_room_follows_the_target_s() -> None:
    check_draft_room(100, 100, 200)
    check_draft_room(100, 64, 64)
    with pytest.raises(RunError, match="room for `64` tokens, fewer than the target's `100`"):
        check_draft_room(100, 64, 65)


@pytest.mark.parametrize(
    ("left", "ratio", "planned"),
    [
        (20_000, 3.0, [100, 300]),  # all that is wanted
        (1_000, 3.0, [31, 93]),
        (1_000, 0.5, [45, 22]),
        (1_000, 1.0, [41, 41]),
    ],
)
def test_a_draft_of_other_tokens_has_room_for_the_same_texts(left: int, ratio: float, planned: list[int]) -> None:
    draft = CacheNeed("other", 2, int(100 * ratio), tokens_per_token=ratio)
    assert plan_blocks([need(10, 100), draft], room(left), 1) == planned
    assert plan_blocks([draft, need(10, 100)], room(left), 1) == planned[::-1]
    assert 10 * planned[0] + 2 * planned[1] <= left // 2 or planned[0] == 100
    assert planned[1] >= draft.least_beside(planned[0])


def test_a_draft_wants_room_for_the_targets_texts_in_its_own_tokens() -> None:
    assert draft_blocks_wanted(4, 4_000, 1_000, 4, 16) == 4 * 63
    assert draft_blocks_wanted(4, 4_000, 1_000, 4, 16, 3.0) == 4 * 190  # 3,000 tokens, 12 guessed and 16 spare
    assert draft_blocks_wanted(4, 4_000, 1_000, 4, 16, 0.5) == 4 * 33
    assert draft_blocks_wanted(4, 1_500, 1_000, 4, 16, 3.0) < 4 * 120, "it reads no more"


def test_logits_are_float32() -> None:
    assert logits_bytes(8, 5, 1_000) == 8 * 5 * 1_000 * 4


def test_states_are_counted_beside_the_blocks() -> None:
    stateful = CacheNeed("hybrid", block_bytes=10, num_blocks=90, state_bytes=200)
    assert plan_blocks([stateful], room(1_000), 1) == [30]
    assert plan_blocks([stateful, need(10, 90)], room(1_000), 1) == [15, 15]
    assert plan_blocks([stateful], room(1_000), 1, given=400) == [20]
    with pytest.raises(RunError, match="too few for a block"):
        plan_blocks([stateful], room(1_000), 1, given=200)


def test_blocks_of_a_model_without_attention_take_no_memory() -> None:
    recurrent = CacheNeed("mamba", block_bytes=0, num_blocks=90, state_bytes=200)
    assert plan_blocks([recurrent], room(1_000), 1) == [90]
    assert plan_blocks([recurrent], room(1_000), 1, given=200) == [90]
    with pytest.raises(RunError, match="too few for a block"):
        plan_blocks([recurrent], room(1_000), 1, given=199)


SHARING = CacheNeed("hybrid", block_bytes=10, num_blocks=90, state_bytes=200, prefix_state_bytes=70)
LARGE = CacheNeed("hybrid", block_bytes=10, num_blocks=90, state_bytes=200, prefix_state_bytes=640)


@pytest.mark.parametrize(
    ("left", "needs", "planned", "blocks_apart"),
    [
        (20_000, [SHARING], [CachePlan(90, 90)], 1),  # each block has its own
        (8_000, [SHARING], [CachePlan(90, 41)], 3),  # what the blocks leave
        (4_000, [SHARING], [CachePlan(90, 12)], 8),
        (4_000, [SHARING, need(10, 90)], [CachePlan(81, 2), CachePlan(81)], 41),
        (1_000, [SHARING], [CachePlan(25, 0)], 64),
        (4_000, [LARGE], [CachePlan(90, 1)], 64),
        (3_000, [LARGE], [CachePlan(65, 1)], 64),  # as much as the blocks
    ],
)
def test_snapshots_take_what_blocks_leave(
    left: int, needs: list[CacheNeed], planned: list[CachePlan], blocks_apart: int
) -> None:
    found = plan_caches(needs, room(left), 1)
    assert found == planned
    assert found[0].blocks_apart == blocks_apart
    assert sum(plan.num_bytes(one) for plan, one in zip(found, needs, strict=True)) <= left // 2


def test_snapshots_of_a_model_without_attention_take_what_is_left() -> None:
    recurrent = CacheNeed("mamba", block_bytes=0, num_blocks=90, state_bytes=200, prefix_state_bytes=70)
    assert plan_caches([recurrent], room(1_000), 1) == [CachePlan(90, 4)]
    assert plan_caches([recurrent, recurrent], room(2_000), 1) == [CachePlan(90, 4)] * 2
    assert plan_caches([SHARING], room(9_999), 1, given=1_000) == [CachePlan(66, 2)]

"""Which sequences run, how prompts are cut into chunks, and how many tokens may be drafted."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typed import stand_in

from specdec_cli.engine.depth.depth import KSchedule
from specdec_cli.engine.scheduler import Limits, Scheduler, StepRow
from specdec_cli.engine.sequence import Sequence
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.verification import RULES


def limits(**changes) -> Limits:
    values = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "prefill_chunk": 16,
        "k_by_batch": KSchedule(4),
        "k_by_context": KSchedule(64),
        "max_context": 100,
        "num_blocks": 100,
        "block_size": 4,
    }
    return Limits(**stand_in(values | changes))


def request(number: int, length: int, k: int = 4, max_new_tokens: int = 10, max_context: int = 100) -> Sequence:
    return Sequence(
        id=number,
        tokens=[1] * length,
        num_prompt_tokens=length,
        params=SamplingParams(max_new_tokens=max_new_tokens),
        stop_ids=frozenset(),
        rule=RULES["greedy"],
        k=k,
        max_tokens=min(length + max_new_tokens, max_context),
        text=None,
    )


def scheduled(scheduler: Scheduler, num_cached: int | None = None, preempted: list[int] | None = None) -> list[StepRow]:
    """A step's rows.

    Args:
        scheduler: of the sequences.
        num_cached: tokens that an admitted sequence finds in the cache; None leaves it as it is.
        preempted: takes the ids of the sequences that were sent back.
    """
    sent_back = scheduler.preempt()
    if preempted is not None:
        preempted += [one.id for one in sent_back]
    for one in scheduler.admit():
        one.num_computed = one.num_computed if num_cached is None else num_cached
    return scheduler.rows()


def fed(scheduler: Scheduler, preempted: list[int] | None = None) -> list[tuple[int, int, int]]:
    """Run a step's scheduling and take it as done: (id, fed so far, k) of every row."""
    rows = scheduled(scheduler, preempted=preempted)
    for row in rows:
        row.sequence.num_computed = row.num_fed
        if row.is_decided:
            row.sequence.tokens.append(2)
    return [(row.sequence.id, row.num_fed, row.k) for row in rows]


def test_first_come_first_served() -> None:
    scheduler = Scheduler(limits(max_num_seqs=2))
    requests = [request(i, 3) for i in range(4)]
    for one in requests:
        scheduler.add(one)
    assert [row[0] for row in fed(scheduler)] == [0, 1]
    assert [one.id for one in scheduler.waiting] == [2, 3]
    scheduler.remove(requests[2])
    scheduler.remove(requests[0])
    assert [row[0] for row in fed(scheduler)] == [1, 3]


def test_a_request_waits_until_its_prompt_fits_with_a_block_to_spare_for_each_that_runs() -> None:
    # Each needs (3 + 4 + 1) / 4 = 2 blocks, and 3 after its first token.
    scheduler = Scheduler(limits(num_blocks=7))
    requests = [request(i, 3) for i in range(4)]
    for one in requests:
        scheduler.add(one)
    assert [row[0] for row in fed(scheduler)] == [0, 1]
    scheduler.remove(requests[0])
    assert [row[0] for row in fed(scheduler)] == [1, 2]


def test_a_large_request_is_not_overtaken() -> None:
    scheduler = Scheduler(limits(num_blocks=11))
    for one in (request(0, 3), request(1, 30), request(2, 3)):
        scheduler.add(one)
    assert [row[0] for row in fed(scheduler)] == [0]


def test_the_youngest_is_preempted_and_computes_again_without_deciding() -> None:
    stopped = []
    scheduler = Scheduler(limits(num_blocks=8))
    older, younger, newest = (request(i, 6, max_new_tokens=12) for i in range(3))
    for one in (older, younger, newest):
        scheduler.add(one)
    assert [row[0] for row in fed(scheduler)] == [0, 1]
    while not stopped:
        rows = fed(scheduler, stopped)
    assert stopped == [1]
    assert rows == [(0, len(older.tokens) - 1, 4)]
    assert [one.id for one in scheduler.waiting] == [1, 2], "in front of all others"
    length = len(younger.tokens)
    assert (younger.num_computed, length) > (0, 6)
    scheduler.remove(older)
    assert fed(scheduler)[0] == (1, length - 1, 0), "all but the last token, and none is emitted"
    assert len(younger.tokens) == length
    assert fed(scheduler)[0] == (1, length, 4), "then the step that would have come"


def test_what_is_cached_is_not_fed() -> None:
    scheduler = Scheduler(limits())
    scheduler.add(request(0, 20))
    assert [(row.num_fed, row.num_prefill_tokens) for row in scheduled(scheduler, num_cached=12)] == [(20, 8)]


def test_prompts_are_cut_at_multiples_of_the_chunk() -> None:
    scheduler = Scheduler(limits(max_num_batched_tokens=20))
    scheduler.add(request(0, 40))
    scheduler.add(request(1, 5))
    # 16 of the first fill the step but for 4, in which the second's only chunk of 5 has no room.
    assert fed(scheduler) == [(0, 16, 0)]
    assert fed(scheduler) == [(0, 32, 0)]
    assert fed(scheduler) == [(0, 40, 0), (1, 5, 0)]
    assert fed(scheduler) == [(0, 41, 4), (1, 6, 4)]


def test_a_chunk_larger_than_the_budget_is_fed_alone() -> None:
    scheduler = Scheduler(limits(max_num_batched_tokens=3))
    scheduler.add(request(0, 20))
    scheduler.add(request(1, 2))
    assert fed(scheduler) == [(0, 16, 0)]
    assert fed(scheduler) == [(0, 20, 0)]
    assert fed(scheduler) == [(0, 21, 4), (1, 2, 0)]


@pytest.mark.parametrize(("length", "k"), [(29, 4), (30, 4), (31, 3), (33, 1), (34, 0), (60, 0)])
def test_k_within_the_drafts_context(length: int, k: int) -> None:
    """The last drafted token is scored from length + k - 1 tokens."""
    scheduler = Scheduler(limits())
    one = request(0, length, max_new_tokens=30)
    one.draft_max_context = 33
    scheduler.add(one)
    one.tokens, one.num_prompt_tokens, one.num_computed = [1] * length, length - 1, length - 1
    assert fed(scheduler) == [(0, length, k)]
    assert one.is_past_draft == (length + 1 > 33)


@pytest.mark.parametrize(("room", "k"), [(1, 0), (2, 1), (4, 3), (5, 4), (9, 4)])
def test_k_within_what_may_still_be_emitted(room: int, k: int) -> None:
    scheduler = Scheduler(limits())
    one = request(0, 10)
    scheduler.add(one)
    one.num_prompt_tokens, one.num_computed, one.max_tokens = 9, 9, 10 + room
    assert fed(scheduler) == [(0, 10, k)]


def test_no_drafting_in_a_large_batch() -> None:
    scheduler = Scheduler(limits(k_by_batch=KSchedule.by_batch(4, (), 2)))
    requests = [request(i, 2) for i in range(3)]
    for one in requests:
        scheduler.add(one)
    fed(scheduler)
    assert [k for _, _, k in fed(scheduler)] == [0, 0, 0]
    scheduler.remove(requests[1])
    assert [k for _, _, k in fed(scheduler)] == [4, 4]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    chunk=st.integers(1, 40),
    budget=st.integers(1, 70),
    num_seqs=st.integers(1, 5),
    num_blocks=st.integers(26, 60),
)
def test_every_request_is_fed_once_within_the_limits(lengths, chunk, budget, num_seqs, num_blocks) -> None:
    scheduler = Scheduler(
        limits(max_num_seqs=num_seqs, prefill_chunk=chunk, max_num_batched_tokens=budget, num_blocks=num_blocks)
    )
    requests = [request(i, length) for i, length in enumerate(lengths)]
    for one in requests:
        scheduler.add(one)
    ends = []
    for _ in range(2_000):
        if not (scheduler.running or scheduler.waiting):
            break
        rows = scheduled(scheduler)
        assert rows, "a step that nothing runs in would never end"
        assert len(rows) <= len(scheduler.running) <= num_seqs
        assert sum(map(scheduler.num_blocks_next, scheduler.running)) <= num_blocks
        assert sum(row.num_prefill_tokens for row in rows) <= max(budget, chunk)
        for row in rows:
            one = row.sequence
            length = one.num_prompt_tokens
            assert one.num_computed < row.num_fed
            assert row.num_fed % chunk == 0 or row.num_fed >= length
            assert len(one.tokens) + row.k <= one.max_tokens
            if row.is_decided:
                one.num_computed = len(one.tokens)
                one.tokens.append(2)
            else:
                one.num_computed = row.num_fed
            if one.room == 0:
                scheduler.remove(one)
                ends.append(one.id)
    assert sorted(ends) == list(range(len(lengths)))


def turns(scheduler: Scheduler) -> list[str]:
    return [one.turn for one in scheduler.running]


def of_turn(number: int, turn: str, length: int = 3) -> Sequence:
    made = request(number, length)
    made.turn = turn
    return made


def test_a_turn_with_several_places_gives_one_to_a_turn_that_has_none() -> None:
    stopped: list[int] = []
    scheduler = Scheduler(limits(max_num_seqs=4))
    for i in range(6):
        scheduler.add(of_turn(i, "many"))
    fed(scheduler, stopped)
    scheduler.add(of_turn(6, "few"))
    scheduler.add(of_turn(7, "few"))
    scheduler.add(of_turn(8, "other"))
    fed(scheduler, stopped)
    assert (turns(scheduler), stopped) == (["many", "many", "many", "few"], [3])
    fed(scheduler, stopped)
    assert (turns(scheduler), stopped) == (["many", "many", "few", "other"], [3, 2])
    for _ in range(3):
        fed(scheduler, stopped)
    assert turns(scheduler) == ["many", "many", "few", "other"], "every turn has a place: nobody is preempted again"
    scheduler.remove(next(one for one in scheduler.running if one.turn == "other"))
    fed(scheduler, stopped)
    assert scheduler.running[-1].id == 2, "the preempted sequence is the first to go on"


def test_a_turn_gives_up_blocks_for_another_one() -> None:
    scheduler = Scheduler(limits(num_blocks=12))
    for i in range(3):
        scheduler.add(of_turn(i, "many", 4))
    fed(scheduler)
    assert len(scheduler.running) == 3
    scheduler.add(of_turn(3, "few", 12))
    fed(scheduler)
    assert turns(scheduler)[-1] == "few"


def test_a_single_sequence_of_a_turn_is_never_preempted_for_another() -> None:
    scheduler = Scheduler(limits(max_num_seqs=2))
    for i, turn in enumerate("abc"):
        scheduler.add(of_turn(i, turn))
    fed(scheduler)
    assert turns(scheduler) == ["a", "b"]


def decoded(scheduler: Scheduler) -> list[int]:
    """The ids of the next step's rows, in order."""
    return sorted(number for number, _, _ in fed(scheduler))


def test_a_turn_with_many_rows_decodes_a_few_at_a_time_beside_a_turn_with_one() -> None:
    """Issue 49, C18: 64 choices beside one request made each of its steps several times as dear."""
    scheduler = Scheduler(limits(max_num_seqs=30, max_num_batched_tokens=1000, num_blocks=1000))
    for i in range(20):
        scheduler.add(of_turn(i, "many"))
    assert decoded(scheduler) == list(range(20)), "all prompts are fed"
    assert decoded(scheduler) == list(range(20)), "alone, a turn has the whole step"
    scheduler.add(of_turn(20, "few"))
    fed(scheduler)
    steps = [decoded(scheduler) for _ in range(5)]
    assert all(20 in ids and len(ids) == 5 for ids in steps), "the single one decodes in every step"
    assert set().union(*steps) == set(range(21)), "and of the others each has its turn"


def test_turns_of_like_size_share_every_step() -> None:
    scheduler = Scheduler(limits(max_num_seqs=30, max_num_batched_tokens=1000, num_blocks=1000))
    for i in range(24):
        scheduler.add(of_turn(i, f"turn {i % 3}"))
    fed(scheduler)
    assert len(decoded(scheduler)) == 24
    scheduler.add(of_turn(24, "turn 3"))
    fed(scheduler)
    assert len(decoded(scheduler)) == 4, "one of each larger turn: no more than four beside the single one"

"""The benchmark: whose turn it is, what counts, what is compared, and what follows from the seconds."""

from dataclasses import replace
from typing import Any

import pytest
from toy_engine import END, LetterTokenizer, TableLM, toy_engine
from typed import not_none, stand_in

from specdec_cli.engine.arms import ArmRun, EngineArm
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.options import EngineOptions
from specdec_cli.engine.prompts import PromptRow
from specdec_cli.measure.bench.bench import Bench
from specdec_cli.measure.bench.passes import Group, Pass, Track
from specdec_cli.measure.bench.step_split import StepSplit, costs_of
from specdec_cli.measure.bench.verdict import _why, load_of, sentences
from specdec_cli.measure.workload.workload import tokenize
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.timing import Timing

ROWS = [
    PromptRow(i, prompt, category=task)
    for i, (prompt, task) in enumerate([("ab ab", "x"), ("cd", "y"), ("e f", "x"), ("gh", "x")])
]


def workload(rows=ROWS, num=12, **params):
    encode = LetterTokenizer().encode
    return tokenize(rows, "mine", lambda row: encode(row.prompt), SamplingParams(max_new_tokens=num, **params), 512)


def bench(engine=None, repeats=1, batch_size=1, **more) -> Bench:
    engine = engine or toy_engine(max_num_seqs=batch_size)
    arms = EngineArm("with", engine, more.pop("k", 4)), EngineArm("without", engine, 0)
    return Bench(more.pop("work", None) or workload(), *arms, batch_size=batch_size, repeats=repeats, **more)


def test_a_table_of_k_decides_what_the_draft_s_arm_drafts() -> None:
    engine = toy_engine(k=2)
    engine = Engine(
        engine.target,
        engine.drafter,
        stand_in(LetterTokenizer()),
        EngineOptions(num_speculative_tokens=2, k_by_batch=((1, 5),)),
    )
    one = ran(bench(engine, k=None))
    assert len(one.draft.counts().per_position_acceptance_rates) == 5


def ran(one: Bench) -> Bench:
    list(one.run())
    return one


class Other:
    """An arm that notes its turns and takes known seconds."""

    is_computing = True

    def __init__(self, name, turns, seconds=1.0) -> None:
        self.name, self.turns, self.seconds = name, turns, seconds

    def start(self) -> None:
        self.turns.append((self.name, "started"))

    def run(self, requests, stopped):
        self.turns.append((self.name, requests[0].row.index, requests[0].params.max_new_tokens))
        return made(requests, self.seconds)

    def stop(self) -> None:
        self.turns.append((self.name, "stopped"))


def made(requests, seconds, num=11, first=1) -> ArmRun:
    timing = Timing(0.1, seconds, seconds + 0.1, None)
    return ArmRun(tuple((1,) * num for _ in requests), timing, first * len(requests))


def test_arms_take_turns_and_turn_round() -> None:
    turns: list[Any] = []
    one = bench(toy_engine(), repeats=2, others=[Other("p", turns), Other("q", turns)])
    order = [progress.arm for progress in one.run()]
    draft, plain = one.draft.name, one.plain.name
    assert order[:4] == [f"warming up {name}" for name in (draft, plain, "p", "q")]
    there, back = [draft, plain, "p", "q"], ["q", "p", plain, draft]
    assert order[4:-1] == (there + back) * 2 + (back + there) * 2
    places = [request.row.index for group in one.groups() for request in group.requests]
    assert [turn[1] for turn in turns if turn[0] == "p"] == ["started", places[0], *places, *places, "stopped"]


def test_warm_up_is_short_and_thrown_away() -> None:
    turns: list[Any] = []
    one = ran(bench(toy_engine(), work=workload(num=30), others=[Other("p", turns)]))
    assert [turn[-1] for turn in turns[1:-1]] == [16, *[30] * 4]
    assert [len(track.passes) for track in (one.draft, one.plain, one.against["p"])] == [4, 4, 4]


def placed(one: Bench) -> list[tuple[str, list[int]]]:
    return [(group.task, [request.row.index for request in group.requests]) for group in one.groups()]


def test_a_batch_is_full_whatever_the_tasks_and_says_what_is_left() -> None:
    assert placed(bench()) == [("x", [0]), ("y", [1]), ("x", [2]), ("x", [3])]
    two, three = ran(bench(batch_size=2)), ran(bench(batch_size=3, repeats=2))
    assert placed(two) == [("", [0, 1]), ("", [2, 3])]
    assert (two.group_sizes(), two.notices) == ({2: 2}, [])
    assert placed(three) == [("", [0, 1, 2]), ("", [3])]
    assert three.group_sizes() == {3: 1, 1: 1}
    assert three.notices == ["4 prompts do not fill batches of 3: the last is of 1"]
    assert "holds prompts of several tasks" in not_none(three.hidden_tasks)
    alone = bench(batch_size=2, work=workload(ROWS[2:]))
    assert (placed(alone), alone.hidden_tasks) == ([("x", [2, 3])], None)


def test_by_task_a_mixed_batch_knows_the_acceptance_and_no_times() -> None:
    alone, mixed = ran(bench()), ran(bench(batch_size=3))
    for task in ("x", "y"):
        one, other = alone.draft.counts(task), mixed.draft.counts(task)
        assert one.acceptance_histogram == other.acceptance_histogram
        assert (one.num_draft_tokens, one.num_steps) == (other.num_draft_tokens, other.num_steps)
        assert alone.speedup("decode", task) is not None
        assert mixed.speedup("decode", task) is None
        assert mixed.draft.timing(task) == Timing()
    assert mixed.tasks() == ["x", "y"]
    seconds = sum(mixed.draft.counts(task).verify_seconds for task in ("x", "y"))
    assert seconds == pytest.approx(mixed.draft.counts().verify_seconds)


def test_tokens_stand_beside_their_own_request() -> None:
    """Tasks taking turns, a batch is not in the order of its rows."""
    work = workload([replace(ROWS[0], category="x"), replace(ROWS[1], category="x"), replace(ROWS[2], category="y")])
    alone, mixed = ran(bench(work=work)), ran(bench(batch_size=3, work=work))
    assert placed(mixed) == [("", [0, 2, 1])]
    first, second = (
        {
            request.row.index: tokens
            for found in one.draft.passes
            for request, tokens in zip(found.group.requests, not_none(found.run.token_ids), strict=True)
        }
        for one in (alone, mixed)
    )
    assert first == second
    assert len(set(first.values())) == 3


@pytest.mark.parametrize("batch_size", [1, 3])
def test_every_token_is_compared_and_counted(batch_size: int) -> None:
    one = ran(bench(batch_size=batch_size, repeats=2))
    found = one.differences()
    assert (found.checked_tokens, found.mismatches, found.first_divergence) == (2 * 4 * 12, 0, None)
    assert one.draft.counts().num_emitted_tokens == one.plain.counts().num_emitted_tokens == 2 * 4 * 11
    assert one.draft.counts().num_draft_tokens > 0
    assert one.plain.counts().num_draft_tokens == 0
    by_task = [one.draft.counts(task).num_emitted_tokens for task in one.tasks()]
    assert (one.tasks(), sum(by_task)) == (["x", "y"], 88)
    assert one.draft.counts().num_steps < one.plain.counts().num_steps
    assert not_none(load_of(one.plain)).num_sequences == one.plain.counts().num_steps / one.plain.num_steps


def test_a_draft_that_changes_a_token_is_found() -> None:
    one = bench()
    group = one.groups()[1]
    for arm, track in ((one.draft_arm, one.draft), (one.plain_arm, one.plain)):
        track.add(Pass(group, 0, not_none(arm.run(group.requests, lambda: False))))
    tokens = list(not_none(one.draft.passes[0].run.token_ids)[0])
    tokens[5] = tokens[5] % 9 + 1
    wrong = replace(one.draft.passes[0].run, token_ids=(tuple(tokens),))
    one.draft.passes[0] = replace(one.draft.passes[0], run=wrong)
    found = one.differences()
    row = group.requests[0].row.index
    assert found.as_json() == {
        "checked_tokens": 12, "mismatches": 1, "first_divergence": {"index": row, "position": 5},
    }  # fmt: skip


def test_end_tokens_are_respected() -> None:
    target = TableLM()
    target.table[..., END] = 6.0
    one = ran(bench(toy_engine(target=target), work=workload(num=200)))
    lengths = [len(tokens) for found in one.draft.passes for tokens in not_none(found.run.token_ids)]
    assert max(lengths) < 200
    assert one.differences().mismatches == 0


def test_an_interruption_keeps_what_is_whole() -> None:
    one = bench(repeats=3)
    calls = 0

    def stopped():
        nonlocal calls
        calls += 1
        return calls > 120

    list(one.run(stopped))
    assert 0 < len(one.draft.passes) < 12
    assert abs(len(one.draft.passes) - len(one.plain.passes)) <= 1
    assert not stand_in(one.plain_arm).engine.has_work


def timed(draft_seconds, plain_seconds, repeats=1) -> Bench:
    """A benchmark that took known seconds: by group, ten decoded tokens each."""
    one = bench(repeats=repeats)
    requests = one.workload.requests
    for track, seconds in ((one.draft, draft_seconds), (one.plain, plain_seconds)):
        for place, by_repeat in enumerate(seconds):
            for repeat, each in enumerate(by_repeat):
                task = "x" if place % 2 else "y"
                group = Group(place, task, (requests[place % 4],))
                track.add(Pass(group, repeat, made(group.requests, each)))
    return one


def test_the_speed_up_is_the_median_over_prompts_of_medians_over_repeats() -> None:
    twice, thrice, once = ([1, 9, 1], [2, 2, 2]), ([1, 1, 1], [3, 30, 3]), ([2, 2, 2], [2, 2, 2])
    one = timed(*zip(*[twice, thrice, twice, thrice, once, once], strict=True))
    decode = one.speedup("decode")
    assert (not_none(decode).median, not_none(decode).ci95, not_none(decode).pairs) == (
        2.0,
        pytest.approx((1.0, 3.0)),
        6,
    )
    assert not_none(one.speedup("decode", "x")).median == pytest.approx(3.0)
    assert not_none(one.speedup("latency")).median == pytest.approx(2.1 / 1.1)


def test_one_prompt_has_an_interval_over_its_repeats_and_none_without() -> None:
    several = timed([[1] * 6], [[2, 3, 2, 3, 2, 3]]).speedup("decode")
    assert not_none(several).pairs == 6
    assert [not_none(several).median, *not_none(not_none(several).ci95)] == pytest.approx([2.5, 2.0, 3.0])
    assert not_none(timed([[1]], [[2]]).speedup("decode")).ci95 is None
    few = timed([[1] * 9] * 3, [[2] * 9, [3] * 9, [4] * 9]).speedup("decode")
    assert (not_none(few).pairs, *not_none(not_none(few).ci95)) == (3, 2.0, 4.0), (
        "repeats of three prompts are three pairs, and the interval their range"
    )


def test_an_output_that_ends_at_once_has_no_decode_speed() -> None:
    group = Group(0, "x", workload().requests[:1])
    one = Pass(group, 0, made(group.requests, 0.0, num=1))
    assert one.seconds_per_token("decode") is None
    assert one.seconds_per_token("latency") == pytest.approx(0.1)
    assert timed([], []).speedup("decode") is None
    assert sentences(timed([], [])) == ["Nothing was measured: no prompt decoded a second token in both arms."]


def test_it_says_what_is_sure_and_what_is_not() -> None:
    sure = sentences(timed([[1], [1.1], [1]] * 4, [[2], [2.1], [1.9]] * 4))[0]
    assert sure.startswith("Decoding is faster with the draft: 1.9")
    unsure = sentences(timed([[1], [2], [1.5]] * 2, [[1.2], [1.7], [1.5]] * 2))[0]
    assert unsure.startswith("No significant difference")
    few = sentences(timed([[1]], [[2]]))[0]
    assert few == (
        "Decoding is 2.00 times as fast with the draft, from a single pair; an interval takes 2: raise --num-prompts."
    )
    some = sentences(timed([[2]] * 5, [[1]] * 5))
    assert some == [
        "Decoding is 0.50 times as fast (95 %: 0.50 to 0.50) with the draft, from 5 pairs, which are too few to be "
        "sure; it takes 6: raise --num-prompts."
    ], "and no advice on how to do better"
    busy = sentences(timed([[2]] * 12, [[1]] * 12), "the machine was busy: load 6.5 on 2 cores")
    assert busy == [
        "Inconclusive: the machine was busy: load 6.5 on 2 cores. Decoding was 0.50 times as fast (95 %: 0.50 to 0.50) "
        "with the draft; measure on a quiet machine."
    ]
    slower = sentences(timed([[2], [2.1], [2]] * 4, [[1], [1.1], [1]] * 4))[0]
    assert slower.startswith("Decoding is slower with the draft: 0.5")


@pytest.mark.parametrize(
    ("draft", "verify", "rest", "tokens", "word"),
    [
        (1.0, 1.0, 0.0, 1.5, "The draft costs too much: if it were free, the speed-up would be 1.50"),
        (
            1.0,
            1.5,
            0.0,
            1.4,
            "Too few tokens are accepted: 2.50 tokens per step would break even, and 5.00 are possible",
        ),
        (1.0, 1.5, 3.0, 1.4, "The largest part is neither the draft nor the target"),
        (3.0, 4.0, 0.0, 3.0, "No draft pays at this k"),
    ],
)
def test_it_says_why_speculation_is_slower(draft: float, verify: float, rest: float, tokens: float, word: str) -> None:
    split = StepSplit(
        plain_step_seconds=1.0,
        plain_forward_seconds=1.0,
        draft_seconds_per_step=draft,
        verify_seconds_per_step=verify,
        overhead_seconds_per_step=rest,
        tokens_per_step=tokens,
        drafted_per_step=4.0,
    )
    lines = list(_why(split))
    assert f"costs {draft + verify + rest:.2f} plain steps" in lines[0]
    assert lines[1].startswith(word)


def test_costs_are_those_of_the_counted_steps() -> None:
    one = ran(bench())
    costs = costs_of(one.draft, one.plain)
    counts = one.draft.counts()
    assert not_none(costs).tokens_per_step == one.tokens_per_step == counts.num_emitted_tokens / counts.num_steps
    assert not_none(costs).step_seconds * one.draft.num_steps == pytest.approx(one.draft.meter.decode_seconds)
    assert one.efficiency == pytest.approx(not_none(one.speedup("decode")).median / one.tokens_per_step)


def test_an_arm_that_took_no_step_has_no_costs() -> None:
    assert costs_of(Track("x"), Track("y")) is None
    assert Track("x").timing().as_dict() == Timing().as_dict()

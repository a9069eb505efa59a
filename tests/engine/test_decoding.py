"""Arms decode the same requests; a comparison interleaves them and says whether tokens agree."""

from dataclasses import replace
from typing import Any

import pytest
from toy_engine import LetterTokenizer, TableLM, toy_engine
from typed import not_none

from specdec_cli.engine.comparison import Comparison
from specdec_cli.engine.decoding import Decoding, Request, decode
from specdec_cli.engine.prompts import rows_of
from specdec_cli.errors import UsageError
from specdec_cli.events import Stepped
from specdec_cli.measure.documents.generate import compared
from specdec_cli.sampling.params import SamplingParams

PROMPTS = ["ab ab ab", "cd. cd.", "gh", "e", "fa"]


def requests(prompts=PROMPTS, **params) -> list[Request]:
    common = SamplingParams(**{"max_new_tokens": 30, **params})
    tokens = LetterTokenizer()
    return [Request(row, tokens.encode(row.prompt), replace(common, index=row.index)) for row in rows_of(prompts)]


def never() -> bool:
    return False


def test_an_arm_keeps_what_its_events_said() -> None:
    engine, arm, seen = toy_engine(), Decoding("with ngram"), []
    decode(engine, arm, requests(), lambda _, event: seen.append(event), never)
    assert [output.index for output in arm.outputs()] == [0, 1, 2, 3, 4]
    assert [output.prompt for output in arm.outputs()] == PROMPTS
    assert all(len(output.token_ids) == 30 for output in arm.outputs())
    assert arm.counts().num_emitted_tokens == 5 * 29
    assert arm.meter.num_tokens == 150
    assert not_none(arm.timing().decode_tokens_per_second) > 0
    assert any(isinstance(event, Stepped) for event in seen)
    assert not engine.has_work


def test_a_comparison_alternates_its_arms_group_by_group() -> None:
    turns: list[Any] = []
    comparison = Comparison(Decoding("with ngram"))

    def watch(arm, event) -> None:
        place = (arm.name, min(output.index for output in arm.passes[-1].finished()))
        if not turns or turns[-1] != place:
            turns.append(place)

    comparison.run(toy_engine(max_num_seqs=2), requests(), watch, never)
    names = {comparison.draft.name: "A", comparison.plain.name: "B"}
    assert "".join(names[name] for name, _ in turns) == "ABBAAB"
    assert [place for _, place in turns] == [0, 0, 2, 2, 4, 4]


def test_greedy_tokens_agree_and_the_speedup_is_a_median_of_groups() -> None:
    comparison = Comparison(Decoding("with ngram"))
    comparison.run(toy_engine(max_num_seqs=2), requests(), lambda *_: None, never)
    assert comparison.equal is True
    assert comparison.num_checked_tokens == 150
    assert comparison.differences() == []
    assert len(comparison.ratios()) == 3
    assert sorted(comparison.ratios())[1] == comparison.speedup()
    assert comparison.plain.counts().num_drafts == 0
    assert comparison.draft.counts().num_drafts > 0
    timing = comparison.plain.timing()
    assert timing.decode_s == pytest.approx(sum(not_none(one.timing().decode_s) for one in comparison.plain.passes))
    document = compared(comparison).as_json()
    assert document["equal"] is True
    assert document["speedup"]["decode"]["pairs"] == 3


def test_the_warm_up_is_not_counted() -> None:
    target = TableLM()
    comparison = Comparison(Decoding("with ngram"))
    comparison.run(toy_engine(k=4, target=target), requests(["ab"]), lambda *_: None, never)
    counted = comparison.draft.counts().num_steps + comparison.plain.counts().num_steps + 2
    assert target.num_calls > counted
    assert comparison.plain.counts().num_emitted_tokens == 29


def test_a_difference_is_found_where_it_begins() -> None:
    comparison = Comparison(Decoding("with ngram"))
    comparison.run(toy_engine(), requests(["ab", "cd"]), lambda *_: None, never)
    comparison.plain.outputs()[1].token_ids[7] += 1
    comparison.plain.outputs()[0].token_ids.append(3)
    assert comparison.differences() == [(0, 30), (1, 7)]
    assert comparison.equal is False


def test_tokens_that_need_not_agree_are_not_compared() -> None:
    comparison = Comparison(Decoding("with ngram"), tokens_must_agree=False)
    comparison.run(toy_engine(), requests(["ab"], temperature=1.0), lambda *_: None, never)
    assert comparison.equal is None


def test_stopping_aborts_what_runs_and_keeps_it() -> None:
    engine, arm, num_steps = toy_engine(), Decoding("with ngram"), 0

    def watch(_, event) -> None:
        nonlocal num_steps
        num_steps += isinstance(event, Stepped)

    asked = requests()
    decode(engine, arm, asked, watch, lambda: num_steps >= 3)
    assert num_steps == 3
    assert [output.finish_reason for output in arm.outputs()] == ["abort"] * len(asked)
    assert all(output.token_ids for output in arm.outputs())
    assert not engine.has_work


def test_a_stopped_comparison_has_every_row_and_compares_only_what_is_whole() -> None:
    comparison = Comparison(Decoding("with ngram"))
    finished = 0

    def watch(_, event) -> None:
        nonlocal finished
        finished = len(comparison.draft.passes) + len(comparison.plain.passes)

    comparison.run(toy_engine(max_num_seqs=2), requests(), watch, lambda: finished >= 3)
    assert [output.index for output in comparison.draft.outputs()] == [0, 1, 2, 3, 4]
    assert len(comparison.ratios()) == 1
    assert comparison.equal is True
    assert comparison.num_checked_tokens == 60


def test_a_refused_request_is_named_before_anything_runs() -> None:
    target = TableLM()
    too_long = "a" * 600
    for run in (
        lambda e, r: decode(e, Decoding("x"), r, lambda *_: None, never),
        lambda e, r: Comparison(Decoding("x")).run(e, r, lambda *_: None, never),
    ):
        with pytest.raises(UsageError, match=r"^prompt 2: the prompt has `600` tokens"):
            run(toy_engine(target=target), requests(["ab", too_long]))
        with pytest.raises(UsageError, match=r"^the prompt has `600` tokens"):
            run(toy_engine(target=target), requests([too_long]))
    assert target.num_calls == 0

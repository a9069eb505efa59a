"""Faults that are contained: of a drafter, of one request, of a whole forward; and several drafters in one engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import PROMPTS, ngram, tiny_lm
from toy_engine import END, LETTERS, LetterTokenizer, TableLM
from typed import not_none, stand_in

from specdec_cli.drafted import Drafted
from specdec_cli.drafters import create
from specdec_cli.drafters.contract import DraftRow, Guesses, Resources, WithoutModel
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.options import EngineOptions
from specdec_cli.errors import UsageError
from specdec_cli.events import Event, Failed, Finished, Noticed, Stepped
from specdec_cli.sampling.chain import LogitsError
from specdec_cli.sampling.params import SamplingParams

GREEDY = SamplingParams(max_new_tokens=20)


@dataclass
class Broken(WithoutModel):
    """A drafter that raises in some of its steps."""

    raises: Sequence[int] = ()
    error: type[Exception] = ValueError
    num_asked: int = 0
    released: list[int] = field(default_factory=list)

    def propose(self, rows: Sequence[DraftRow]) -> list[Guesses]:
        self.num_asked += 1
        if self.num_asked - 1 in self.raises:
            raise self.error("no idea")
        return [Guesses(Drafted.chain([1] * row.k)) for row in rows]

    def release(self, handle: int) -> None:
        self.released.append(handle)


class Failing(TableLM):
    """A target that breaks: a forward that raises, or one sequence whose logits are no numbers."""

    def __init__(self, raises: Sequence[int] = (), error: BaseException | None = None, bad: int | None = None) -> None:
        super().__init__()
        self.raises, self.error, self.bad = raises, error, bad
        self.released: list[int] = []

    def score(self, rows):
        if self.num_calls in self.raises:
            self.num_calls += 1
            raise self.error or torch.OutOfMemoryError("no memory")
        logits = super().score(rows)
        first = 0
        for row in rows:
            if row.handle == self.bad and row.num_tokens > 8:
                logits[first : first + row.num_logits] = float("nan")
            first += row.num_logits
        return logits

    def release(self, handle) -> None:
        self.released.append(handle)


def table_engine(target: TableLM | None = None, own: Any | None = None, **others: Any) -> Engine:
    engine_drafter = own if own is not None else toy_ngram()
    return Engine(target or TableLM(), engine_drafter, LetterTokenizer(), EngineOptions(), (END,), others)  # type: ignore[arg-type]


def toy_ngram() -> Any:
    made = create("ngram", {"min": 1})
    made.load(Resources(lambda name: TableLM(), None, len(LETTERS)))
    return made


def toy_prediction(text: str = "", per_request: bool = True) -> Any:
    made = create("prediction", {"text": text, "per_request": per_request})
    made.load(Resources(lambda name: TableLM(), LetterTokenizer().encode, len(LETTERS)))
    return made


def run(engine: Engine, retry: bool = False) -> tuple[dict[int, list[int]], list[Event]]:
    """Tokens by sequence, and every event."""
    tokens: dict[int, list[int]] = {}
    events: list[Event] = []
    while engine.has_work:
        try:
            new = engine.step()
        except Exception:
            if not retry:
                raise
            continue
        events += new
        for event in new:
            for emitted in event.emitted if isinstance(event, Stepped) else ():
                tokens.setdefault(emitted.sequence_id, []).extend(emitted.tokens)
    return tokens, events


def plain(prompts: Sequence[str], params: SamplingParams = GREEDY) -> dict[int, list[int]]:
    engine = table_engine()
    for prompt in prompts:
        engine.add(prompt, params, 0)
    return run(engine)[0]


def notices(events: Sequence[Event]) -> list[str]:
    return [event.message for event in events if isinstance(event, Noticed)]


def test_a_drafter_that_raises_once_costs_its_guesses_alone() -> None:
    own = Broken(raises=[1])
    engine = table_engine(own=own)
    for prompt in ("abc", "fed"):
        engine.add(prompt, GREEDY)
    tokens, events = run(engine)
    assert tokens == plain(["abc", "fed"])
    assert notices(events) == [
        "the draft `test_engine_contained` failed (ValueError: no idea): continuing without its guesses"
    ]
    assert engine.drafters.num_failures == {"test_engine_contained": 1}
    assert not engine.drafters.switched_off
    assert own.released[:2] == [0, 1], "what the failed step left is forgotten"


def test_a_drafter_that_keeps_failing_is_switched_off_and_that_is_said() -> None:
    own = Broken(raises=range(100))
    engine = table_engine(own=own)
    engine.add("abc", GREEDY)
    tokens, events = run(engine)
    assert tokens == plain(["abc"])
    assert own.num_asked == 3
    assert engine.drafters.switched_off == {"test_engine_contained"}
    assert [("disabled" in said) for said in notices(events)] == [False, True]


@pytest.mark.parametrize("wrong", [[[1] * 9], [[len(LETTERS)]], []], ids=["too many", "no such token", "no guess"])
def test_guesses_that_break_the_contract_are_a_fault(wrong) -> None:
    own = Broken()
    own.propose = lambda rows: [Guesses(Drafted.chain(tokens)) for tokens in wrong]
    engine = table_engine(own=own)
    engine.add("abc", GREEDY)
    tokens, events = run(engine)
    assert tokens == plain(["abc"])
    assert "failed (RunError" in notices(events)[0]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_logits_that_are_no_numbers_end_their_request_alone(temperature: float) -> None:
    params = SamplingParams(max_new_tokens=20, temperature=temperature)
    engine = table_engine(Failing(bad=1))
    for prompt in ("abc", "fed", "gab"):
        engine.add(prompt, params)
    tokens, events = run(engine)
    good = table_engine()
    for prompt in ("abc", "fed", "gab"):
        good.add(prompt, params)
    expected = run(good)[0]
    assert tokens[0] == expected[0]
    assert tokens[2] == expected[2]
    assert tokens[1] == expected[1][: len(tokens[1])]
    failed = [event for event in events if isinstance(event, Failed)]
    assert [(one.sequence_id, type(one.error)) for one in failed] == [(1, LogitsError)]
    assert {event.sequence_id for event in events if isinstance(event, Finished)} == {0, 2}


class BrokenBehind(TableLM):
    """A target that has no logits behind three letters `a`, which no text here has."""

    def score(self, rows):
        logits = super().score(rows)
        ends = [(row, end) for row in rows for end in range(row.num_tokens - row.num_logits, row.num_tokens)]
        for place, (row, end) in enumerate(ends):
            if row.as_chain()[max(end - 2, 0) : end + 1] == [1, 1, 1]:
                logits[place] = float("nan")
        return logits


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_logits_behind_a_refused_token_are_nobody_s_fault(temperature: float) -> None:
    params = SamplingParams(max_new_tokens=20, temperature=temperature, seed=3)
    engine = table_engine(BrokenBehind(), own=Broken())
    expected = table_engine(BrokenBehind(), own=Broken())
    for prompt in ("abc", "fed"):
        engine.add(prompt, params, verify="gumbel")
        expected.add(prompt, params, 0, verify="gumbel")
    tokens, events = run(engine)
    assert tokens == run(expected)[0]
    assert not [event for event in events if isinstance(event, Failed)]
    assert sum(event.emitted[0].num_drafted for event in events if isinstance(event, Stepped) and event.emitted) > 8


def test_one_row_s_trouble_in_a_draft_leaves_the_others_their_guesses() -> None:
    class OneBreaks(Broken):
        def propose(self, rows: Sequence[DraftRow]) -> list[Guesses]:
            place = next((i for i, row in enumerate(rows) if row.handle == 1), None)
            if place is not None:
                raise LogitsError("no number", place)
            return super().propose(rows)

    engine = table_engine(own=OneBreaks())
    for prompt in ("abc", "fed", "gab"):
        engine.add(prompt, GREEDY)
    tokens, events = run(engine)
    assert tokens == plain(["abc", "fed", "gab"])
    first = next(event for event in events if isinstance(event, Stepped) and event.num_prefill_tokens == 0)
    assert [one.num_drafted > 0 for one in first.emitted] == [True, False, True]
    assert not engine.drafters.switched_off
    assert len(notices(events)) == 1


def test_what_a_request_has_computed_itself_is_not_counted_as_cached() -> None:
    target, held = Failing(raises=[0]), iter([0, 2])
    target.adopt = stand_in(lambda handle, tokens, salt: next(held))
    engine = Engine(target, Broken(), LetterTokenizer(), EngineOptions(prefix_caching=True), (END,))  # type: ignore[arg-type]
    engine.add("abcd", GREEDY)
    _, events = run(engine, retry=True)
    emitted = [one for event in events if isinstance(event, Stepped) for one in event.emitted]
    assert (emitted[0].from_prefill, emitted[0].num_cached_tokens) == (True, 0)
    assert next(held, None) is None, "it was taken up twice"


def test_a_step_whose_rows_have_all_ended_asks_the_target_nothing() -> None:
    target = TableLM()
    assert table_engine(target)._stepper._score([]).shape == (0, target.vocab_size)
    assert target.num_calls == 0


def test_a_drafter_of_another_package_has_its_whole_name() -> None:
    engine = table_engine(own=type("Drafter", (Broken,), {"__module__": "mine.ngram"})(), ngram=toy_ngram())
    assert list(engine.drafters.by_name) == ["mine.ngram", "ngram"]


def test_text_that_cannot_be_decoded_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = table_engine()
    ids = [engine.add(prompt, GREEDY) for prompt in ("abc", "fed")]
    stream = engine._sequences[ids[1]].text
    monkeypatch.setattr(type(stream), "feed", _breaking(type(not_none(stream)).feed, stream))
    tokens, events = run(engine)
    assert tokens[0] == plain(["abc", "fed"])[0]
    assert [event.sequence_id for event in events if isinstance(event, Failed)] == [1]


def _breaking(feed, broken):
    def wrapped(self, *given):
        if self is broken:
            raise UnicodeError("no letter")
        return feed(self, *given)

    return wrapped


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("x"), MemoryError(), RuntimeError("x")])
def test_a_forward_that_raises_changes_nothing_and_the_next_step_goes_on(error, at: int) -> None:
    target = Failing(raises=[at], error=error)
    engine = table_engine(target)
    for prompt in ("abc", "fed"):
        engine.add(prompt, GREEDY)
    tokens, _ = run(engine, retry=True)
    assert tokens == plain(["abc", "fed"])
    assert set(target.released[:2]) == {0, 1}, "what the broken forward wrote is forgotten"


def test_a_forward_that_raises_on_a_real_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_lm(tmp_path)
    engine = Engine(target, ngram(), None, EngineOptions(prefill_chunk=4))
    params = SamplingParams(max_new_tokens=12)
    expected = [output.token_ids for output in engine.generate(PROMPTS, params)]
    forward, calls = stand_in(target)._forward.run, []

    def broken(layout):
        calls.append(1)
        if len(calls) in (3, 9):
            raise RuntimeError("no memory")
        return forward(layout)

    monkeypatch.setattr(target._forward, "run", broken)
    first = engine._next_id
    for prompt in PROMPTS:
        engine.add(prompt, params)
    tokens, _ = run(engine, retry=True)
    assert [tokens[first + i] for i in range(len(PROMPTS))] == expected
    target.check_integrity()
    assert target.num_free_blocks == target.num_blocks


def test_an_abort_in_the_middle_gives_its_blocks_back_at_once(tmp_path: Path) -> None:
    engine = Engine(tiny_lm(tmp_path), ngram(), None, EngineOptions())
    ids = [engine.add(prompt, SamplingParams(max_new_tokens=24)) for prompt in PROMPTS]
    for _ in range(3):
        engine.step()
    before = engine.target.num_free_blocks
    assert [type(event) for event in engine.abort(ids[2])] == [Finished]
    assert engine.target.num_free_blocks > before
    stand_in(engine.target).check_integrity()
    run(engine)
    assert engine.target.num_free_blocks == engine.target.num_blocks


def test_rows_with_different_drafters_and_none_in_one_step() -> None:
    text = "".join(LETTERS[token] for token in plain(["abc"])[0])
    engine = table_engine(prediction=toy_prediction())
    wishes = [{}, {"draft": "none"}, {"prediction": LetterTokenizer().encode(text)}, {"draft": "prediction"}]
    for wish in wishes:
        engine.add("abc", GREEDY, **stand_in(wish))
    drafted, accepted = dict.fromkeys(range(4), 0), dict.fromkeys(range(4), 0)
    tokens, events = run(engine)
    for event in events:
        for emitted in event.emitted if isinstance(event, Stepped) else ():
            drafted[emitted.sequence_id] += emitted.num_drafted
            accepted[emitted.sequence_id] += emitted.num_accepted
    assert len({tuple(one) for one in tokens.values()}) == 1
    assert drafted[0] > 0
    assert drafted[1] == drafted[3] == 0
    assert accepted[2] == drafted[2] > 10


def test_drafts_that_are_not_there_are_refused_by_name() -> None:
    engine = table_engine(prediction=toy_prediction())
    with pytest.raises(UsageError, match="no draft `eagle`") as caught:
        engine.add("abc", draft="eagle")
    assert {"ngram", "prediction", "none"} <= set(not_none(caught.value.hint).replace(",", "").split())
    with pytest.raises(UsageError, match="reads no prediction"):
        engine.add("abc", draft="ngram", prediction=[1])
    with pytest.raises(UsageError, match="prediction names token"):
        engine.add("abc", prediction=[99])
    assert not engine.has_work


def test_adaptive_depth_and_tables_change_no_greedy_text() -> None:
    for options in ({"depth_policy": "adaptive"}, {"k_by_batch": ((1, 5), (2, 1), (3, 0))}):
        engine = Engine(TableLM(), toy_ngram(), stand_in(LetterTokenizer()), EngineOptions(**options), (END,))
        for prompt in ("abc", "fed", "gab"):
            engine.add(prompt, GREEDY)
        assert run(engine)[0] == plain(["abc", "fed", "gab"])
    for wrong in ({"depth_policy": "deep"}, {"k_by_batch": ((2, 1), (1, 2))}, {"k_by_batch": ((0, 1),)}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            EngineOptions(**wrong)


def test_generate_raises_what_ended_a_request() -> None:
    with pytest.raises(LogitsError):
        table_engine(Failing(bad=0)).generate("abcdefgh", GREEDY)
    with pytest.raises(LogitsError):
        list(table_engine(Failing(bad=0)).stream("abcdefgh", GREEDY))

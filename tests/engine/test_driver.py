"""The driver: requests of one caller, stepped to their ends, and what becomes of one that fails."""

from typing import Any

import pytest
from toy_engine import toy_engine

from specdec_cli.engine.driver import Driver
from specdec_cli.errors import UsageError
from specdec_cli.events import Failed, Finished, Stepped
from specdec_cli.sampling.params import SamplingParams

SHORT = SamplingParams(max_new_tokens=4)
LONG = SamplingParams(max_new_tokens=30)


def ended(events) -> dict[int, str]:
    return {event.sequence_id: event.finish_reason for event in events if isinstance(event, Finished)}


def take(driver: Driver, events: list[Any], between=lambda: None) -> None:
    for new in driver.steps():
        events += new
        between()


def drained(engine) -> list[Any]:
    events: list[Any] = []
    while engine.has_work:
        events += engine.step()
    return events


def tokens_of(events) -> dict[int, list[int]]:
    """The tokens of each sequence in these events."""
    found: dict[int, list[int]] = {}
    for emitted in (each for event in events if isinstance(event, Stepped) for each in event.emitted):
        found.setdefault(emitted.sequence_id, []).extend(emitted.tokens)
    return found


def fail(engine, sequence_id: int, error: Exception) -> None:
    """End a request by an error of its own, as the engine does within a step; the next step tells of it."""
    if sequence_id in engine._sequences:
        engine._fail(engine._sequences[sequence_id], error)


def broken(engine, error, at: int = 2):
    """The engine, whose step number `at` raises."""
    step, steps = engine._step, []

    def failing():
        steps.append(1)
        if len(steps) == at:
            raise error
        return step()

    engine._step = failing
    return engine


def test_requests_run_to_their_ends_and_more_may_come_between_two_steps() -> None:
    driver, events = Driver(toy_engine(k=0)), []
    first, added = driver.add("ab", SHORT), None
    for new in driver.steps():
        events += new
        if added is None:
            added = driver.add("cd", SHORT)
    assert ended(events) == {first: "length", added: "length"}
    assert not driver.open
    assert not driver.engine.has_work


def test_stopping_aborts_what_is_open_and_says_so() -> None:
    driver, events = Driver(toy_engine(k=0)), []
    ids = [driver.add("ab", SHORT), driver.add("cd", LONG)]
    steps = driver.steps(lambda: ids[0] in ended(events))
    while (new := next(steps, None)) is not None:
        events += new
    assert ended(events) == {ids[0]: "length", ids[1]: "abort"}
    assert not driver.engine.has_work


def test_whoever_leaves_early_leaves_nothing_behind() -> None:
    engine = toy_engine()
    others = engine.add("ab", LONG)
    with Driver(engine) as driver:
        driver.add("cd", LONG)
        for _ in driver.steps():
            break
    assert list(engine._sequences) == [others]
    with Driver(engine) as driver:
        driver.add("cd", LONG)
        with pytest.raises(UsageError):
            driver.add("a" * 600, LONG)
    assert list(engine._sequences) == [others]


def test_the_error_of_a_request_is_raised_after_the_events_before_it() -> None:
    engine, events = toy_engine(k=0), []
    with Driver(engine) as driver:
        its, other = driver.add("ab", LONG), driver.add("cd", LONG)
        with pytest.raises(ValueError, match="its own"):
            take(driver, events, lambda: fail(engine, its, ValueError("its own")))
    assert [type(event) for event in events] == [Stepped, Stepped]
    assert [one.sequence_id for one in events[0].emitted] == [its, other]
    assert not engine.has_work


def test_the_failure_of_another_callers_request_is_told_to_that_caller() -> None:
    engine, events = toy_engine(k=0), []
    others, driver = engine.add("ab", SHORT), Driver(engine)
    longer, its, error = engine.add("ab", LONG), driver.add("cd", SHORT), ValueError("not ours")
    driver.step()
    fail(engine, others, error)
    take(driver, events)
    assert ended(events) == {its: "length"}
    assert not any(isinstance(event, Failed) for event in events)
    rest = drained(engine)
    assert Failed(others, error) in rest
    assert ended(rest) == {longer: "length"}


def test_callers_read_the_events_of_their_own_requests_whoever_steps() -> None:
    """The events of a request are those that it has alone, and none is lost where another caller steps."""
    engine = toy_engine()
    own, first, second = engine.add("ab", SHORT), Driver(engine), Driver(engine)
    ids = [first.add("cd", LONG), first.add("ab", SHORT), second.add("ef", LONG)]
    events: list[list[Any]] = [[], []]
    while first.open or second.open:
        for driver, taken in zip((first, second), events, strict=True):
            if driver.open:
                taken += driver.step()
    assert engine.has_work, "nobody has read what became of the request that `add` queued"
    rest = drained(engine)
    for sequence_id, taken, prompt, params in zip(
        [*ids, own],
        [events[0], events[0], events[1], rest],
        ["cd", "ab", "ef", "ab"],
        [LONG, SHORT, LONG, SHORT],
        strict=True,
    ):
        [alone] = toy_engine().generate(prompt, params)
        assert tokens_of(taken)[sequence_id] == alone.token_ids
        assert ended(taken)[sequence_id] == alone.finish_reason
    assert [set(tokens_of(taken)) for taken in (*events, rest)] == [{*ids[:2]}, {ids[2]}, {own}]


def test_a_caller_is_told_of_a_request_that_another_one_aborts() -> None:
    engine = toy_engine(k=0)
    driver = Driver(engine)
    its = driver.add("ab", LONG)
    driver.step()
    assert ended(engine.abort(its)) == {its: "abort"}
    assert ended(event for events in driver.steps() for event in events) == {its: "abort"}


def test_a_request_that_a_broken_step_lost_fails_with_it() -> None:
    """It had ended, and the step broke before anybody was told; its caller must not wait for ever."""
    engine, error = toy_engine(k=0), MemoryError("no room")
    driver, other = Driver(engine), Driver(engine)
    lost, its = other.add("ab", LONG), driver.add("cd", SHORT)
    step = engine._step

    def losing():
        engine._remove(engine._sequences[lost])
        engine._step = step
        raise error

    engine._step = losing
    assert driver.step() == [Failed(its, error)]
    assert other.step() == [Failed(lost, error)]
    assert not other.open


def test_a_broken_step_fails_the_newest_running_request() -> None:
    error = MemoryError("no room")
    driver = Driver(broken(toy_engine(k=0), error))
    old, new = driver.add("ab", SHORT), driver.add("cd", SHORT)
    driver.step()
    assert driver.step() == [Failed(new, error)]
    assert list(driver.open) == [old]
    assert ended(event for events in driver.steps() for event in events) == {old: "length"}


def test_a_broken_step_is_raised_where_the_newest_request_is_anothers() -> None:
    engine = broken(toy_engine(k=0), MemoryError("no room"))
    driver = Driver(engine)
    driver.add("ab", LONG)
    engine.add("cd", LONG)
    driver.step()
    with pytest.raises(MemoryError, match="no room"):
        driver.step()
    assert len(driver.open) == 1

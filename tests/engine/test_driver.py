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


def fail(engine, sequence_id: int, error: Exception) -> None:
    """End a request by an error of its own, as the engine does within a step; the next step tells of it."""
    if sequence_id in engine._sequences:
        with engine._fence(engine._sequences[sequence_id]):
            raise error


def broken(engine, error, at: int = 2):
    """The engine, whose step number `at` raises."""
    step, steps = engine.step, []

    def failing():
        steps.append(1)
        if len(steps) == at:
            raise error
        return step()

    engine.step = failing
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


def test_the_failure_of_another_callers_request_is_an_event_like_others() -> None:
    engine, events = toy_engine(k=0), []
    others, driver = engine.add("ab", SHORT), Driver(engine)
    its = driver.add("cd", SHORT)
    driver.step()
    fail(engine, others, ValueError("not ours"))
    take(driver, events)
    assert any(isinstance(event, Failed) for event in events)
    assert ended(events)[its] == "length"


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

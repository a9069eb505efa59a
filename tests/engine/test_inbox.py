"""Callers of one engine: each reads the events of its own requests, and one thread calls at a time."""

from collections.abc import Callable
from itertools import zip_longest
from threading import Thread
from typing import Any

from toy_engine import toy_engine

from specdec_cli.errors import UsageError
from specdec_cli.events import Finished, Stepped
from specdec_cli.sampling.params import SamplingParams


def test_streams_of_one_engine_have_their_own_events() -> None:
    """Each of two that take turns yields what it yields alone, also the one whose end came in the other's step."""
    engine, many = toy_engine(), [("ab", 20), ("cd", 7), ("ef", 13)]
    streams = [engine.stream(prompt, SamplingParams(max_new_tokens=num)) for prompt, num in many]
    texts, ends = ["", "", ""], ["", "", ""]
    for events in zip_longest(*streams):
        for place, event in enumerate(events):
            if isinstance(event, Stepped):
                texts[place] += "".join(emitted.text for emitted in event.emitted)
            elif isinstance(event, Finished):
                texts[place], ends[place] = texts[place] + event.text, event.finish_reason
    alone = [toy_engine().generate(prompt, SamplingParams(max_new_tokens=num))[0] for prompt, num in many]
    assert texts == [output.text for output in alone]
    assert ends == [output.finish_reason for output in alone]


def test_a_stream_goes_on_after_other_calls() -> None:
    engine, params = toy_engine(), SamplingParams(max_new_tokens=30)
    [alone] = engine.generate("ab", params)
    stream = engine.stream("ab", params)
    begun = [next(stream)]
    assert engine.generate("cd", params)[0].text == toy_engine().generate("cd", params)[0].text
    added = engine.add("cd", params)
    events = [*begun, *stream]
    assert [event.finish_reason for event in events if isinstance(event, Finished)] == ["length"]
    steps = [event for event in events if isinstance(event, Stepped)]
    assert [token for event in steps for emitted in event.emitted for token in emitted.tokens] == alone.token_ids
    rest = []
    while engine.has_work:
        rest += engine.step()
    assert [event.sequence_id for event in rest if isinstance(event, Finished)] == [added]
    assert engine.step() == [], "an idle engine has no events"


def test_another_thread_is_refused_while_a_call_runs() -> None:
    """Both would step the same cache; the call that runs goes on."""
    engine, params, refused = toy_engine(), SamplingParams(max_new_tokens=8), []

    def call(method: str) -> None:
        other: dict[str, Callable[[], Any]] = {
            "generate": lambda: engine.generate("cd", params),
            "stream": lambda: next(engine.stream("cd", params)),
            "add": lambda: engine.add("cd", params),
            "step": engine.step,
            "abort": lambda: engine.abort(0),
        }
        try:
            other[method]()
        except UsageError as error:
            refused.append((method, str(error), error.hint))

    def watch(_now: object) -> None:
        for method in ("generate", "stream", "add", "step", "abort"):
            thread = Thread(target=call, args=(method,))
            thread.start()
            thread.join()

    assert engine.generate("ab", params, progress=watch)[0].text == toy_engine().generate("ab", params)[0].text
    assert {method for method, _, _ in refused} == {"generate", "stream", "add", "step", "abort"}
    assert {message for _, message, _ in refused} == {"another thread is using this engine"}
    assert all("AsyncEngine" in str(hint) for _, _, hint in refused)

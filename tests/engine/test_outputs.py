"""Results folded from events."""

import json
from typing import Any

import pytest
from toy_engine import toy_engine
from typed import stand_in

from specdec_cli.engine.driver import Driver
from specdec_cli.engine.options import EngineOptions
from specdec_cli.engine.outputs import Outputs
from specdec_cli.events import Emitted, Finished, Noticed, SpeculativeCounts, Stepped, TokenLogprob
from specdec_cli.sampling.params import SamplingParams


class Requests:
    """What a driver that takes requests needs of an engine."""

    options = EngineOptions(verify="typical")

    def __init__(self) -> None:
        self.num = 10

    def add(self, tokens, params, k, grammar=None, draft=None, tree=None):
        self.num += 1
        return self.num

    def deliver(self, sequence_id, inbox):
        """Events are the test's own."""


def stepped(*emitted: Emitted, seconds: tuple[float, float, float] = (0.5, 0.25, 0.125)) -> Stepped:
    return Stepped(tuple(emitted), len(emitted), 0, 0, *seconds, 1, 8)


def first(number: int, token: int) -> Emitted:
    return Emitted(number, (token,), "a", 0, 0, from_prefill=True)


@pytest.fixture
def outputs() -> Outputs:
    made, driver = Outputs(), Driver(stand_in(Requests()))
    made.add(driver, [1, 2], params=SamplingParams(temperature=1.0))
    made.add(driver, [3], params=SamplingParams(temperature=1.0, logprobs=0), index=7)
    return made


def test_tokens_texts_and_counts_go_to_their_request(outputs) -> None:
    outputs.observe(stepped(first(11, 5), first(12, 6)))
    logprob = TokenLogprob(8, -0.5, ())
    outputs.observe(
        stepped(Emitted(11, (7, 8, 9), "bcd", 4, 2, False), Emitted(12, (8,), "e", 4, 0, False, (logprob,)))
    )
    outputs.observe(Noticed(11, "something"))
    outputs.observe(Finished(11, "stop", "dx", ""))
    outputs.observe(Finished(12, "length", None, "f"))
    one, two = outputs.finished()
    assert (one.index, two.index) == (0, 7)
    assert (one.token_ids, one.text, one.finish_reason, one.stop_reason) == ([5, 7, 8, 9], "abcd", "stop", "dx")
    assert (two.token_ids, two.text, two.finish_reason, two.stop_reason) == ([6, 8], "aef", "length", None)
    assert one.logprobs is None
    assert two.logprobs == [logprob]
    assert (one.speculative.num_accepted_tokens, two.speculative.num_accepted_tokens) == (2, 0)
    assert outputs.totals.num_draft_tokens == 8
    assert outputs.totals.acceptance_histogram == [1, 0, 1, 0, 0]
    assert outputs.totals.acceptance_length == 2.0


def test_a_steps_seconds_are_shared_and_prefill_has_none(outputs) -> None:
    outputs.observe(stepped(first(11, 5), first(12, 6)))
    assert outputs.totals.verify_seconds == 0
    outputs.observe(stepped(Emitted(11, (7,), "", 1, 0, False), Emitted(12, (8,), "", 1, 0, False)))
    one, two = outputs.finished()
    assert one.speculative.draft_seconds == two.speculative.draft_seconds == 0.25
    assert outputs.totals.draft_seconds == 0.5
    assert outputs.totals.overhead_seconds == 0.125


def test_events_of_others_are_left_alone(outputs) -> None:
    outputs.observe(stepped(first(99, 5)))
    outputs.observe(Finished(99, "length", None))
    assert all(output.token_ids == [] and output.finish_reason is None for output in outputs.finished())


def test_times_are_in_order(outputs) -> None:
    outputs.observe(stepped(first(11, 5)))
    for token in range(3):
        outputs.observe(stepped(Emitted(11, (token,), "", 0, 0, False)))
    outputs.observe(Finished(11, "length", None))
    timing = outputs.finished()[0].timing
    assert 0 <= timing.ttft_s <= timing.total_s
    assert timing.total_s == pytest.approx(timing.ttft_s + timing.decode_s)
    assert timing.decode_tokens_per_second == pytest.approx(3 / timing.decode_s)
    assert outputs.finished()[1].timing.ttft_s is None
    assert outputs.timing().total_s > 0


def test_an_empty_request_has_nulls_and_no_zeros() -> None:
    assert Outputs().timing().as_dict() == {
        "ttft_s": None,
        "decode_s": None,
        "total_s": None,
        "decode_tokens_per_second": None,
    }


def test_the_json_form(outputs) -> None:
    outputs.observe(stepped(first(12, 6)))
    outputs.observe(stepped(Emitted(12, (8,), "e", 2, 0, False, (TokenLogprob(8, -0.5, ((8, -0.5), (1, -2.0))),))))
    outputs.observe(Finished(12, "abort", None))
    finished = outputs.finished()
    assert not any(output.lossless for output in finished)
    plain, with_logprobs = (json.loads(json.dumps(output.as_dict())) for output in finished)
    names = ["index", "prompt", "text", "token_ids", "prompt_tokens", "completion_tokens", "finish_reason"]
    assert list(plain) == [*names, "stop_reason", "speculative", "timing"]
    assert plain["prompt_tokens"] == 2
    assert plain["speculative"]["acceptance_rate"] is None
    assert with_logprobs["completion_tokens"] == 2
    assert with_logprobs["logprobs"] == [{"token_id": 8, "logprob": -0.5, "top": [[8, -0.5], [1, -2.0]]}]
    assert with_logprobs["speculative"]["conditional_acceptance_rates"] == [0.0, None]
    assert with_logprobs["speculative"]["acceptance_histogram"] == [1, 0, 0]


def test_results_and_engines_have_a_short_repr() -> None:
    engine = toy_engine()
    outputs = engine.generate(["abc", "a" * 90], SamplingParams(max_new_tokens=90))
    assert len(repr(outputs)) < 500, "a list of results is readable in a notebook"
    assert "text='" in repr(outputs[0])
    assert "num_tokens=90" in repr(outputs[0])
    assert "acceptance_rate=0." in repr(outputs[0])
    counts = outputs[0].speculative
    assert f"num_draft_tokens={counts.num_draft_tokens}" in repr(counts)
    assert repr(SpeculativeCounts()).endswith("acceptance_rate=None, acceptance_length=None)")
    assert repr(engine).startswith("Engine(target='table', draft='ngram', num_speculative_tokens=")
    engine.add("abc")
    assert "open requests: 1" in repr(engine)


def test_generate_reports_progress_after_every_step() -> None:
    seen: list[Any] = []
    outputs = toy_engine().generate(["abc", "cab"], SamplingParams(max_new_tokens=9), progress=seen.append)
    assert [one.num_prompts for one in seen] == [2] * len(seen)
    assert (seen[-1].num_finished, seen[-1].num_tokens) == (2, sum(len(one.token_ids) for one in outputs))
    assert [one.num_tokens for one in seen] == sorted(one.num_tokens for one in seen)


def test_an_error_in_the_progress_callback_aborts_the_requests() -> None:
    engine = toy_engine()

    def give_up(_) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate("abc", SamplingParams(max_new_tokens=9), progress=give_up)
    assert not engine.has_work

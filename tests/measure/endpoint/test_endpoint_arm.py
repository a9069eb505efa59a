"""A server as an arm: the benchmark that compares arms measures servers, too."""

from pathlib import Path

import pytest
from fake_server import Fake, serving
from typed import not_none

from specdec_cli.engine.decoding import Request
from specdec_cli.engine.prompts import PromptRow
from specdec_cli.errors import RunError
from specdec_cli.measure.bench.bench import Bench
from specdec_cli.measure.bench.journal import open_journal
from specdec_cli.measure.endpoint.address import parse_address
from specdec_cli.measure.endpoint.answer import Answer
from specdec_cli.measure.endpoint.endpoint_arm import EndpointArm, counts_and_times
from specdec_cli.measure.endpoint.endpoint_plan import EndpointPlan
from specdec_cli.measure.endpoint.refusal import EndpointError
from specdec_cli.measure.workload.workload import Workload
from specdec_cli.recipe.schema import Sampling
from specdec_cli.sampling.params import SamplingParams

NUM_PROMPTS = 8


def arm(fake: Fake, name: str = "", **plan) -> EndpointArm:
    return EndpointArm(EndpointPlan(parse_address(fake.url), **plan), Sampling(), name)


def requests(num: int = NUM_PROMPTS) -> list[Request]:
    rows = [PromptRow(i, f"prompt {i}", category="code" if i % 2 else "chat") for i in range(num)]
    return [Request(row, [], SamplingParams(max_new_tokens=15)) for row in rows]


def test_two_servers_are_compared_as_any_arms_are(tmp_path: Path) -> None:
    def bench(fast: Fake, slow: Fake, resume: bool) -> Bench:
        journal = open_journal(tmp_path / "r.json", {}, resume)
        work = Workload("mine", tuple(requests()), (), 512)
        return Bench(work, arm(fast, "fast"), arm(slow, "slow"), journal=journal)

    with serving(Fake(metrics=None)) as fast, serving(Fake(metrics=None, pause_s=0.05)) as slow:
        first = bench(fast, slow, False)
        order = [progress.arm for progress in first.run()]
        again = bench(fast, slow, True)
        list(again.run())
    assert order[2:6] == ["fast", "slow", "slow", "fast"], "they take turns"
    latency = first.speedup("latency")
    assert not_none(latency).is_above(1.0)
    assert not_none(latency).pairs == NUM_PROMPTS
    assert first.tasks() == ["chat", "code"]
    assert not_none(first.speedup("latency", "code")).pairs == NUM_PROMPTS // 2
    assert first.differences().checked_tokens is None, "they say how many tokens, not which"
    assert [one.num_tokens for one in first.draft.passes] == [15] * 2 * NUM_PROMPTS
    assert not_none(again.journal).num_resumed == 4 * NUM_PROMPTS
    assert again.speedup("latency") == latency


def test_requests_of_a_run_are_sent_together() -> None:
    with serving(Fake(metrics=None, pause_s=0.1)) as fake:
        one = arm(fake, concurrency=3)
        one.start()
        run = one.run(requests(3), lambda: False)
        stopped = one.run(requests(3), lambda: True)
        one.stop()
    assert not_none(run).lengths == (15, 15, 15)
    assert (not_none(run).token_ids, not_none(run).num_first_tokens) == (None, 3)
    assert 0.1 <= not_none(not_none(run).timing.total_s) < 0.25
    assert stopped is None


def test_a_failed_request_and_uncounted_tokens_end_a_run() -> None:
    with serving(Fake(metrics=None, fault=500)) as fake:
        one = arm(fake)
        one.start()
        with pytest.raises(EndpointError):
            one.run(requests(1), lambda: False)
        one.stop()
    with serving(Fake(metrics=None, usage=False)) as fake:
        one = arm(fake)
        one.start()
        with pytest.raises(RunError, match="usage"):
            one.run(requests(1), lambda: False)
        one.stop()


def test_a_server_that_is_not_there_is_said_at_the_start_and_may_be_stopped() -> None:
    one = EndpointArm(EndpointPlan(parse_address("http://127.0.0.1:9")), Sampling())
    with pytest.raises(EndpointError):
        one.start()
    one.stop()
    arm_never_started = EndpointArm(EndpointPlan(parse_address("http://127.0.0.1:9")), Sampling())
    arm_never_started.stop()


def test_the_decode_clock_runs_from_the_first_text_of_all_to_the_last() -> None:
    answers = [
        Answer(10.0, arrivals=[1.0, 3.0], finish_s=3.5, end_s=4.0, completion_tokens=5),
        Answer(10.5, arrivals=[1.0, 2.0], end_s=2.5, completion_tokens=3),
    ]
    run = counts_and_times(answers)
    assert (run.counted, run.num_first_tokens) == ((5, 3), 2)
    timing = run.timing
    assert (timing.ttft_s, timing.decode_s, timing.total_s) == (1.0, 2.5, 3.5)
    assert timing.decode_tokens_per_second == 6 / 2.5

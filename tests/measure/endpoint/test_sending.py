"""Requests that arrive at a rate: Poisson, by the seed, timed from their arrival, and a queue that is seen."""

import math
from itertools import pairwise
from statistics import mean, stdev
from typing import Any

import pytest
from fake_server import Fake, serving
from typed import not_none

from specdec_cli.engine.prompts import rows_of
from specdec_cli.errors import UsageError
from specdec_cli.measure.endpoint.address import parse_address
from specdec_cli.measure.endpoint.endpoint_arm import EndpointArm
from specdec_cli.measure.endpoint.endpoint_bench import EndpointBench, percentiles
from specdec_cli.measure.endpoint.endpoint_doubts import doubts
from specdec_cli.measure.endpoint.endpoint_plan import EndpointPlan, pace_words, parse_rate
from specdec_cli.measure.endpoint.sending import arrival_times
from specdec_cli.recipe.schema import Sampling


def test_15_arrivals_are_a_poisson_process_by_the_seed() -> None:
    times = arrival_times(4000, 20.0, 3)
    gaps = [later - earlier for earlier, later in pairwise([0.0, *times])]
    assert mean(gaps) == pytest.approx(0.05, rel=0.05)
    assert stdev(gaps) == pytest.approx(0.05, rel=0.06), "of an exponential distribution the mean"
    assert sum(gap > 0.05 for gap in gaps) / 4000 == pytest.approx(math.exp(-1), abs=0.03)
    assert times == arrival_times(4000, 20.0, 3) != arrival_times(4000, 20.0, 4)
    assert arrival_times(3, math.inf, 0) == [0.0] * 3


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, -math.inf])
def test_15_what_is_no_rate(rate) -> None:
    with pytest.raises(UsageError, match="must be above 0"):
        parse_rate(rate)


def test_15_a_rate_in_words() -> None:
    assert parse_rate(None) == parse_rate(math.inf) == math.inf
    assert pace_words(4, math.inf) == pace_words(4, None) == "4 at a time"
    assert pace_words(None, 2.5) == "2.5 arriving per second"
    assert pace_words(3, 2.5) == "2.5 arriving per second, at most 3 at a time"


def measured(fake: Fake, num: int, **more: Any) -> EndpointBench:
    plan = EndpointPlan(parse_address(fake.url), **more)
    bench = EndpointBench(EndpointArm(plan, Sampling(max_new_tokens=15)), rows_of([f"prompt {i}" for i in range(num)]))
    bench.run(lambda: False, lambda: None)
    return bench


def test_15_requests_are_sent_when_they_arrive_whatever_is_open() -> None:
    with serving(Fake(pause_s=0.3, metrics=None)) as fake:
        bench = measured(fake, 10, concurrency=None, request_rate=50.0, seed=1)
    due = arrival_times(10, 50.0, 1)
    sent = sorted(answer.sent for _, answer in bench.answered())
    assert [at - sent[0] for at in sent] == pytest.approx([at - due[0] for at in due], abs=0.1)
    assert bench.sender.most_open > 3, "nobody waits for an answer"
    assert bench.sender.most_waiting == 0
    assert bench.seconds >= due[-1] + 0.3, "the wall clock, from the start to the last answer"
    assert not_none(percentiles(bench.answered(), "queue_s").median) < 0.1


def test_15_a_queue_is_part_of_the_time_from_arrival() -> None:
    with serving(Fake(pause_s=0.1, metrics=None)) as fake:
        bench = measured(fake, 20, concurrency=1, request_rate=200.0)
    sent, arrived = (percentiles(bench.answered(), name).median for name in ("latency_s", "arrival_latency_s"))
    queue = percentiles(bench.answered(), "queue_s").median
    assert not_none(sent) < 0.4
    assert not_none(queue) > 0.5
    assert arrived == pytest.approx(not_none(queue) + not_none(sent), rel=0.2)
    assert not_none(percentiles(bench.answered(), "arrival_ttft_s").median) > not_none(queue)
    assert bench.sender.most_open == 1
    assert bench.sender.most_waiting > 10
    found = " ".join(doubts(bench))
    assert "requests waited because 1 was open" in found
    assert "seems not to keep up with 200 requests/s" in found


def test_15_a_slow_rate_has_no_queue_and_its_idle_time_counts() -> None:
    with serving(Fake(metrics=None)) as fake:
        bench = measured(fake, 4, concurrency=1, request_rate=5.0, seed=2)
    assert bench.seconds >= arrival_times(4, 5.0, 2)[-1]
    assert doubts(bench) == []


def test_15_a_run_at_a_rate_is_stopped_while_it_waits() -> None:
    with serving(Fake(metrics=None)) as fake:
        plan = EndpointPlan(parse_address(fake.url), concurrency=None, request_rate=0.001)
        bench = EndpointBench(EndpointArm(plan, Sampling()), rows_of(["a", "b"]))
        bench.run(lambda: True, lambda: None)
    assert bench.visits == []


def test_15_a_closed_loop_has_no_arrivals() -> None:
    with serving(Fake(metrics=None)) as fake:
        bench = measured(fake, 6, concurrency=2)
    assert all(visit.wait_s == 0 for visit in bench.visits)
    assert "queue_s" not in bench.figures
    assert (bench.sender.most_open, bench.sender.most_waiting) == (2, 0)

"""What `/metrics` says is what the events said: counted once, under vLLM's names."""

import json
import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from specdec_cli.engine.jobs.records import JobRecord
from specdec_cli.events import Emitted, SpeculativeCounts, Stepped
from specdec_cli.serve.metrics import Metrics

VLLM_HISTOGRAMS = {
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "iteration_tokens_total",
}
EMITTED = (
    Emitted(0, (5,), "a", 0, 0, True),
    Emitted(1, (1, 2, 3), "bcd", 4, 2, False),
    Emitted(2, (1,), "e", 2, 0, False),
    Emitted(3, (7,), "f", 0, 0, False),
    Emitted(1, (1, 2, 3, 4, 5), "ghijk", 4, 4, False),
)


def stepped(*emitted: Emitted, num_running: int = 2, num_waiting: int = 1, num_prefill_tokens: int = 0) -> Stepped:
    return Stepped(emitted, num_running, num_waiting, num_prefill_tokens, 0.25, 0.5, 0.125, 30, 120)


def values(metrics: Metrics, others: tuple[Metrics, ...] = ()) -> dict[tuple[str, ...], float]:
    """Sample values by the name and the labels' values but the model's."""
    found = {}
    for family in text_string_to_metric_families(metrics.render(others)[0].decode()):
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name != "model_name" or others]
            found[(sample.name, *labels)] = sample.value
    return found


def test_acceptance_far_from_its_own_history_is_a_metric_and_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    """Windows of one rate, with some spread; then the draft fails, the text loops, and all is well again."""
    metrics, said = Metrics("m"), []

    def window(rate: float) -> None:
        caplog.clear()
        num = round(rate * 10)
        for _ in range(200):
            metrics.stepped(stepped(Emitted(1, (1,) * (num + 1), "", 10, num, False)), 0)
        said.append([record.getMessage() for record in caplog.records])

    with caplog.at_level(logging.WARNING):
        for rate in (0.5, 0.6) * 6:
            window(rate)
        assert not any(said), "its own spread is no alarm"
        assert values(metrics)[("specdec:spec_decode_acceptance_alarms_total", "low")] == 0
        for rate in (0.1, 0.1, 1.0, 0.5):
            window(rate)
    low, still_low, high, usual = said[-4:]
    assert low[0].startswith(
        "acceptance is unusually low: 10% of the last 2000 drafted tokens were accepted, usually 5"
    )
    assert (still_low, len(high), len(usual)) == ([], 1, 1)
    assert high[0].startswith("acceptance is unusually high: 100% ")
    assert usual[0].startswith("acceptance is usual again: 50% ")
    found = values(metrics)
    assert [found[("specdec:spec_decode_acceptance_alarms_total", way)] for way in ("low", "high")] == [2, 1]
    assert found[("specdec:spec_decode_acceptance_rate", "recent")] == 0.5
    for _ in range(32):
        window(0.1)
    assert [bool(lines) for lines in said[-32:]] == [True] + [False] * 31, "a change that lasts is the new history"
    assert values(metrics)[("specdec:spec_decode_acceptance_alarms_total", "low")] == 22


def test_a_young_server_has_no_history_to_be_judged_by(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics("m")
    for num in (0, 10) * 4:
        for _ in range(200):
            metrics.stepped(stepped(Emitted(1, (1,) * (num + 1), "", 10, num, False)), 0)
    assert not caplog.records
    assert ("specdec:spec_decode_acceptance_rate", "usual") in values(metrics)


def test_speculation_is_counted_as_every_statistic_counts_it() -> None:
    metrics, counts = Metrics("m"), SpeculativeCounts()
    for emitted in EMITTED:
        metrics.stepped(stepped(emitted), 0)
        counts.add(emitted)
    found = values(metrics)
    name = "specdec:spec_decode_num_"
    assert found[(f"{name}drafts_total",)] == counts.num_drafts == 3
    assert found[(f"{name}draft_tokens_total",)] == counts.num_draft_tokens == 10
    assert found[(f"{name}accepted_tokens_total",)] == counts.num_accepted_tokens == 6
    kept = [found[(f"{name}accepted_tokens_per_pos_total", str(i))] for i in range(4)]
    drafted = [found[(f"{name}draft_tokens_per_pos_total", str(i))] for i in range(4)]
    assert (kept, drafted) == (counts.accepted_at_least, counts.drafted_at_least) == ([2, 2, 1, 1], [3, 3, 2, 2])
    assert found[("specdec:generation_tokens_total",)] == 11
    assert found[("specdec:step_seconds_total", "verify")] == 2.5


def test_a_request_from_queue_to_end() -> None:
    metrics = Metrics("m")
    metrics.queued(3)
    assert values(metrics)[("specdec:num_requests_waiting",)] == 3
    record = JobRecord("r", 40, arrived=10.0, scheduled=10.5)
    metrics.stepped(stepped(Emitted(0, (5,), "a", 0, 0, True), num_prefill_tokens=40), 2)
    record.first_token = record.last_token = 11.0
    metrics.emitted(record, 1, None)
    found = values(metrics)
    assert (found[("specdec:num_requests_running",)], found[("specdec:num_requests_waiting",)]) == (2, 3)
    assert found[("specdec:kv_cache_usage_perc",)] == 0.25
    record.last_token, record.num_output_tokens = 12.0, 5
    metrics.emitted(record, 4, 1.0)
    record.finished, record.finish_reason = 12.25, "length"
    metrics.ended(record)
    found = values(metrics)
    sums = {name: found[(f"specdec:{name}_sum",)] for name in VLLM_HISTOGRAMS}
    assert sums == {
        "time_to_first_token_seconds": 1.0,
        "inter_token_latency_seconds": 1.0,
        "request_time_per_output_token_seconds": 0.25,
        "e2e_request_latency_seconds": 2.25,
        "request_queue_time_seconds": 0.5,
        "request_inference_time_seconds": 1.5,
        "request_prefill_time_seconds": 0.5,
        "request_decode_time_seconds": 1.0,
        "request_prompt_tokens": 40,
        "request_generation_tokens": 5,
        "iteration_tokens_total": 41,
    }
    assert found[("specdec:prompt_tokens_total",)] == 40
    assert found[("specdec:request_success_total", "length")] == 1
    assert found[("specdec:time_to_first_token_seconds_bucket", "0.8")] == 0
    assert found[("specdec:time_to_first_token_seconds_bucket", "1.0")] == 1


def test_idle_after_the_last_request_whatever_the_last_step_said() -> None:
    metrics = Metrics("m")
    metrics.queued(1)
    metrics.queued(2)
    metrics.stepped(stepped(num_running=2, num_waiting=0), 0)
    metrics.ended(JobRecord("a", 3, 0.0, scheduled=0.0, first_token=1.0, last_token=1.0, finished=1.0))
    assert metrics.snapshot().num_running == 1
    metrics.ended(JobRecord("b", 3, 0.0, finished=1.0, finish_reason="abort"))
    now = metrics.snapshot()
    assert (now.num_running, now.num_waiting, now.kv_cache_usage) == (0, 0, 0.0)
    assert (now.num_failed, now.num_aborted, now.num_finished) == (1, 1, 0)


def test_names_are_vllms_under_its_prefix_and_a_model_is_a_label() -> None:
    one, two = Metrics("one", "vllm"), Metrics("two", "vllm")
    for metrics in (one, two):
        metrics.stepped(stepped(*EMITTED), 0)
        metrics.refused(429)
    two.draft_failures = lambda: {"ngram": 1, "model": 0}
    body, content_type = one.render((two,))
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    assert all(name.startswith("vllm:") for name in families)
    assert {f"vllm:{name}" for name in VLLM_HISTOGRAMS} == {n for n, f in families.items() if f.type == "histogram"}
    assert body.decode().count("# TYPE vllm:num_requests_running gauge") == 1
    assert content_type.startswith("text/plain; version=0.0.4")
    found = values(one, (two,))
    assert (
        found[("vllm:requests_refused_total", "one", "429")]
        == found[("vllm:requests_refused_total", "two", "429")]
        == 1
    )
    assert found[("vllm:draft_failures_total", "ngram", "two")] == two.snapshot().num_draft_failures == 1
    assert found[("vllm:draft_failures_total", "model", "two")] == one.snapshot().num_draft_failures == 0


def test_two_servers_in_a_process_share_nothing() -> None:
    one, two = Metrics("m"), Metrics("m")
    one.stepped(stepped(*EMITTED), 0)
    assert values(two)[("specdec:generation_tokens_total",)] == 0


def test_cached_prompt_tokens_and_preemptions_are_counted() -> None:
    metrics = Metrics("m")
    for num_cached, num_preemptions in ((0, 0), (16, 2)):
        event = stepped(EMITTED[0])
        metrics.stepped(replace(event, num_preemptions=num_preemptions), 0)
        metrics.emitted(JobRecord("r", 20, 0.0, first_token=1.0, num_cached_tokens=num_cached), 1, None)
    found = values(metrics)
    assert found["specdec:prefix_cache_queries_total",] == 40
    assert found["specdec:prefix_cache_hits_total",] == 16
    assert found["specdec:num_preemptions_total",] == 2


def test_the_dashboard_reads_series_that_the_server_has() -> None:
    file = Path(__file__).parents[2] / "deploy/grafana/dashboards/specdec.json"
    panels = json.loads(file.read_text(encoding="utf-8"))["panels"]
    named = {
        name for panel in panels for target in panel["targets"] for name in re.findall(r"specdec:\w+", target["expr"])
    }
    metrics = Metrics("m")
    for emitted in EMITTED:
        metrics.stepped(stepped(emitted), 0)
    metrics.refused(429)
    served = {name for name, *_ in values(metrics)}
    assert len(named) > 8
    assert named - served == set()

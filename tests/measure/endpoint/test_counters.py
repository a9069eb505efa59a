"""A server's Prometheus page before and after: differences, what is left unknown, and gauges that stay gauges."""

import asyncio

import pytest
from typed import not_none

from specdec_cli.measure.endpoint.counters import Counters, MetricsPage, difference, parse, read_settled
from specdec_cli.measure.endpoint.server_counts import statistics

VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 5.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 2.0
vllm:spec_decode_num_drafts_total{engine="0",model_name="another"} 90.0
# HELP vllm:spec_decode_num_drafts_created Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7952599572472498e+09
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 3.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 24.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
"""

SGLANG = """\
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{model_name="m",tp_rank="0"} 2.9
# TYPE sglang:spec_accept_rate gauge
sglang:spec_accept_rate{model_name="m",tp_rank="0"} 0.27
sglang:spec_accept_rate{model_name="m",tp_rank="1"} 0.31
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{model_name="m"} 100
"""


def counted(drafts=10, drafted=20, accepted=12, at=(8, 4), prefix: str = "spec_decode_num_"):
    added = {f"{prefix}drafts": drafts, f"{prefix}draft_tokens": drafted, f"{prefix}accepted_tokens": accepted}
    return added | {f'{prefix}accepted_tokens_per_pos{{position="{i}"}}': float(n) for i, n in enumerate(at)}


def test_a_page_keeps_what_speaks_of_speculation_and_output_and_of_this_model() -> None:
    page = parse(VLLM, "/metrics", "m")
    assert (not_none(page).engine, not_none(page).prefix, not_none(page).path) == ("vllm", "vllm:", "/metrics")
    assert not_none(page).counters == {
        "spec_decode_num_drafts": 7.0,
        'spec_decode_num_accepted_tokens_per_pos{position="0"}': 4.0,
        'spec_decode_num_accepted_tokens_per_pos{position="1"}': 3.0,
        "generation_tokens": 24.0,
    }
    assert not_none(page).gauges == {}
    assert not_none(parse(VLLM, "/metrics", "unlisted")).counters["spec_decode_num_drafts"] == 97.0


def test_llama_cpp_and_specdec_count_under_the_same_names() -> None:
    for prefix, engine in (("llamacpp:", "llama.cpp"), ("specdec:", "specdec")):
        page = parse(VLLM.replace("vllm:", prefix), "/metrics", "m")
        assert not_none(page).engine == engine
        assert not_none(page).counters["spec_decode_num_drafts"] == 7.0


@pytest.mark.parametrize("text", ["", "[]", "<html>", "# TYPE other_total counter\nother_total 3\n", 'a{b="c 3'])
def test_other_pages_are_no_page(text: str) -> None:
    assert parse(text, "/metrics", "m") is None


def test_statistics_are_differences_and_null_where_nobody_counted() -> None:
    found = statistics(counted())
    assert not_none(found)["num_drafts"] == 10
    assert not_none(found)["acceptance_rate"] == 0.6
    assert not_none(found)["acceptance_length"] == 2.2
    assert not_none(found)["per_position_acceptance_rates"] == [0.8, 0.4]
    assert not_none(found)["conditional_acceptance_rates"] == [0.8, 0.5]
    assert not_none(found)["acceptance_histogram"] == [2, 4, 4]
    assert not_none(found)["num_emitted_tokens"] is None
    assert not_none(found)["draft_seconds"] is None


def test_rates_by_position_need_steps_that_all_drafted_as_much() -> None:
    found = statistics(counted(drafted=17))
    assert not_none(found)["per_position_acceptance_rates"] is None
    assert not_none(found)["conditional_acceptance_rates"] is None
    assert not_none(found)["acceptance_histogram"] == [2, 4, 4]


def test_positions_that_contradict_the_total_are_left_out() -> None:
    assert not_none(statistics(counted(accepted=13)))["acceptance_histogram"] is None


def test_a_server_that_counts_no_steps_has_no_acceptance_length() -> None:
    found = statistics({"spec_decode_num_draft_tokens": 8.0, "spec_decode_num_accepted_tokens": 6.0})
    assert not_none(found)["acceptance_rate"] == 0.75
    assert (
        not_none(found)["num_drafts"],
        not_none(found)["acceptance_length"],
        not_none(found)["acceptance_histogram"],
    ) == (
        None,
        None,
        None,
    )


def test_nothing_drafted_is_counted_and_has_no_ratio() -> None:
    found = statistics(counted(0, 0, 0, (0, 0)))
    assert (
        not_none(found)["num_draft_tokens"],
        not_none(found)["acceptance_rate"],
        not_none(found)["acceptance_length"],
    ) == (
        0,
        None,
        None,
    )
    assert statistics({"generation_tokens": 3.0}) is None


def page(counters, **gauges):
    return MetricsPage("/metrics", "vllm", "vllm:", counters, gauges)


def test_only_what_the_run_added_counts() -> None:
    before = page({"spec_decode_num_drafts": 100.0, "generation_tokens": 50.0})
    after = page({"spec_decode_num_drafts": 104.0, "generation_tokens": 70.0, "spec_decode_num_accepted_tokens": 3.0})
    found = difference(before, after, 20)
    assert found.notices == ()
    assert not_none(found.as_dict())["raw"] == {
        "vllm:spec_decode_num_drafts": 4.0,
        "vllm:generation_tokens": 20.0,
        "vllm:spec_decode_num_accepted_tokens": 3.0,
    }
    assert not_none(found.as_dict())["speculative"]["acceptance_length"] == 1.75


def test_the_work_of_others_is_noticed() -> None:
    found = difference(page({"generation_tokens": 0.0}), page({"generation_tokens": 30.0}), 20)
    assert "counted 30 output tokens while this run's answers had 20" in found.notices[-1]


def test_a_restart_is_noticed_and_nothing_is_made_of_it() -> None:
    found = difference(page({"spec_decode_num_drafts": 9.0}), page({"spec_decode_num_drafts": 2.0}), None)
    assert not_none(found.as_dict())["speculative"] is None
    assert not_none(found.as_dict())["raw"] == {}
    assert "reset its counters" in found.notices[0]


def test_a_server_without_metrics_is_null_and_a_notice() -> None:
    found = difference(None, None, 5)
    assert found.as_dict() is None
    assert found.notices == ("the server's /metrics says nothing about speculation: acceptance is unknown",)
    assert "went away" in difference(page({}), None, 5).notices[0]


def test_gauges_are_shown_as_gauges_and_never_become_statistics() -> None:
    read = parse(SGLANG, "/metrics", "m")
    found = difference(read, read, 0)
    assert not_none(found.as_dict())["speculative"] is None
    assert not_none(found.as_dict())["gauges"] == {
        "sglang:spec_accept_length": 2.9,
        'sglang:spec_accept_rate{model_name="m",tp_rank="0"}': 0.27,
        'sglang:spec_accept_rate{model_name="m",tp_rank="1"}': 0.31,
    }
    assert "gauges of speculation alone" in found.notices[0]


def test_a_gauge_that_is_no_number_yet_is_null() -> None:
    found = Counters(page({}, spec_accept_length=float("nan"), spec_accept_rate=0.5), {}, ())
    assert not_none(found.as_dict())["gauges"] == {"vllm:spec_accept_length": None, "vllm:spec_accept_rate": 0.5}


def test_reading_waits_until_the_page_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec_cli.measure.endpoint import counters

    monkeypatch.setattr(counters, "_SETTLE_SECONDS", 0)
    texts = [VLLM.replace("} 24.0", f"}} {tokens}") for tokens in (20, 22, 24, 24, 99)]
    asked = []

    async def fetch(path):
        asked.append(path)
        return texts[len(asked) - 1]

    assert not_none(asyncio.run(read_settled(fetch, "m"))).counters["generation_tokens"] == 24
    assert len(asked) == 4


def test_tensorrt_llm_keeps_its_page_elsewhere() -> None:
    text = "# TYPE trtllm_spec_decode_num_draft_tokens_total counter\ntrtllm_spec_decode_num_draft_tokens_total 8\n"

    async def fetch(path):
        return text if path == "/prometheus/metrics" else "[]"

    found = asyncio.run(read_settled(fetch, "m"))
    assert (not_none(found).engine, not_none(found).path) == ("tensorrt-llm", "/prometheus/metrics")
    assert not_none(found).counters == {"spec_decode_num_draft_tokens": 8.0}


def test_a_restart_shows_by_the_time_at_which_counters_began() -> None:
    before = not_none(parse(VLLM, "/metrics", "m"))
    later = not_none(parse(VLLM.replace("} 5.0", "} 8.0"), "/metrics", "m"))
    assert difference(before, later, None).added["spec_decode_num_drafts"] == 3.0
    anew = not_none(parse(VLLM.replace("} 5.0", "} 8.0").replace("1.79525", "1.79526"), "/metrics", "m"))
    found = difference(before, anew, None)
    assert found.added == {}
    assert "reset its counters" in found.notices[0]

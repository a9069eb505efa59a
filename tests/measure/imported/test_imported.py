import json
from pathlib import Path
from typing import Any

import pytest
from schemas import assert_fits

from specdec_cli.cli.main import run
from specdec_cli.measure.imported.record import ImportDocument

VLLM_LOG = """\
INFO 10:00:00 [metrics.py:98] SpecDecoding metrics: Mean acceptance length: 2.50, Accepted throughput: 15.00 \
tokens/s, Drafted throughput: 40.00 tokens/s, Accepted: 150 tokens, Drafted: 400 tokens, Per-position acceptance \
rate: 0.750, 0.450, 0.200, 0.100, Avg Draft acceptance rate: 37.5%
INFO 11-26 10:00:05 [loggers.py:1] Engine 000: Avg prompt throughput: 1.0 tokens/s
INFO 10:00:10 [metrics.py:98] SpecDecoding metrics: Mean acceptance length: 3.00, Accepted throughput: 20.00 \
tokens/s, Drafted throughput: 40.00 tokens/s, Accepted: 600 tokens, Drafted: 1200 tokens, Per-position acceptance \
rate: 0.800, 0.600, 0.400, 0.200, Avg Draft acceptance rate: 50.0%
"""
LLAMA_LOG = """\
slot print_timing: id  0 | task 0 | draft acceptance = 0.66234 (   51 accepted /    77 generated), mean len =  2.50
slot print_timing: id  0 | task 0 | acc per pos = (0.8, 0.7)
slot print_timing: id  1 | task 9 | draft acceptance = 0.50000 (   30 accepted /    60 generated), mean len =  2.00
slot print_timing: id  1 | task 9 | acc per pos = (0.6, 0.4)
"""
SGLANG_LOG = "[2026-11-26] Decode batch. #running-req: 1, accept len: 2.30, accept rate: 0.66, cuda graph: True\n" * 2


def metrics(drafts: int, drafted: int, accepted: int, reached: tuple[int, ...]) -> str:
    counts = {"drafts": drafts, "draft_tokens": drafted, "accepted_tokens": accepted}
    lines = []
    for name, count in counts.items():
        lines += [f"# TYPE vllm:spec_decode_num_{name}_total counter"]
        lines += [f'vllm:spec_decode_num_{name}_total{{model_name="m"}} {count}.0']
    lines += ["# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter"]
    lines += [
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name="m",position="{place}"}} {count}.0'
        for place, count in enumerate(reached)
    ]
    return "\n".join(lines) + "\n"


VLLM_METRICS = metrics(100, 300, 150, (80, 50, 20))
BENCH = {
    "spec_decode_acceptance_rate": 50.0,
    "spec_decode_acceptance_length": 2.5,
    "spec_decode_num_drafts": 40,
    "spec_decode_draft_tokens": 120,
    "spec_decode_accepted_tokens": 60,
    "spec_decode_per_position_acceptance_rates": [0.8, 0.5, 0.2],
    "output_throughput": 123.4,
}
RESPONSE = {
    "num_spec_steps": 10,
    "num_accepted_draft_tokens": 12,
    "num_draft_tokens": 30,
    "acceptance_histogram": [3, 4, 1, 2],
}
SGLANG = [
    {"text": "x", "meta_info": {"completion_tokens": 25, "spec_verify_ct": 10, "spec_num_correct_drafts": 15,
                                "spec_num_proposed_drafts": 30, "spec_accept_length": 2.5, "spec_accept_rate": 0.5}},
    {"text": "y", "meta_info": {"completion_tokens": 30, "spec_verify_ct": 10, "spec_num_correct_drafts": 20,
                                "spec_num_proposed_drafts": 30, "spec_accept_length": 3.0, "spec_accept_rate": 0.67}},
]  # fmt: skip
TRTLLM = [
    {"iter": 1, "specDecodingStats": {"numDraftTokens": 8, "numAcceptedTokens": 5, "numRequestsWithDraftTokens": 2}},
    {"iter": 2, "specDecodingStats": {"numDraftTokens": 8, "numAcceptedTokens": 3, "numRequestsWithDraftTokens": 2}},
]
AIPERF = {"pooled_spec_decode_acceptance_histogram": {"0": 5, "2": 3, "3": 2}}
AIPERF_MEANS = {"total_draft_tokens": {"avg": 40}, "spec_decode_acceptance_length": {"avg": 2.4},
                "spec_decode_token_weighted_acceptance_length": {"avg": 2.2}}  # fmt: skip
TRTLLM_REQUEST = {"total_draft_tokens": 30, "total_accepted_draft_tokens": 12, "num_spec_steps": 10,
                  "acceptance_histogram": [3, 4, 1, 2]}  # fmt: skip


def record(drafted: list[int], accepted: list[int], **more: Any) -> str:
    figures = {"num_spec_steps": len(drafted), "num_draft_tokens": sum(drafted),
               "num_accepted_draft_tokens": sum(accepted), "per_step_drafted": drafted, "per_step_accepted": accepted,
               "acceptance_histogram": {str(n): accepted.count(n) for n in accepted}}  # fmt: skip
    line = {"metadata": {"benchmark_phase": "profiling"}, "spec_decode_acceptance": figures} | more
    return json.dumps(line) + "\n"


AIPERF_RECORDS = (
    record([2, 2, 1], [2, 0, 1])
    + record([2, 2], [1, 0])
    + record([9], [9], metadata={"benchmark_phase": "warmup"})
    + record([9], [9], error={"message": "cut"})
)
GUIDELLM = {"benchmarks": [{"requests": [{"response_metrics": {"speculative_decoding": RESPONSE}}] * 2}]}

# Of each file: tool, drafting steps, drafted, accepted, rate, length.
FORMS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "vllm.log": (VLLM_LOG, ("vllm", 400, 1600, 750, 0.46875, 2.875)),
    "llama.log": (LLAMA_LOG, ("llama.cpp", 64, 137, 81, 81 / 137, 2.265625)),
    "sglang.log": (SGLANG_LOG, ("sglang", None, None, None, None, None)),
    "vllm.txt": (VLLM_METRICS, ("vllm", 100, 300, 150, 0.5, 2.5)),
    "llama.txt": (VLLM_METRICS.replace("vllm:", "llamacpp:"), ("llama.cpp", 100, 300, 150, 0.5, 2.5)),
    "bench.json": (json.dumps(BENCH), ("vllm", 40, 120, 60, 0.5, 2.5)),
    "responses.jsonl": ("\n".join([json.dumps({"metrics": {"speculative_decoding": RESPONSE}})] * 2),
                        ("vllm", 20, 60, 24, 0.4, 2.2)),
    "sglang.json": (json.dumps(SGLANG), ("sglang", 20, 60, 35, 35 / 60, 2.75)),
    "trtllm.json": (json.dumps(TRTLLM), ("tensorrt-llm", 4, 16, 8, 0.5, 3.0)),
    "requests.json": (json.dumps([{"total_draft_tokens": 9, "total_accepted_draft_tokens": 3}]),
                      ("tensorrt-llm", None, 9, 3, 1 / 3, None)),
    "trtllm.jsonl": (json.dumps({"choices": [{"speculative_decoding": TRTLLM_REQUEST}]}),
                     ("tensorrt-llm", 10, 30, 12, 0.4, 2.2)),
    "records.jsonl": (AIPERF_RECORDS, ("aiperf", 5, 9, 4, 4 / 9, 1.8)),
    "summary.json": (json.dumps(AIPERF | AIPERF_MEANS), ("aiperf", 10, 40, 12, 0.3, 2.2)),
    "aiperf.json": (json.dumps(AIPERF), ("aiperf", 10, None, 12, None, 2.2)),
    "guidellm.json": (json.dumps(GUIDELLM), ("guidellm", 20, 60, 24, 0.4, 2.2)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, (text, _) in FORMS.items():
        Path(name).write_text(text)


def imported(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run(["import", *words, "--json", "--quiet"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert_fits(found, ImportDocument)
    return found


@pytest.mark.parametrize("name", FORMS)
def test_figures_are_those_of_the_file(capsys: pytest.CaptureFixture[str], name: str) -> None:
    found = imported(capsys, name)
    tool, *figures = FORMS[name][1]
    assert found["source"]["tool"] == tool
    keys = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "acceptance_rate", "acceptance_length")
    stats = found["speculative"] or dict.fromkeys(keys)
    for key, figure in zip(keys, figures, strict=True):
        assert stats[key] == (None if figure is None else pytest.approx(figure, rel=0.01)), key


def test_rates_by_position_are_weighted_by_steps(capsys: pytest.CaptureFixture[str]) -> None:
    rates = imported(capsys, "vllm.log")["speculative"]["per_position_acceptance_rates"]
    assert rates == pytest.approx([0.7875, 0.5625, 0.35, 0.175])
    rates = imported(capsys, "responses.jsonl")["speculative"]["per_position_acceptance_rates"]
    assert rates == pytest.approx([0.7, 0.3, 0.2])


def test_a_mean_of_means_is_called_that(capsys: pytest.CaptureFixture[str]) -> None:
    """AIPerf's average weighs requests, not steps; the length here is of all steps together."""
    found = imported(capsys, "summary.json")
    assert found["speculative"]["acceptance_length"] == 2.2
    assert found["reported"]["spec_decode_acceptance_length"] == 2.4
    assert run(["import", "summary.json"]) == 0
    assert "spec_decode_acceptance_length: mean of the requests' lengths" in capsys.readouterr().out


def test_steps_of_different_depths_have_rates_by_position_where_they_are_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    counts = imported(capsys, "records.jsonl")["speculative"]
    assert counts["per_position_acceptance_rates"] == [3 / 5, 1 / 4]
    assert counts["conditional_acceptance_rates"] == [3 / 5, 1 / 2]


@pytest.mark.parametrize("listed", [{"per_step_accepted": [2, 1, 1]}, {"per_step_drafted": [2, 2, 2]}])
def test_listed_steps_that_add_up_to_other_totals_are_left_out(
    capsys: pytest.CaptureFixture[str], listed: dict[str, list[int]]
) -> None:
    """The histogram remains, and rates by position and the length do not contradict each other."""
    line = json.loads(record([2, 2, 1], [2, 0, 1]))
    line["spec_decode_acceptance"] |= listed
    Path("records.jsonl").write_text(json.dumps(line))
    counts = imported(capsys, "records.jsonl")["speculative"]
    assert (counts["acceptance_length"], counts["acceptance_histogram"]) == (2.0, [1, 1, 1])
    assert counts["per_position_acceptance_rates"] is None


def test_sglangs_log_has_averages_alone_and_its_own_definition(capsys: pytest.CaptureFixture[str]) -> None:
    found = imported(capsys, "sglang.log")
    assert found["reported"] == {"accept len": pytest.approx(2.3), "accept rate": pytest.approx(0.66)}
    assert "draft tokens - 1" in found["definitions"]["accept rate"]
    assert found["definitions"]["accept len"].startswith("mean of the log lines' means")
    assert "averages alone" in found["notices"][0]


def test_counts_before_a_run_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    Path("before.txt").write_text(metrics(60, 180, 100, (50, 35, 15)))
    found = imported(capsys, "vllm.txt", "--before", "before.txt")["speculative"]
    assert (found["num_drafts"], found["num_draft_tokens"], found["num_accepted_tokens"]) == (40, 120, 50)


CREATED = '# TYPE vllm:spec_decode_num_drafts_created gauge\nvllm:spec_decode_num_drafts_created{{model_name="m"}} {}\n'
BEFORE = metrics(60, 180, 100, (50, 35, 15))


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (
            BEFORE.replace('"m"', '"other"'),
            VLLM_METRICS,
            '`before.txt` has the counter `spec_decode_num_drafts{model_name="other"}`, and `after.txt` has none',
        ),
        (
            VLLM_METRICS,
            BEFORE,
            '`after.txt` has 60 of the counter `spec_decode_num_drafts{model_name="m"}`, and `before.txt` had 100',
        ),
        (
            BEFORE + CREATED.format(1.5e9),
            VLLM_METRICS + CREATED.format(1.6e9),
            "the counters of `before.txt` and `after.txt` began at different times",
        ),
    ],
)
def test_metrics_of_another_server_are_not_subtracted(
    capsys: pytest.CaptureFixture[str], before: str, after: str, said: str
) -> None:
    Path("before.txt").write_text(before)
    Path("after.txt").write_text(after)
    assert run(["import", "after.txt", "--before", "before.txt"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in " ".join(err.split())


def test_files_that_may_count_the_same_tokens_are_not_summed(capsys: pytest.CaptureFixture[str]) -> None:
    Path("before.txt").write_text(BEFORE + CREATED.format(1.5e9))
    Path("after.txt").write_text(VLLM_METRICS + CREATED.format(1.5e9))
    Path("other.txt").write_text(VLLM_METRICS + CREATED.format(1.6e9))
    for words, said in (
        (["vllm.log", "vllm.txt"], "`vllm.txt` of `metrics`: they may count the same tokens"),
        (["bench.json", "responses.jsonl"], "`responses.jsonl` of `2 responses with metrics`: they may"),
        (["before.txt", "after.txt"], "`before.txt` and `after.txt` are metrics of one server"),
    ):
        assert run(["import", *words]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    found = imported(capsys, "after.txt", "other.txt")
    assert found["speculative"]["num_drafts"] == 200
    assert found["source"]["form"] == "2 files: metrics"
    assert "the counts of 2 dumps of metrics are added up, as of as many servers" in found["notices"]


def test_several_dumps_in_one_file_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("twice.txt").write_text(BEFORE * 2)
    Path("both.txt").write_text(BEFORE + BEFORE.replace("vllm:", "sglang:"))
    Path("after.txt").write_text(BEFORE)
    for words, said in (
        (["twice.txt"], '`twice.txt` holds `vllm:spec_decode_num_drafts_total{model_name="m"}` several times'),
        (["after.txt", "--before", "twice.txt"], "`twice.txt` holds `vllm:spec_decode_num_drafts_total"),
        (["both.txt"], "`both.txt` holds metrics of several engines: sglang, vllm"),
    ):
        assert run(["import", *words]) == 2
        assert said in " ".join(capsys.readouterr().err.split())


def test_a_line_of_json_may_hold_other_line_breaks(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [one for one in Path("responses.jsonl").read_text().splitlines() if one.strip()]
    spoken = [json.dumps({**json.loads(one), "text": "a\u2028b\x85c"}, ensure_ascii=False) for one in lines]
    before = imported(capsys, "responses.jsonl")["speculative"]
    Path("spoken.jsonl").write_text("\n".join(spoken), encoding="utf-8")
    assert imported(capsys, "spoken.jsonl")["speculative"] == before


def test_counts_of_several_models_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("models.txt").write_text(BEFORE + BEFORE.replace('"m"', '"n"'))
    found = imported(capsys, "models.txt")
    assert found["speculative"]["num_drafts"] == 120
    assert "the counts of 2 models are added up: m, n" in found["notices"]


def test_a_process_that_started_anew_is_another_server(capsys: pytest.CaptureFixture[str]) -> None:
    for name, since in (("before.txt", 1.5e9), ("after.txt", 1.6e9)):
        Path(name).write_text(f"{BEFORE}process_start_time_seconds {since}\n")
    assert run(["import", "after.txt", "--before", "before.txt"]) == 2
    assert "began at different times" in " ".join(capsys.readouterr().err.split())
    assert run(["import", "after.txt", "before.txt"]) == 0, "those of two servers"


def test_a_log_of_two_tools_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("both.log").write_text(VLLM_LOG + SGLANG_LOG)
    assert run(["import", "both.log"]) == 2
    assert "`both.log` is a log of several tools: sglang, vllm" in " ".join(capsys.readouterr().err.split())


def test_counts_by_position_that_are_not_the_accepted_tokens_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("odd.txt").write_text(metrics(100, 300, 150, (80, 40, 20)))
    found = imported(capsys, "odd.txt")
    assert found["speculative"]["per_position_acceptance_rates"] is None
    assert "counts by position add up to 140, not to 150 accepted tokens" in found["notices"][-1]


def test_files_of_one_tool_are_summed_and_others_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("second.log").write_text(VLLM_LOG)
    assert imported(capsys, "vllm.log", "second.log")["speculative"]["num_draft_tokens"] == 3200
    assert run(["import", "vllm.log", "llama.log"]) == 2
    assert "of several tools: llama.cpp, vllm" in capsys.readouterr().err


def test_a_file_is_counted_once(capsys: pytest.CaptureFixture[str]) -> None:
    Path("link.txt").symlink_to("vllm.txt")
    for words, said in (
        (["vllm.txt", "vllm.txt"], "`vllm.txt` is given twice"),
        (["vllm.txt", "./link.txt"], "`vllm.txt` and `link.txt` are one file"),
        (["vllm.txt", "--before", "vllm.txt"], "`vllm.txt` is given twice"),
    ):
        assert run(["import", *words]) == 2
        assert said in capsys.readouterr().err


def test_appended_results_are_summed(capsys: pytest.CaptureFixture[str]) -> None:
    """`vllm bench serve --append-result` writes a line each, `--save-result` one value."""
    second = BENCH | {"spec_decode_num_drafts": 60, "spec_decode_accepted_tokens": 90, "output_throughput": 99.0}
    plain = {"output_throughput": 50.0}
    Path("bench.jsonl").write_text("\n".join(map(json.dumps, (BENCH, plain, second))))
    found = imported(capsys, "bench.jsonl")
    assert found["source"]["form"] == "2 results of vllm bench serve"
    assert found["speculative"]["num_drafts"] == 100
    assert found["speculative"]["num_accepted_tokens"] == 150
    assert found["speculative"]["per_position_acceptance_rates"] == pytest.approx([0.8, 0.5, 0.2])
    assert found["reported"]["output_throughput"] == 99.0
    assert "those of the last result" in found["notices"][-1]
    Path("aiperf.jsonl").write_text("\n".join([json.dumps({"profile": AIPERF})] * 2))
    assert imported(capsys, "aiperf.jsonl")["speculative"]["num_drafts"] == 20


def test_gates_hold_for_runs_made_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["import", "vllm.log", "--fail-if", "speculative.acceptance_length < 2.5"]) == 0
    assert run(["import", "vllm.log", "--fail-if", "speculative.acceptance_length < 3"]) == 3
    out, err = capsys.readouterr()
    assert "FAILED" in out
    assert "gate crossed" in err
    assert run(["import", "sglang.log", "--fail-if", "speculative.acceptance_length < 2"]) == 3, "no figure is no pass"
    assert run(["import", "vllm.log", "--fail-if", "speedup.decode < 2"]) == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nothing",
        "[]",
        "{}",
        '{"spec_decode_num_drafts": "many"}',
        '{"spec_decode_num_drafts": 3}',
        "# TYPE x counter\nx 1\n",
    ],
)
def test_other_files_are_refused(capsys: pytest.CaptureFixture[str], text: str) -> None:
    Path("other").write_text(text)
    assert run(["import", "other"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert run(["import", "nowhere"]) == 2
    assert run(["import", "vllm.log", "--before", "vllm.txt"]) == 2
    assert run(["import", "vllm.txt", "--before", "vllm.log"]) == 2


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        (SGLANG_LOG.replace("0.66, cuda graph: True", "0.66."), {"accept len": 2.3, "accept rate": 0.66}),
        (LLAMA_LOG.replace("2.50", "2.50.").replace("2.00", "2.00."), {}),
    ],
)
def test_a_full_stop_ends_a_figure(capsys: pytest.CaptureFixture[str], text: str, reported: dict[str, float]) -> None:
    Path("stops.log").write_text(text)
    found = imported(capsys, "stops.log")
    assert found["reported"] == pytest.approx(reported)
    assert reported or found["speculative"]["num_drafts"] == 64


def test_a_figure_that_is_no_number_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    Path("nan.json").write_text(json.dumps(BENCH | {"output_throughput": float("nan"), "mean_ttft_ms": 3.0}))
    reported = imported(capsys, "nan.json")["reported"]
    assert "output_throughput" not in reported
    assert reported["mean_ttft_ms"] == 3.0


WRONG = "has figures of speculation of the wrong kind"
LESS = RESPONSE | {"num_draft_tokens": 5}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (json.dumps(BENCH).replace("40,", "NaN,"), WRONG),
        (json.dumps(BENCH).replace("40,", "1e999,"), WRONG),
        (json.dumps(BENCH).replace("40,", f"{'9' * 400},"), WRONG),
        (json.dumps(BENCH | {"spec_decode_num_drafts": -40}), WRONG),
        (json.dumps(RESPONSE | {"acceptance_histogram": {"99999999999": 1}}), WRONG),
        (json.dumps(RESPONSE | {"acceptance_histogram": {"-1": 1}}), WRONG),
        (VLLM_LOG.replace("0.750,", "0.7.5,"), WRONG),
        (VLLM_LOG.replace("150 tokens", f"{'9' * 400} tokens"), WRONG),
        (json.dumps(LESS), "cannot be right: it has 12 accepted of 5 drafted tokens"),
        (VLLM_METRICS.replace("} 300.0", "} -300.0"), "cannot be right: it has a negative count"),
        (VLLM_LOG.replace("0.450", "0.400"), "cannot be right: it has the shares 0.75, 0.4, 0.2, 0.1 of steps"),
        (LLAMA_LOG.replace("(0.6, 0.4)", "(0.6, 0.3)"), "cannot be right: it has the shares 0.6, 0.3 of steps"),
        (metrics(100, 300, 150, (20, 80, 50)), "cannot be right: it has 20, 80, 50 of 100 steps that accepted"),
        (metrics(100, 300, 150, (120, 20, 10)), "cannot be right: it has 120, 20, 10 of 100 steps that accepted"),
        (VLLM_METRICS.replace("} 300.0", "} NaN"), "cannot be right: it has a count that is not a finite number"),
        (VLLM_METRICS.replace("} 300.0", "} 300.5"), "cannot be right: it has a count that is not a whole number"),
        (metrics(100, 40, 20, (15, 5)), "cannot be right: it has 100 steps that drafted 40 tokens"),
        (
            LLAMA_LOG.replace("51 accepted", "510 accepted"),
            "cannot be right: it has 540 accepted of 137 drafted tokens",
        ),
    ],
)
def test_impossible_figures_are_one_sentence(capsys: pytest.CaptureFixture[str], text: str, said: str) -> None:
    Path("other").write_text(text)
    assert run(["import", "other"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"`other` {said}" in " ".join(err.split())


def test_missing_drafted_tokens_are_no_contradiction(capsys: pytest.CaptureFixture[str]) -> None:
    one = {name: value for name, value in RESPONSE.items() if name != "num_draft_tokens"}
    Path("other").write_text(json.dumps(one))
    stats = imported(capsys, "other")["speculative"]
    assert (stats["num_draft_tokens"], stats["num_accepted_tokens"]) == (None, 12)


def test_mean_lengths_tell_the_steps_of_drafts_of_many_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    """An n-gram or suffix draft guesses fewer tokens than vLLM's log has positions."""
    short = VLLM_LOG.splitlines(keepends=True)[0].replace("Drafted: 400", "Drafted: 200").replace("37.5%", "75.0%")
    Path("short.log").write_text(short)
    found = imported(capsys, "short.log")
    assert found["speculative"]["num_drafts"] == 100
    assert found["speculative"]["acceptance_length"] == 2.5
    assert "they follow from its mean length" in found["notices"][0]
    assert found["source"]["form"] == "log with 1 line of SpecDecoding metrics"


def test_a_request_that_accepted_nothing_has_steps(capsys: pytest.CaptureFixture[str]) -> None:
    refused = "draft acceptance = 0.00000 (    0 accepted /    60 generated), mean len =  1.00\n"
    Path("refused.log").write_text(refused + LLAMA_LOG.splitlines()[2])
    found = imported(capsys, "refused.log")
    assert found["speculative"]["num_drafts"] == 60
    assert found["speculative"]["acceptance_length"] == 1.5
    assert "where nothing was accepted" in found["notices"][0]
    Path("refused.log").write_text(refused)
    assert imported(capsys, "refused.log")["speculative"]["acceptance_length"] is None


ONE, TWO = SGLANG[0]["meta_info"], SGLANG[1]["meta_info"]


def without(part: Any, name: str) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key != name}


@pytest.mark.parametrize(
    ("parts", "missing"),
    [
        ([ONE, without(TWO, "spec_num_proposed_drafts")], "num_draft_tokens"),
        ([RESPONSE, without(RESPONSE, "num_draft_tokens")], "num_draft_tokens"),
        (
            [TRTLLM[0], {"specDecodingStats": without(TRTLLM[1]["specDecodingStats"], "numRequestsWithDraftTokens")}],
            "num_drafts",
        ),
    ],
)
def test_a_count_of_some_requests_is_no_total(
    capsys: pytest.CaptureFixture[str], parts: list[Any], missing: str
) -> None:
    Path("parts.json").write_text(json.dumps(parts))
    found = imported(capsys, "parts.json")
    assert found["speculative"][missing] is None
    assert found["speculative"]["num_accepted_tokens"] is not None
    assert found["speculative"]["acceptance_rate" if missing == "num_draft_tokens" else "acceptance_length"] is None
    assert "not every request or result tells its" in found["notices"][-1]


def test_a_count_of_some_files_is_no_total(capsys: pytest.CaptureFixture[str]) -> None:
    Path("old.log").write_text(LLAMA_LOG.replace(", mean len =  2.50", "").replace(", mean len =  2.00", ""))
    found = imported(capsys, "llama.log", "old.log")
    assert found["speculative"]["num_accepted_tokens"] == 162
    assert found["speculative"]["acceptance_rate"] == 81 / 137
    assert found["speculative"]["acceptance_length"] is None
    assert found["speculative"]["per_position_acceptance_rates"] is None


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"spec_decode_per_position_acceptance_rates": [80, 50, 20]}, "the shares 80, 50, 20 of steps"),
        ({"spec_decode_per_position_acceptance_rates": [0.2, 0.5, 0.8]}, "the shares 0.2, 0.5, 0.8 of steps"),
        (
            {"spec_decode_per_position_acceptance_rates": [0.8, 0.4, 0.2]},
            "the shares 0.8, 0.4, 0.2 of steps by position, which add up to 1.4, and 1.5 accepted tokens a step",
        ),
        ({"spec_decode_num_drafts": 0}, "120 drafted tokens in no step"),
        ({"spec_decode_num_drafts": True}, WRONG),
    ],
)
def test_figures_that_contradict_themselves_are_refused(
    capsys: pytest.CaptureFixture[str], value: dict[str, Any], said: str
) -> None:
    Path("other").write_text(json.dumps(BENCH | value))
    assert run(["import", "other"]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("draft acceptance rate = 0.99 (   19 accepted /    33 generated)", "rate of 0.99, and 19 accepted of 33"),
        ("draft acceptance = 0.57577 (   19 accepted /    33 generated)", "rate of 0.57577, and 19 accepted of 33"),
        (
            "SpecDecoding metrics: Accepted: 19 tokens, Drafted: 33 tokens, Avg Draft acceptance rate: 57.5%",
            "57.5 %, and",
        ),
    ],
)
def test_a_rate_that_is_not_what_the_counts_of_its_line_give_is_refused(
    capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    Path("odd.log").write_text(line)
    assert run(["import", "odd.log"]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    rounded = line.replace("0.99", "0.576").replace("0.57577", "0.57576").replace("57.5%", "57.6%")
    Path("odd.log").write_text(rounded)
    assert imported(capsys, "odd.log")["speculative"]["acceptance_rate"] == 19 / 33


def test_metrics_without_comments_are_counters(capsys: pytest.CaptureFixture[str]) -> None:
    """As `grep '^vllm:spec'` leaves them."""
    plain = "\n".join(line for line in VLLM_METRICS.splitlines() if not line.startswith("#")) + "\n"
    Path("grep.txt").write_text(plain)
    assert imported(capsys, "grep.txt")["speculative"] == imported(capsys, "vllm.txt")["speculative"]


def test_metrics_without_speculation_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    Path("plain.txt").write_text('# TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total{a="b"} 3\n')
    assert "says nothing about speculation" in imported(capsys, "plain.txt")["notices"][0]


JUNE_2026 = (
    "0.06.896.015 I slot print_timing: id  1 | task 0 | draft acceptance = 0.64479 (  167 accepted /   259 generated), "
    "mean acceptance length =  2.92, acceptance rate per position = (0.805, 0.632, 0.483)\n"
    "0.06.896.057 I statistics     draft-eagle3: #calls(b,g,a) =    1     87     87, #gen drafts =     87, #acc drafts "
    "=    70, #gen tokens =    259, #acc tokens =   167, #mean acc len = 2.92, #acc rate/pos = (0.805, 0.632, 0.483), "
    "dur(b,g,a) = 0.005, 325.555, 0.114 ms\n"
)
MAY_2026 = (
    "2026-05-17 11:04:29.854 | draft acceptance rate = 0.37500 (    3 accepted /     8 generated)\n"
    "2026-05-17 11:04:29.854 | 1.12.930.414 I statistics draft-mtp: #calls(b,g,a) = 1 4 4, #gen drafts = 4, "
    "#acc drafts = 2, #gen tokens = 8, #acc tokens = 3, dur(b,g,a) = 0.006, 21.272, 0.010 ms\n"
)


def test_49_10_llama_cpps_lines_of_june_2026_have_length_and_rates(capsys: pytest.CaptureFixture[str]) -> None:
    Path("june.log").write_text(JUNE_2026)
    found = imported(capsys, "june.log")
    stats = found["speculative"]
    assert (stats["num_draft_tokens"], stats["num_accepted_tokens"]) == (259, 167)
    assert stats["acceptance_length"] == pytest.approx(2.92, abs=0.005)
    assert stats["num_drafts"] == pytest.approx(87, abs=0.5)
    assert stats["per_position_acceptance_rates"] == pytest.approx([0.805, 0.632, 0.483])
    assert found["notices"] == [
        "llama.cpp's log counts no steps: they follow from its mean length, which has two decimals"
    ]
    issue = JUNE_2026.splitlines()[0].replace("2.92", "2.87").replace("(0.805, 0.632, 0.483)", "(0.802, 0.617, 0.451)")
    Path("june.log").write_text(issue.replace("259", "268").replace("0.64479", "0.62313"))
    assert imported(capsys, "june.log")["speculative"]["acceptance_length"] == pytest.approx(2.87, abs=0.01)


def test_49_10_older_and_newer_lines_are_read_together(capsys: pytest.CaptureFixture[str]) -> None:
    Path("may.log").write_text(MAY_2026)
    found = imported(capsys, "may.log")
    assert found["speculative"]["num_draft_tokens"] == 8
    assert found["speculative"]["acceptance_length"] is None
    assert not any("not understood" in one for one in found["notices"])
    swapped = LLAMA_LOG.splitlines(keepends=True)
    Path("swapped.log").write_text("".join([swapped[1], swapped[0], swapped[3], swapped[2]]))
    assert imported(capsys, "swapped.log")["speculative"] == imported(capsys, "llama.log")["speculative"]
    crossed = [swapped[0], swapped[2], swapped[3], swapped[1]]
    Path("crossed.log").write_text("".join(crossed))
    assert imported(capsys, "crossed.log")["speculative"] == imported(capsys, "llama.log")["speculative"]
    Path("some.log").write_text("".join(swapped[:3]))
    found = imported(capsys, "some.log")
    assert found["speculative"]["per_position_acceptance_rates"] == pytest.approx([0.8, 0.7])
    assert "rates by position are those of 1 of 2 lines: the others have none" in found["notices"]


def test_49_10_vllms_fields_may_stand_in_any_order(capsys: pytest.CaptureFixture[str]) -> None:
    Path("early.log").write_text(
        "INFO [metrics.py:86] SpecDecoding metrics: Draft acceptance rate: 50.0%, Mean acceptance length: 3.00, "
        "Accepted: 600 tokens, Drafted: 1200 tokens, Per-position acceptance rate: 0.800, 0.600, 0.400, 0.200\n"
    )
    found = imported(capsys, "early.log")
    assert found["speculative"]["num_drafts"] == 300
    assert len(found["notices"]) == 1
    Path("short.log").write_text("[2025-01-01] Decode batch. #running-req: 1, accept len: 2.30, cuda graph: True\n")
    assert imported(capsys, "short.log")["reported"] == {"accept len": 2.3}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            LLAMA_LOG + "slot 1 | draft acceptance = 66.67% (12 of 18), typical run 2.5\n",
            "line 5 holds figures that are not understood: `slot 1 | draft acceptance = 66.67% (12 of 18), typical",
        ),
        (
            LLAMA_LOG.replace("mean len =  2.50", "average accepted run = 2.50, by place = [0.8, 0.7]"),
            "line 1 holds figures that are not understood: `(",
        ),
        (VLLM_LOG.replace("Avg Draft", "Bonus share: 0.25, Avg Draft"), "2 lines hold figures that are not understood"),
        (VLLM_LOG + "INFO SpecDecoding metrics: Accepted 150, Mean accepted: 2.5\n", "line 4 holds figures"),
        (SGLANG_LOG.replace("cuda", "block accept len: 3.10, cuda"), "2 lines hold figures that are not understood"),
        (
            json.dumps({"timings": {"draft_n": 4, "draft_n_accepted": 2}})
            + "\n"
            + json.dumps({"timings": {"n_draft": 9, "n_draft_accepted": 3}}),
            "line 2 holds figures that are not understood: `{",
        ),
        (
            json.dumps({"timings": {"draft_n": 4, "draft_n_accepted": 2}})
            + '\n{"timings": {"draft_n": 16, "draft_n_ac',
            "line 2 holds figures that are not understood: `{",
        ),
    ],
)
def test_49_10_figures_that_are_not_understood_are_reported(
    capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    Path("odd.log").write_text(text)
    assert said in " ".join(imported(capsys, "odd.log")["notices"])


def test_49_10_a_file_of_nothing_but_unknown_figures_is_refused_with_the_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("odd.log").write_text("hello\ndraft acceptance = 66.67% (12 of 18)\n")
    assert run(["import", "odd.log"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "line 2 holds figures that are not understood: `draft acceptance = 66.67% (12 of 18)`" in said
    Path("plain.log").write_text("server_args=ServerArgs(speculative_accept_threshold_single=1.0, accept: */*)\n")
    assert run(["import", "plain.log"]) == 2
    assert "holds nothing about speculation that is known here" in " ".join(capsys.readouterr().err.split())


def llama_chunk(drafted: int, accepted: int, name: str = "chatcmpl-1") -> str:
    choices = [{"index": 0, "delta": {"content": "a"}}]
    return json.dumps({"id": name, "choices": choices, "timings": {"draft_n": drafted, "draft_n_accepted": accepted}})


@pytest.mark.parametrize("form", ["data: {}\n\n", "data:{}\r\n\r\n", "{}\n"])
def test_49_10_the_chunks_of_a_stream_are_one_request(capsys: pytest.CaptureFixture[str], form: str) -> None:
    chunks = [llama_chunk(4, 2), llama_chunk(8, 5), llama_chunk(12, 8), llama_chunk(16, 11)]
    done = "data: [DONE]\n\n" if form.startswith("data") else ""
    head = ": ping\nevent: message\nid: 3\nretry: 10\n" if done else ""
    Path("stream.txt").write_text(head + "".join(form.replace("{}", one) for one in chunks) + done)
    found = imported(capsys, "stream.txt")
    assert (found["speculative"]["num_draft_tokens"], found["speculative"]["num_accepted_tokens"]) == (16, 11)
    mixed = [chunks[0], llama_chunk(3, 3, "chatcmpl-2"), chunks[3], llama_chunk(6, 6, "chatcmpl-2")]
    Path("two.txt").write_text("".join(form.replace("{}", one) for one in mixed) + done)
    assert imported(capsys, "two.txt")["speculative"]["num_draft_tokens"] == 22
    Path("list.json").write_text(f"[{','.join(chunks)}]")
    assert imported(capsys, "list.json")["speculative"]["num_draft_tokens"] == 16
    assert run(["import", "stream.txt", "two.txt"]) == 2
    assert "both hold the request `chatcmpl-1`, which would be counted twice" in " ".join(
        capsys.readouterr().err.split()
    )


def test_49_10_chunks_without_an_id_end_with_their_stop(capsys: pytest.CaptureFixture[str]) -> None:
    """llama-server's own `/completion` with `timings_per_token`."""

    def chunk(drafted: int, stop: bool, slot: int) -> str:
        timings = {"draft_n": drafted, "draft_n_accepted": 1}
        return "data: " + json.dumps({"index": 0, "content": "a", "stop": stop, "id_slot": slot, "timings": timings})

    parts = [(2, False, 0), (3, False, 1), (4, True, 0), (6, False, 0), (5, True, 1), (8, True, 0)]
    Path("stream.txt").write_text("\n\n".join(chunk(*one) for one in parts) + "\n")
    assert imported(capsys, "stream.txt")["speculative"]["num_draft_tokens"] == 4 + 5 + 8


ANSWERS: list[Any] = [one["meta_info"] for one in SGLANG]


@pytest.mark.parametrize(
    ("responses", "drafted"),
    [
        ([{"id": "cmpl-1", "metrics": {"speculative_decoding": RESPONSE}}] * 3, 30),
        ([{"id": f"cmpl-{i}", "metrics": {"speculative_decoding": RESPONSE}} for i in range(3)], 90),
        ([{"index": 0, "metrics": {"speculative_decoding": RESPONSE}}] * 3, 90),
        ([{"meta_info": ANSWERS[0] | {"id": "r1"}}] * 2 + [{"meta_info": SGLANG[1]["meta_info"]}], 60),
        ([{"id": "a", "sglext": {"spec_tokens_details": [SGLANG[0]["meta_info"], SGLANG[1]["meta_info"]]}}] * 2, 60),
        (
            [
                {"id": "a", "choices": [{"index": i, "x": {"total_draft_tokens": 9, "total_accepted_draft_tokens": 3}}]}
                for i in (0, 1, 1)
            ],
            18,
        ),
    ],
)
def test_49_10_a_repeated_request_is_counted_once(
    capsys: pytest.CaptureFixture[str], responses: list[Any], drafted: int
) -> None:
    Path("repeated.jsonl").write_text("\n".join(map(json.dumps, responses)))
    assert imported(capsys, "repeated.jsonl")["speculative"]["num_draft_tokens"] == drafted


def test_49_10_a_log_with_responses_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("both.txt").write_text(LLAMA_LOG + llama_chunk(4, 2) + "\n")
    assert run(["import", "both.txt"]) == 2
    assert "they may count the same tokens" in " ".join(capsys.readouterr().err.split())


EMPTY_FIGURES = (
    "draft acceptance = 0.5 (10 accepted / 20 generated), mean acceptance length = , acceptance rate per position = ()"
)


@pytest.mark.parametrize("line", [
    EMPTY_FIGURES,
    "draft acceptance = 0.5 (10 accepted / 20 generated), mean len = nan",
    "draft acceptance = 0.5 (10 accepted / 20 generated)\nacc per pos = ()",
    "SpecDecoding metrics: Mean acceptance length: nan, Accepted: 10 tokens, Drafted: 20 tokens",
    "SpecDecoding metrics: Accepted: 10 tokens, Drafted: 20 tokens, Per-position acceptance rate: ",
    "Decode batch, accept len: 2.5, accept rate: -, gen throughput (token/s): 1.0",
])  # fmt: skip
def test_a_figure_without_a_value_is_reported(capsys: pytest.CaptureFixture[str], line: str) -> None:
    Path("empty.log").write_text(line)
    assert run(["import", "empty.log"]) == 0
    assert "holds figures that are not understood" in "".join(capsys.readouterr())


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le"])
def test_a_log_with_a_byte_order_mark_is_read(capsys: pytest.CaptureFixture[str], encoding: str) -> None:
    marked = "\ufeff" + LLAMA_LOG.replace("\n", "\r\n")
    Path("powershell.log").write_bytes(marked.encode(encoding))
    Path("llama.log").write_text(LLAMA_LOG)
    assert imported(capsys, "powershell.log")["speculative"] == imported(capsys, "llama.log")["speculative"]

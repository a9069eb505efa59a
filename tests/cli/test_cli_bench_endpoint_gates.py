"""Gates, baselines and acceptance of `bench --endpoint`."""

import json
from pathlib import Path
from typing import Any

import pytest
from endpoint_runs import bench, chunk, document, without_environment
from fake_server import Fake, serving


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    without_environment(monkeypatch)


def test_gates(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Fake()) as fake:
        assert bench(fake, "--fail-if", "timing.ttft_s.median > 50", "--fail-if", "timing.ttft_s > 50") == 0
        assert bench(fake, "--fail-if", "timing.ttft_s > 0.000001", "--quiet") == 3
        assert "gate crossed: `timing.ttft_s > 1e-06`" in capsys.readouterr().err
        assert bench(fake, "--fail-if", "counters.speculative.acceptance_length < 2.7") == 0
        assert bench(fake, "--fail-if", "by_task.story.timing.tpot_s.median > 50") == 0
        asked = len(fake.requests)
        assert bench(fake, "--fail-if", "speedup.decode < 1") == 2
        assert bench(fake, "--fail-if", "by_task.nothing.output_tokens < 1") == 2
        assert bench(fake, "--fail-if", "by_task.story.timing.tpot_s > 50", "--repeats", "1") == 2
        assert "takes 2 pairs (prompts, or batches of them), and there would be 1" in capsys.readouterr().err
        assert bench(fake, "--fail-if", "timing.ttft_s > 50", "--num-prompts", "1") == 2
        assert len(fake.requests) == asked, "nobody is asked before the gates are read"


def scaled(path, factor: float):
    """The document of a server that takes so many times as long."""
    found = json.loads(path.read_text())
    for figure in found["timing"].values():
        figure["median"] *= factor
        figure["ci95"] = [factor * end for end in figure["ci95"]]
    changed = path.with_name(f"{factor:g}.json")
    changed.write_text(json.dumps(found))
    return str(changed)


def test_a_baseline(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    with serving(Fake()) as fake:
        assert bench(fake, "--output", str(path)) == 0
        capsys.readouterr()
        assert bench(fake, "--baseline", scaled(path, 100), "--concurrency", "2", "--json") == 0
        found = document(capsys)
        assert [gate["expression"] for gate in found["gates"]] == [
            f"timing.{name} / baseline > 1.05" for name in ("ttft_s", "tpot_s", "latency_s")
        ]
        assert "the baseline is of another concurrency: the two are not comparable" in found["notices"]
        assert bench(fake, "--baseline", scaled(path, 0.01), "--max-regression", "80%") == 3
        assert "gate crossed: `timing.latency_s / baseline > 1.8`" in capsys.readouterr().err
        asked = len(fake.requests)
        path.write_text('{"schema": "specdec.bench/1"}')
        assert bench(fake, "--baseline", str(path)) == 2
        assert "no `specdec.bench-endpoint/1` document" in capsys.readouterr().err
        assert bench(fake, "--max-regression", "3%") == 2
        assert len(fake.requests) == asked, "nobody is asked before the baseline is read"


def test_15_gates_and_baselines_of_a_rate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    with serving(Fake()) as fake:
        gate = "timing.arrival_latency_s > 9"
        assert bench(fake, "--request-rate", "200", "--fail-if", gate, "--output", str(path)) == 0
        assert bench(fake, "--request-rate", "200", "--fail-if", "timing.arrival_ttft_s.p99 > 0.0000001") == 3
        capsys.readouterr()
        asked = len(fake.requests)
        assert bench(fake, "--fail-if", "timing.arrival_latency_s > 9") == 2
        assert "has no `arrival_latency_s`" in capsys.readouterr().err
        assert bench(fake, "--request-rate", "0") == 2
        assert bench(fake, "--request-rate", "nan") == 2
        assert len(fake.requests) == asked
        assert bench(fake, "--request-rate", "inf", "--json") == 0
        assert document(capsys)["plan"]["concurrency"] == 1
        assert bench(fake, "--request-rate", "400", "--baseline", scaled(path, 100), "--json") == 0
        found = document(capsys)
    assert "the baseline is of another request_rate: the two are not comparable" in found["notices"]
    assert "timing.arrival_latency_s / baseline > 1.05" in [gate["expression"] for gate in found["gates"]]


@pytest.mark.in_turn(2, every=3)
@pytest.mark.parametrize(
    "said",
    [
        {"metrics": {"speculative_decoding": {
            "num_draft_tokens": 8, "num_accepted_draft_tokens": 6, "num_spec_steps": 4}}},
        {"sglext": {"spec_tokens_details": {
            "spec_num_proposed_drafts": 8, "spec_num_correct_drafts": 6, "spec_verify_ct": 4,
            "spec_correct_drafts_histogram": [1, 0, 3]}}},
        {"choices": [{"speculative_decoding": {
            "total_draft_tokens": 8, "total_accepted_draft_tokens": 6, "num_spec_steps": 4}}]},
        {"timings": {"draft_n": 8, "draft_n_accepted": 6}},
        {"usage": {"completion_tokens": 2, "completion_tokens_details": {
            "accepted_prediction_tokens": 6, "rejected_prediction_tokens": 2}}},
    ],
)  # fmt: skip
def test_acceptance_has_intervals_where_answers_count_their_own(capsys: pytest.CaptureFixture[str], said) -> None:
    last = {"choices": [], "usage": {"completion_tokens": 2}} | said
    with serving(Fake(script=[chunk(), chunk("", "stop"), last, "[DONE]"], metrics=None)) as fake:
        gates = ["--fail-if", "acceptance.rate < 0.5", "--fail-if", "by_task.story.acceptance.rate.median < 0.5"]
        assert bench(fake, "--json", *gates) == 0
        found = document(capsys)
        assert bench(fake) == 0
    assert found["acceptance"]["rate"] == {"median": 0.75, "ci95": [0.75, 0.75], "pairs": 8}
    assert found["acceptance"]["requests"] == 16
    has_steps = not {"timings", "usage"} & said.keys()
    assert found["acceptance"]["length"]["median"] == (2.5 if has_steps else None)
    assert found["acceptance_from"] == ("answers" if has_steps else None)
    histogram = found["acceptance"]["speculative"]["acceptance_histogram"]
    assert histogram == ([16, 0, 48] if "sglext" in said else None)
    assert any("acceptance is unknown" in notice for notice in found["notices"]) == (not has_steps)
    assert found["by_task"]["story"]["acceptance"]["rate"]["median"] == 0.75
    assert "Acceptance by 16 answers' own counts: rate 75.0% (75.0%–75.0%)" in capsys.readouterr().out


@pytest.mark.in_turn(1, every=3)
@pytest.mark.parametrize(
    "said",
    [
        {}, {"metrics": None}, {"metrics": {"speculative_decoding": {"num_draft_tokens": "8"}}}, {"timings": [1]},
        {"timings": {"draft_n": 0}}, {"timings": {"draft_n": 3, "draft_n_accepted": 4}},
        {"usage": {"completion_tokens": 2, "completion_tokens_details": {
            "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}}},
    ],
)  # fmt: skip
def test_acceptance_that_no_answer_counts_is_not_known(capsys: pytest.CaptureFixture[str], said) -> None:
    last = {"choices": [], "usage": {"completion_tokens": 2}} | said
    with serving(Fake(script=[chunk(), chunk("", "stop"), last, "[DONE]"], metrics=None)) as fake:
        assert bench(fake, "--json") == 0
    assert document(capsys)["acceptance"] is None


def test_answers_own_counts_take_the_place_of_the_servers(capsys: pytest.CaptureFixture[str]) -> None:
    """Of steps that draft less, each listed, the rates by position are exact; lengths are of all steps together."""
    answers = [([3, 3], [3, 1]), ([1], [0])]

    def script(body: dict[str, Any]) -> list[Any]:
        drafted, accepted = answers[len(body["prompt"]) % 2]
        steps = {"num_spec_steps": len(drafted), "per_step_drafted": drafted, "per_step_accepted": accepted}
        figures = steps | {"num_draft_tokens": sum(drafted), "num_accepted_draft_tokens": sum(accepted)}
        last = {"choices": [], "usage": {"completion_tokens": 2}, "metrics": {"speculative_decoding": figures}}
        return [chunk(), chunk("", "stop"), last, "[DONE]"]

    with serving(Fake(script=script, owner="sglang")) as fake:
        assert bench(fake, "--json", "--fail-if", "acceptance.speculative.acceptance_length < 1") == 0
        found = document(capsys)
        assert bench(fake, "--by", "category") == 0
        prompts = [body["prompt"] for body in fake.requests[1:17]]
        assert all(body["return_spec_tokens_details"] is True for body in fake.requests)
    even = sum(len(prompt) % 2 == 0 for prompt in prompts)
    counts = found["acceptance"]["speculative"]
    assert 0 < even < 16, "both kinds of answers are needed"
    assert counts["acceptance_length"] == 1 + 4 * even / (2 * even + 16 - even)
    assert counts["conditional_acceptance_rates"] == [2 * even / (even + 16), 0.5, 1.0]
    shown = capsys.readouterr().out
    assert "Acceptance by 16 answers' own counts" in shown
    assert "Speculation by" not in shown
    assert [line.split()[-2:] for line in shown.splitlines() if line.startswith(" category")] == [
        ["accepted", "length"]
    ]
    assert f"{counts['acceptance_length']:.2f}" in shown

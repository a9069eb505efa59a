"""Files that the tools themselves wrote on the embedded pair, k = 4, greedy: our figures are the tools' own.

`samples/NAME-VERSION…` names the tool. vLLM's CPU build 0.32.0 and llama.cpp's build 11434 decoded the same prompts.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from specdec_cli.cli.main import run

SAMPLES = Path(__file__).parent / "samples"


def imported(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run(["import", *[str(SAMPLES / one) if "." in one else one for one in words], "--json", "--quiet"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_vllms_log_metrics_and_responses_agree(capsys: pytest.CaptureFixture[str]) -> None:
    log = imported(capsys, "vllm-0.32.0.log")["speculative"]
    metrics = imported(capsys, "vllm-0.32.0-metrics-after.txt", "--before", "vllm-0.32.0-metrics-before.txt")
    responses = imported(capsys, "vllm-0.32.0-responses.jsonl")["speculative"]
    for found in (log, metrics["speculative"], responses):
        assert (found["num_drafts"], found["num_draft_tokens"], found["num_accepted_tokens"]) == (91, 364, 301)
        assert found["per_position_acceptance_rates"] == pytest.approx([0.945, 0.857, 0.769, 0.736], abs=5e-4)
    assert f"{log['acceptance_length']:.2f}" == "4.31", "its Mean acceptance length"
    assert f"{100 * log['acceptance_rate']:.1f}" == "82.7", "its Avg Draft acceptance rate"


def test_llama_cpps_log_and_metrics_agree(capsys: pytest.CaptureFixture[str]) -> None:
    log = imported(capsys, "llama-server-11434.log")["speculative"]
    metrics = imported(capsys, "llama-server-11434-metrics.txt")["speculative"]
    for found in (log, metrics):
        assert (found["num_draft_tokens"], found["num_accepted_tokens"]) == (347, 285)
        assert found["num_drafts"] == pytest.approx(89, abs=0.5), "the log's follow from lengths with two decimals"
    assert metrics["acceptance_histogram"] == [89 - 84, 84 - 75, 75 - 65, 65 - 61, 61]
    assert metrics["per_position_acceptance_rates"] is None, "it drafts fewer than k at an answer's end"


def test_llama_cpps_responses_give_the_logs_counts(capsys: pytest.CaptureFixture[str]) -> None:
    found = imported(capsys, "llama-server-11434-responses.jsonl")
    assert found["source"]["tool"] == "llama.cpp"
    stats = found["speculative"]
    assert (stats["num_draft_tokens"], stats["num_accepted_tokens"]) == (37 + 38 + 44 + 47, 37 + 37 + 35 + 35)
    assert (stats["num_drafts"], stats["acceptance_length"]) == (None, None)


def test_the_result_of_vllm_bench_serve_gives_its_own_figures(capsys: pytest.CaptureFixture[str]) -> None:
    theirs = json.loads((SAMPLES / "vllm-0.32.0-bench.json").read_text(encoding="utf-8"))
    ours = imported(capsys, "vllm-0.32.0-bench.json")["speculative"]
    assert ours["num_drafts"] == theirs["spec_decode_num_drafts"]
    assert ours["acceptance_length"] == pytest.approx(theirs["spec_decode_acceptance_length"])
    assert 100 * ours["acceptance_rate"] == pytest.approx(theirs["spec_decode_acceptance_rate"])
    rates = theirs["spec_decode_per_position_acceptance_rates"]
    assert ours["per_position_acceptance_rates"] == pytest.approx(rates)

"""`bench --endpoint` as a person meets it: against a small server in this process, well-behaved and otherwise."""

import csv
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest
from fake_proxy import proxying
from fake_server import Fake, serving

from specdec_cli.cli.main import run
from specdec_cli.report.bench import BenchView
from specdec_cli.report.bench_endpoint import json_schema


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "CI", "FORCE_COLOR", "SPECDEC_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def bench(fake: Fake, *more: str) -> int:
    return int(run(["bench", "--endpoint", fake.url, "--num-prompts", "8", "-n", "15", "--repeats", "2", *more]))


def counted(found: dict[str, Any]) -> dict[str, Any]:
    """What became of the requests, without how many were open at a time."""
    return {key: num for key, num in found["requests"].items() if not key.startswith("most_")}


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, json_schema(), format_checker=jsonschema.FormatChecker())
    return found


def test_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Fake()) as fake:
        assert bench(fake) == 0
    out, err = capsys.readouterr()
    for words in (
        f"`fake` (from /v1/models) at {fake.url}, fake 1.2.3: 16 of 16 requests answered, 1 at a time",
        "to the first text",
        "copy-edit",
        "240 tokens (by the server's usage, in 80 chunks)",
        "Speculation by vllm's /metrics: 128 tokens drafted, 112 accepted in 64 steps: rate 87.5%, length 2.75",
        "at position 1…k: 100.0% 75.0%",
    ):
        assert words in out
    assert "the first answer is not counted" in err
    assert "\x1b" not in out + err


def test_requests_that_were_sent_again_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Fake(most_per_connection=2, metrics=None)) as fake:
        assert bench(fake, "--json") == 0
    found = document(capsys)
    assert counted(found) == {"planned": 16, "answered": 16, "failed": 0, "not_sent": 0, "sent_again": 8}
    assert any("closed 8 connections" in notice for notice in found["notices"])


def test_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Fake()) as fake:
        assert bench(fake, "--json", "--repeats", "3") == 0
    found = document(capsys)
    assert found["endpoint"] == {
        "url": fake.url, "model": "fake", "model_from": "/v1/models", "server": "fake", "version": "1.2.3",
        "proxy": None,
    }  # fmt: skip
    assert counted(found) == {"planned": 24, "answered": 24, "failed": 0, "not_sent": 0, "sent_again": 0}
    assert len(fake.requests) == 25, "one to warm up"
    assert found["output"] == {
        "tokens": 24 * 15, "counted_by": "the server's usage", "prompt_tokens": 24 * 7, "chunks": 24 * 5,
        "finish_reasons": {"length": 24},
    }  # fmt: skip
    assert found["throughput"]["output_tokens_per_second"] == pytest.approx(360 / found["throughput"]["seconds"])
    assert found["timing"]["itl_s"]["values"] == 24 * 4
    for figure in found["timing"].values():
        assert figure["ci95"][0] <= figure["median"] <= figure["ci95"][1]
        assert figure["median"] <= figure["p95"] <= figure["p99"]
    assert found["timing"]["ttft_s"]["median"] < found["timing"]["latency_s"]["median"]
    assert found["by_task"]["story"]["output_tokens"] == 45
    assert found["counters"]["speculative"]["num_drafts"] == 24 * 4, "the warm-up is not in it"
    assert found["counters"]["speculative"]["acceptance_histogram"] == [0, 24, 72]
    assert set(found["recipe"]) == {"sampling", "workload", "gates"}
    assert found["plan"]["fields"] == {"max_tokens": 15, "temperature": 0.0}


def test_every_prompt_is_sent_once_and_the_warm_up_is_none_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Fake()) as fake:
        assert run(["bench", "--endpoint", fake.url, "--num-prompts", "8", "-n", "15", "--json"]) == 0
    found = document(capsys)
    assert (found["plan"]["repeats"], found["requests"]["answered"]) == (1, 8)
    assert not any("several times" in notice for notice in found["notices"])
    warm_up, *prompts = [request["prompt"] for request in fake.requests]
    assert len(prompts) == 8
    assert not any(prompt.startswith(warm_up) or warm_up.startswith(prompt) for prompt in prompts)


def test_neither_torch_nor_transformers_is_loaded() -> None:
    with serving(Fake()) as fake:
        code = (
            "import sys; from specdec_cli.cli.main import run; "
            f"code = run(['bench', '--endpoint', '{fake.url}', '--num-prompts', '2', '--json']); "
            "sys.exit(code or sum(name in sys.modules for name in ('torch', 'transformers', 'datasets')))"
        )
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_no_table_is_drawn_while_several_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def table(*_) -> None:
        raise AssertionError("a table delays the streams that are open")

    monkeypatch.setattr("specdec_cli.cli.bench_endpoint.live_table", table)
    with serving(Fake()) as fake:
        assert bench(fake, "--concurrency", "4") == 0


def test_several_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Fake(pause_s=0.05)) as fake:
        assert bench(fake, "--concurrency", "4", "--repeats", "1") == 0
    assert fake.most_at_a_time == 4


def test_chat_and_the_names_of_models(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Fake()) as fake:
        assert bench(fake, "--chat", "--endpoint-model", "second", "--json") == 0
        assert (fake.paths[-1], fake.requests[-1]["model"]) == ("/v1/chat/completions", "second")
        assert [message["role"] for message in fake.requests[-1]["messages"]] == ["user"]
        assert document(capsys)["endpoint"]["model_from"] == "--endpoint-model"
        assert bench(fake, "--target", "fake", "--json") == 0
        found = document(capsys)
        assert found["endpoint"]["model_from"] == "the recipe's target"
        assert found["recipe"]["target"] == {"model": "fake"}


def test_a_row_has_its_own_length_and_seed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "max_new_tokens": 3, "seed": 8}\n{"prompt": "b"}\n')
    with serving(Fake()) as fake:
        assert bench(fake, "--dataset", str(path), "--temperature", "1", "--repeats", "1") == 0
    first, second = fake.requests[1:]
    assert (first["prompt"], first["max_tokens"], first["seed"]) == ("a", 3, 8)
    assert (second["prompt"], second["max_tokens"], second["seed"]) == ("b", 15, 0)


def test_the_key_goes_into_the_header_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "r.json"
    with serving(Fake(key="sk-hidden")) as fake:
        assert bench(fake) == 1
        assert "refuses to be used without a key (401)" in capsys.readouterr().err
        assert bench(fake, "--api-key", "sk-wrong") == 1
        assert "sk-wrong" not in capsys.readouterr().err
        monkeypatch.setenv("OPENAI_API_KEY", "sk-hidden")
        assert bench(fake, "--output", str(path)) == 0
        monkeypatch.setenv("SPECDEC_API_KEY", "sk-wrong")
        assert bench(fake) == 1
        monkeypatch.setenv("SPECDEC_API_KEY", ", sk-hidden,sk-wrong")
        assert bench(fake) == 0
    assert "sk-" not in path.read_text() + "".join(capsys.readouterr())


def test_errors_are_counted_with_the_servers_words(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Fake(fault=500, faulty_from=13)) as fake:
        assert bench(fake, "--json", "--fail-if", "requests.failed > 2") == 3
    found = document(capsys)
    assert counted(found) == {"planned": 16, "answered": 12, "failed": 4, "not_sent": 0, "sent_again": 0}
    assert [error["status"] for error in found["errors"]] == [500] * 4
    assert "I say 500" in found["errors"][0]["message"]
    assert "4 of 16 requests failed" in found["notices"][0]
    with serving(Fake(fault="dies", faulty_from=15)) as fake:
        assert bench(fake) == 0
    assert "failed, 2×: the connection to" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fault", "begin", "words"),
    [
        (404, 0, "/v1/completions` refused the request (404): I say 404"),
        ("html", 0, "/v1/models` answers with something that is not JSON: `<html>hello</html>`"),
        ("error list", 0, "/v1/models` answers with an error: no database"),
        ("dies", 0, "the connection to"),
        (500, 1, "none of 16 requests was answered"),
    ],
)
def test_bad_servers(capsys: pytest.CaptureFixture[str], fault, begin: int, words: str) -> None:
    with serving(Fake(fault=fault, faulty_from=begin)) as fake:
        assert bench(fake) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert "Traceback" not in err


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Fake()) as fake:
        pass
    assert bench(fake) == 1
    assert f"no server at `{fake.url}`: connection refused" in capsys.readouterr().err


def test_a_server_that_goes_away_in_the_middle_ends_the_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    with serving(Fake(fault="leaves", faulty_from=5)) as fake:
        assert bench(fake, "--output", str(path)) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "the server went away after 4 of 16 answers: no server at" in err
    assert not path.exists()
    assert len(fake.requests) == 6, "one to warm up, four answers, and the one that it left in"


def test_ctrl_c_leaves_what_was_answered(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    def interrupting(view, *_) -> None:
        drawn.append(view)
        if len(drawn) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(BenchView, "draw", interrupting)
    with serving(Fake()) as fake:
        assert bench(fake, "--json") == 130
    out, err = capsys.readouterr()
    found = json.loads(out)
    jsonschema.validate(found, json_schema())
    assert counted(found) == {"planned": 16, "answered": 3, "failed": 0, "not_sent": 0, "sent_again": 0}
    assert found["plan"]["interrupted"] is True
    assert len(fake.requests) == 4
    assert "interrupted: these are the results so far" in err


def test_tokens_are_never_counted_from_chunks(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Fake(usage=False)) as fake:
        assert bench(fake, "--json") == 0
    found = document(capsys)
    assert (found["output"]["tokens"], found["output"]["counted_by"], found["output"]["chunks"]) == (None, None, 80)
    assert found["throughput"]["output_tokens_per_second"] is None
    assert found["timing"]["tpot_s"]["median"] is None
    assert any("sends no usage" in notice for notice in found["notices"])


def test_counters_that_are_not_there_or_not_ours(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Fake(metrics=None)) as fake:
        assert bench(fake, "--json") == 0
    found = document(capsys)
    assert found["counters"] is None
    assert "the server's /metrics says nothing about speculation: acceptance is unknown" in found["notices"]
    with serving(Fake(others=1)) as fake:
        assert bench(fake, "--json") == 0
    assert any("counted 256 output tokens while" in notice for notice in document(capsys)["notices"])
    with serving(Fake(metrics="# TYPE sglang:spec_accept_length gauge\nsglang:spec_accept_length 2.5\n")) as fake:
        assert bench(fake) == 0
    assert "Gauges of sglang's /metrics, of its last moments: sglang:spec_accept_length 2.5." in capsys.readouterr().out


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


@pytest.mark.parametrize(
    "given",
    [
        ["--draft", "ngram"], ["-k", "4"], ["--against", "none"], ["--batch-size", "1"], ["--dtype", "float32"],
        ["--device", "cpu"], ["--no-lossless-check"], ["--trust-remote-code"],
        ["--verify", "greedy"], ["--compile"], ["--resume", "--output", "x.json"],
    ],
)  # fmt: skip
def test_what_says_nothing_to_a_server_is_refused_by_name(capsys: pytest.CaptureFixture[str], given: list[str]) -> None:
    assert run(["bench", "--endpoint", "http://127.0.0.1:1", *given]) == 2
    flag = {"-k": "--num-speculative-tokens", "--no-lossless-check": "--lossless-check"}.get(given[0], given[0])
    assert f"`{flag}` has no effect with --endpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given",
    [
        ["--concurrency", "2"], ["--api-key", "x"], ["--endpoint-model", "m"], ["--request-rate", "2"],
        ["--extra-body", "{}"], ["--max-tokens-field", "max_tokens"],
    ],
)  # fmt: skip
def test_a_servers_options_need_a_server(capsys: pytest.CaptureFixture[str], given: list[str]) -> None:
    assert run(["bench", *given]) == 2
    assert f"`{given[0]}` has no effect without --endpoint" in capsys.readouterr().err


def test_a_dry_run_asks_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Fake()) as fake:
        assert bench(fake, "--dry-run", "--concurrency", "2") == 0
        assert (
            f"would send 8 prompts of builtin:mini, 2 times, 2 at a time, to {fake.url}/v1/completions"
            in capsys.readouterr().out
        )
        assert bench(fake, "--dry-run", "--json") == 0
        found = json.loads(capsys.readouterr().out)
    assert found["fields"] == {"max_tokens": 15, "temperature": 0.0}
    assert fake.requests == []


def test_13_a_proxy_is_named_in_the_document_and_in_errors(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    with serving(Fake()) as fake, proxying(fake.url) as between:
        monkeypatch.setenv("HTTP_PROXY", between.url)
        own, far = fake.url.replace("127.0.0.1", "0.0.0.0"), Fake(url="http://far.test:8000")
        assert bench(Fake(url=own), "--json") == 0
        assert document(capsys)["endpoint"]["proxy"] is None
        assert between.asked == []
        assert bench(far, "--json") == 0
        found = document(capsys)
    assert found["endpoint"]["proxy"] == f"proxy `{between.url}` (HTTP_PROXY)"
    assert any(f"went through the proxy `{between.url}`" in notice for notice in found["notices"])
    assert bench(far) == 1
    err = capsys.readouterr().err
    assert f"connection refused; asked through the proxy `{between.url}` (HTTP_PROXY)" in err
    assert "NO_PROXY=far.test asks without the proxy" in err


def chunk(text: str = " a", reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": reason}]}


def usage(tokens: Any) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}}


@pytest.mark.parametrize(
    ("script", "words", "tokens"),
    [
        ([chunk(), chunk("", "stop"), usage(0), "[DONE]"], "have output, but no token by the server's usage", None),
        ([chunk()] * 5 + [chunk("", "stop"), usage(2), "[DONE]"], "more chunks than they have tokens", 32),
        ([chunk(), chunk("", "length"), usage(99), "[DONE]"], "more tokens than `max_tokens` allows", 16 * 99),
        ([chunk(), chunk("", "length"), usage(9), "[DONE]"], "were cut before `max_tokens` tokens", 16 * 9),
        ([chunk(), usage(9), "[DONE]"], "have no finish_reason", 16 * 9),
        ([0.05, *[chunk()] * 9, chunk("", "stop"), usage(9), "[DONE]"], "came all at once", 16 * 9),
    ],
)
def test_15_a_figure_that_is_not_what_it_seems_is_doubted(
    capsys: pytest.CaptureFixture[str], script, words: str, tokens: int | None
) -> None:
    with serving(Fake(script=script, metrics=None)) as fake:
        assert bench(fake, "--json") == 0
    found = document(capsys)
    assert any(words in notice for notice in found["notices"]), found["notices"]
    assert found["output"]["tokens"] == tokens
    assert (found["throughput"]["output_tokens_per_second"] is None) is (tokens is None)


def test_15_nothing_is_doubted_of_a_good_server(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Fake(script=[chunk(), 0.01, chunk("", "stop"), usage(2), "[DONE]"])) as fake:
        assert bench(fake, "--json", "--repeats", "1") == 0
    notices = document(capsys)["notices"]
    assert [notice for notice in notices if "answers" in notice and "counted" not in notice] == []


def test_15_usage_that_only_some_answers_have(capsys: pytest.CaptureFixture[str]) -> None:
    def script(body):
        counted = [] if body["prompt"].startswith("Before") or len(body["prompt"]) % 2 else [usage(2)]
        return [chunk(), chunk(" b", "stop"), *counted, "[DONE]"]

    with serving(Fake(script=script, metrics=None)) as fake:
        assert bench(fake, "--json", "--repeats", "1") == 0
    found = document(capsys)
    assert found["output"]["tokens"] is None
    assert any("came without usage" in notice for notice in found["notices"])
    assert not any("sends no usage" in notice for notice in found["notices"])


def test_15_a_server_that_answers_nothing_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Fake(script=[chunk("", "stop"), usage(0), "[DONE]"])) as fake:
        assert bench(fake) == 1
    assert "all of 16 answers are empty: there is nothing to time" in capsys.readouterr().err


def test_15_some_empty_answers_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    def script(body):
        return [chunk("" if "x" in body["prompt"] else " a", "stop"), usage(1), "[DONE]"]

    with serving(Fake(script=script)) as fake:
        assert bench(fake, "--json") == 0
    found = document(capsys)
    assert any("answers are empty: they have no time to first text" in notice for notice in found["notices"])
    assert found["timing"]["ttft_s"]["values"] < found["timing"]["latency_s"]["values"] == 16


def test_15_an_ignored_ignore_eos_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Fake(script=[chunk(), chunk("", "stop"), usage(2), "[DONE]"])) as fake:
        assert bench(fake, "--json", "--ignore-eos") == 0
    assert any("although `ignore_eos` was sent" in notice for notice in document(capsys)["notices"])


def test_15_more_places_than_requests_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Fake(pause_s=0.05)) as fake:
        assert bench(fake, "--json", "--repeats", "1", "--concurrency", "64") == 0
    found = document(capsys)
    assert found["requests"]["most_at_a_time"] == 8
    assert any("never more than 8 requests were open at a time" in notice for notice in found["notices"])


def test_15_extra_body(capsys: pytest.CaptureFixture[str]) -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": False}, "priority": 2}
    with serving(Fake()) as fake:
        assert bench(fake, "--extra-body", json.dumps(extra), "--chat", "--json") == 0
        assert document(capsys)["plan"]["extra_body"] == extra
        assert all(request["priority"] == 2 for request in fake.requests), "the warm-up's, too"
        assert all(request["chat_template_kwargs"] == {"enable_thinking": False} for request in fake.requests)
        asked = len(fake.requests)
        assert bench(fake, "--extra-body", '{"stream": false}') == 2
        assert "`--extra-body` must not hold `stream`" in capsys.readouterr().err
        assert bench(fake, "--extra-body", '{"top_p": 0.5}') == 2
        assert "give --top-p" in capsys.readouterr().err
        assert bench(fake, "--extra-body", "{}}") == 2
        assert len(fake.requests) == asked


def test_15_max_tokens_field(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Fake()) as fake:
        assert bench(fake, "--chat", "--max-tokens-field", "max_completion_tokens", "--json") == 0
        assert document(capsys)["plan"]["fields"] == {"max_completion_tokens": 15, "temperature": 0.0}
        assert all("max_tokens" not in body and body["max_completion_tokens"] == 15 for body in fake.requests)
        assert bench(fake, "--max-tokens-field", "max_completion_tokens") == 2
        assert "add --chat" in capsys.readouterr().err
        assert bench(fake, "--max-tokens-field", "max_new_tokens") == 2


def test_15_a_server_that_wants_the_other_field_is_an_error_that_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    refused = "'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
    with serving(Fake(fault=400, refusal=refused)) as fake:
        assert bench(fake, "--chat") == 1
    err = capsys.readouterr().err
    assert refused in err
    assert "--max-tokens-field max_completion_tokens sends the same number under that name" in err
    assert len(fake.requests) == 1


def test_15_request_rate(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Fake(pause_s=0.02)) as fake:
        assert bench(fake, "--request-rate", "100", "--seed", "5", "--json") == 0
        found = document(capsys)
        assert bench(fake, "--request-rate", "100", "--concurrency", "2") == 0
        out = capsys.readouterr().out
    assert (found["plan"]["request_rate"], found["plan"]["arrival_seed"]) == (100, 5)
    assert found["plan"]["concurrency"] is None
    assert found["timing"]["arrival_latency_s"]["median"] >= found["timing"]["latency_s"]["median"]
    assert found["throughput"]["requests_per_second"] < 110, "not faster than they arrive"
    assert "100 arriving per second, at most 2 at a time" in out
    assert "arrival to whole answer" in out


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


def test_result_files_are_those_of_bench(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    names = {kind: tmp_path / f"r.{kind}" for kind in ("markdown", "csv", "junit", "html", "svg")}
    given = [f"--{'plot' if kind == 'svg' else kind}={path}" for kind, path in names.items()]
    with serving(Fake(fault=500, faulty_from=13)) as fake:
        assert bench(fake, "--fail-if", "timing.ttft_s > 50", "--request-rate", "500", *given) == 0
        asked = len(fake.requests)
        assert bench(fake, *given) == 2
        assert "exists" in capsys.readouterr().err
        assert bench(fake, "--csv", "a", "--junit", "a") == 2
        assert bench(fake, "--plot", str(tmp_path / "a.gif")) == 2
        assert len(fake.requests) == asked, "nobody is asked before the files are known to be writable"
    text = names["markdown"].read_text()
    assert f"## specdec bench-endpoint: fake at {fake.url}" in text
    for words in ("arrival to whole answer", "### Tasks", "### Failed requests", "I say 500", "| passed |"):
        assert words in text
    rows = list(csv.DictReader(names["csv"].read_text().splitlines()))
    assert [row["task"] for row in rows][:2] == ["", "chat"]
    assert (rows[0]["output_tokens"], rows[1]["output_tokens_per_second"]) == (str(12 * 15), "")
    assert float(rows[0]["latency_s_low"]) <= float(rows[0]["latency_s"]) <= float(rows[0]["latency_s_p99"])
    suite = ElementTree.parse(names["junit"]).getroot()
    cases = {case.get("name"): [one.tag for one in case] for case in suite}
    assert cases == {"fail if timing.ttft_s > 50": ["system-out"], "requests answered": ["failure"]}
    assert "<svg" in names["html"].read_text()
    assert "Time to first text" in names["svg"].read_text()


@pytest.mark.parametrize(
    "said",
    [
        {"metrics": {"speculative_decoding": {
            "num_draft_tokens": 8, "num_accepted_draft_tokens": 6, "num_spec_steps": 4}}},
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
    assert found["acceptance"]["length"]["median"] == (2.5 if "metrics" in said else None)
    assert found["by_task"]["story"]["acceptance"]["rate"]["median"] == 0.75
    assert "Acceptance by 16 answers' own counts: rate 75.0% (75.0%–75.0%)" in capsys.readouterr().out


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


def conversations(tmp_path: Path, *rows: dict[str, Any]) -> tuple[str, ...]:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return ("--dataset", str(path), "--chat", "--repeats", "1", "--json")


def reply(body: dict[str, Any]) -> list[Any]:
    """An answer that names how many messages it answers; reasoning comes before it."""
    said = {"choices": [{"delta": {"content": f"answer to {len(body['messages'])}"}}]}
    thought = {"choices": [{"delta": {"reasoning_content": "hm"}}]}
    return [thought, said, chunk("", "stop"), usage(4), "[DONE]"]


def test_15_each_turns_answer_goes_into_the_next_turns_messages(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = {"turns": ["one", "two", "three"], "category": "talk"}, {"prompt": "alone", "category": "short"}
    with serving(Fake(script=reply, metrics=None)) as fake:
        assert bench(fake, *conversations(tmp_path, *rows), "--fail-if", "by_turn.2.timing.ttft_s.median > 9") == 0
        found = document(capsys)
        assert bench(fake, *conversations(tmp_path, *rows), "--fail-if", "by_turn.4.timing.ttft_s.median > 9") == 2
    sent = {len(body["messages"]): body["messages"] for body in fake.requests[1:4]}
    assert sent[5] == [
        {"role": "user", "content": "one"}, {"role": "assistant", "content": "answer to 1"},
        {"role": "user", "content": "two"}, {"role": "assistant", "content": "answer to 3"},
        {"role": "user", "content": "three"},
    ], "answers without their reasoning"  # fmt: skip
    assert set(fake.paths) == {"/v1/chat/completions"}
    assert counted(found) == {"planned": 4, "answered": 4, "failed": 0, "not_sent": 0, "sent_again": 0}
    assert {turn: part["num_prompts"] for turn, part in found["by_turn"].items()} == {"1": 2, "2": 1, "3": 1}
    assert [part["output_tokens"] for part in found["by_turn"].values()] == [8, 4, 4]
    assert found["by_task"]["talk"]["output_tokens"] == 12
    assert found["timing"]["ttft_s"]["pairs"] == 2, "turns of a conversation are drawn together"


def test_15_answers_that_a_row_brings_stay(tmp_path: Path) -> None:
    said = [("system", "be brief"), ("user", "one"), ("assistant", "given"), ("user", "two")]
    row = {"messages": [{"role": role, "content": content} for role, content in said]}
    with serving(Fake(script=reply)) as fake:
        assert bench(fake, *conversations(tmp_path, row)) == 0
    assert len(fake.requests) == 2
    assert fake.requests[1]["messages"] == row["messages"]


@pytest.mark.parametrize("how", ["error", "tool"])
def test_15_a_turn_that_fails_ends_its_conversation_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, how: str
) -> None:
    call = {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"name": "f"}}]}}]}

    def script(body):
        if body["messages"][0]["content"] == "bad" and len(body["messages"]) == 3:
            return [{"error": {"message": "too long"}}] if how == "error" else [call, chunk("", "tool_calls"), "[DONE]"]
        return reply(body)

    rows = {"turns": ["bad", "b", "c", "d"]}, {"turns": ["good", "f"]}
    with serving(Fake(script=script, metrics=None)) as fake:
        assert bench(fake, *conversations(tmp_path, *rows), "--concurrency", "2") == 0
    found = document(capsys)
    failed = int(how == "error")
    assert counted(found) == {
        "planned": 6, "answered": 4 - failed, "failed": failed, "not_sent": 2, "sent_again": 0,
    }  # fmt: skip
    assert any("2 turns were not sent, because the turn before" in notice for notice in found["notices"])
    assert [error["turn"] for error in found["errors"]] == [2] * failed
    assert len(fake.requests) == 1 + 4


def test_15_turns_at_a_rate_follow_each_other(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = [{"turns": ["a", "b"]}] * 6
    with serving(Fake(script=reply, pause_s=0.05, metrics=None)) as fake:
        assert bench(fake, *conversations(tmp_path, *rows), "--request-rate", "100", "--num-prompts", "6") == 0
    found = document(capsys)
    assert found["requests"]["answered"] == 12
    assert found["timing"]["queue_s"]["p99"] < 0.05, "a turn arrives when the one before it is answered"


def test_15_an_interrupted_conversation_counts_what_it_had(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(BenchView, "draw", lambda *_: signal.raise_signal(signal.SIGINT))
    with serving(Fake(script=reply)) as fake:
        assert bench(fake, *conversations(tmp_path, {"turns": ["a", "b", "c"]})) == 130
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"]["answered"], found["requests"]["not_sent"]) == (1, 0)


def test_15_turns_are_in_every_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    names = tmp_path / "r.md", tmp_path / "r.csv"
    rows = {"turns": ["one", "two"]}, {"turns": ["three", "four"]}
    with serving(Fake(script=reply, metrics=None)) as fake:
        files = ("--markdown", str(names[0]), "--csv", str(names[1]))
        assert bench(fake, *conversations(tmp_path, *rows)[:-1], *files) == 0
    assert " turn   prompts " in capsys.readouterr().out
    assert "### Turns" in names[0].read_text()
    found = list(csv.DictReader(names[1].read_text().splitlines()))
    assert [(row["turn"], row["output_tokens"]) for row in found] == [("", "16"), ("1", "8"), ("2", "8")]


def test_15_answers_of_another_model_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    def script(body):
        return [chunk() | {"model": "other\x1b[31m"}, chunk("", "stop"), usage(2), "[DONE]"]

    with serving(Fake(script=script, metrics=None)) as fake:
        assert bench(fake, "--endpoint-model", "typo", "--json") == 0
    [said] = [notice for notice in document(capsys)["notices"] if "model" in notice]
    assert said.startswith("the answers come from the model `other")
    assert "`typo` was requested" in said
    assert "\x1b" not in said


def test_15_prompts_in_the_servers_cache_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    counts = {"prompt_tokens": 8, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 6}}
    with serving(Fake(script=[chunk(), chunk("", "stop"), {"choices": [], "usage": counts}, "[DONE]"])) as fake:
        assert bench(fake, "--json") == 0
    assert any("75% of the prompt tokens were in the server's cache" in one for one in document(capsys)["notices"])

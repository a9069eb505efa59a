"""`bench --endpoint` as a person meets it: against a small server in this process."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from endpoint_runs import bench, counted, document, without_environment
from fake_proxy import proxying
from fake_server import Fake, serving

from specdec_cli.cli.main import run


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    without_environment(monkeypatch)


def test_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Fake()) as fake:
        assert bench(fake, "--details") == 0
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
    assert (second["prompt"], second["max_tokens"], second["seed"]) == ("b", 15, 1)


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


@pytest.mark.parametrize(
    "given",
    [
        ["--draft", "ngram"], ["-k", "4"], ["--against", "none"], ["--batch-size", "1"], ["--dtype", "float32"],
        ["--device", "cpu"], ["--no-lossless-check"], ["--trust-remote-code"],
        ["--verify", "greedy"], ["--decoder", "transformers"], ["--resume", "--output", "x.json"],
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
        out = " ".join(capsys.readouterr().out.split())  # a table's title breaks between words
    assert (found["plan"]["request_rate"], found["plan"]["arrival_seed"]) == (100, 5)
    assert found["plan"]["concurrency"] is None
    assert found["timing"]["arrival_latency_s"]["median"] >= found["timing"]["latency_s"]["median"]
    assert found["throughput"]["requests_per_second"] < 110, "not faster than they arrive"
    assert "100 arriving per second, at most 2 at a time" in out
    assert "arrival to whole answer" in out


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

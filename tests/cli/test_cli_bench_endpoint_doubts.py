"""`bench --endpoint` with servers that fail, go away, or say what cannot be."""

import json
import signal
from pathlib import Path

import pytest
from endpoint_runs import bench, chunk, counted, document, usage, without_environment
from fake_server import Fake, serving
from schemas import assert_fits

from specdec_cli.errors import RunError
from specdec_cli.measure.documents.endpoint import EndpointDocument
from specdec_cli.measure.endpoint.answer import Answer
from specdec_cli.measure.endpoint.endpoint_arm import check_counted
from specdec_cli.report.live_table import LiveTable


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    without_environment(monkeypatch)


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

    monkeypatch.setattr(LiveTable, "draw", interrupting)
    with serving(Fake()) as fake:
        assert bench(fake, "--json") == 130
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert_fits(found, EndpointDocument)
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


@pytest.mark.in_turn(0, every=3)
@pytest.mark.parametrize(
    ("script", "words", "tokens"),
    [
        ([chunk(), chunk("", "stop"), usage(0), "[DONE]"], "have output, but no token by the server's usage", None),
        ([chunk()] * 5 + [chunk("", "stop"), usage(2), "[DONE]"], "more chunks than they have tokens", 32),
        ([chunk(), chunk("", "length"), usage(99), "[DONE]"], "more tokens than `max_tokens` allows", 16 * 99),
        ([chunk(), chunk("", "length"), usage(9), "[DONE]"], "were cut before `max_tokens` tokens", 16 * 9),
        ([chunk(), usage(9), "[DONE]"], "have no finish_reason", 16 * 9),
        ([0.1, [*[chunk()] * 9, chunk("", "stop"), usage(9), "[DONE]"]], "came all at once", 16 * 9),
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


@pytest.mark.parametrize("tokens", [-8, "eight", 10**9])
def test_usage_that_cannot_be_right_is_not_believed(capsys: pytest.CaptureFixture[str], tokens: object) -> None:
    with serving(Fake(script=[chunk(), chunk(" b", "stop"), usage(tokens), "[DONE]"], metrics=None)) as fake:
        assert bench(fake, "--json") == 0
    found = document(capsys)
    said = f"an invalid usage, such as `completion_tokens: {json.dumps(tokens)}`: output tokens"
    assert any(said in notice for notice in found["notices"]), found["notices"]
    assert not any("sends no usage" in notice for notice in found["notices"])
    assert (found["output"]["tokens"], found["timing"]["tpot_s"]["median"]) == (None, None)
    answer = Answer(0.0)
    answer.feed(usage(tokens), 1.0)
    answer.check_usage(8)
    with pytest.raises(RunError, match=r"sends an invalid usage, `completion_tokens: .*`, so its tokens cannot"):
        check_counted([answer])


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

"""The client of a server: addresses, what is sent, what a stream's clock says, and one sentence for every fault."""

import asyncio
import ssl
from typing import Any

import pytest
from fake_server import Fake, serving
from typed import not_none

from specdec_cli.engine.prompts import rows_of
from specdec_cli.errors import RunError, UsageError
from specdec_cli.measure.endpoint import sending
from specdec_cli.measure.endpoint.address import check_key, parse_address
from specdec_cli.measure.endpoint.answer import Answer
from specdec_cli.measure.endpoint.endpoint import Endpoint
from specdec_cli.measure.endpoint.endpoint_arm import EndpointArm
from specdec_cli.measure.endpoint.endpoint_bench import EndpointBench
from specdec_cli.measure.endpoint.endpoint_plan import EndpointPlan
from specdec_cli.measure.endpoint.refusal import EndpointError, system_words
from specdec_cli.recipe.schema import Sampling


@pytest.mark.parametrize(
    ("url", "root", "api"),
    [
        ("http://h:8000", "http://h:8000", "http://h:8000/v1"),
        ("http://h:8000/", "http://h:8000", "http://h:8000/v1"),
        ("https://h/v1/", "https://h", "https://h/v1"),
        ("https://h/openai/v3", "https://h/openai", "https://h/openai/v3"),
        ("http://0.0.0.0:8000", "http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://[::]:8000/v1", "http://[::1]:8000", "http://[::1]:8000/v1"),
        ("http://[::]", "http://[::1]", "http://[::1]/v1"),
    ],
)
def test_addresses(url: str, root: str, api: str) -> None:
    assert (parse_address(url).root, parse_address(url).api) == (root, api)


@pytest.mark.parametrize("url", ["h:8000", "ftp://h", "http://", "http://h:0", "http://h:99999", "http://[", ""])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(UsageError, match="http or https"):
        parse_address(url)


@pytest.mark.parametrize("url", ["http://me:secret@h", "http://h?key=secret", "http://h#secret"])
def test_an_address_holds_no_secret_and_the_error_does_not_show_it(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_address(url)
    assert "secret" not in caught.value.message


def test_keys() -> None:
    assert check_key(None) is None
    assert check_key(" ") is None
    assert check_key("sk-1\n") == "sk-1"
    with pytest.raises(UsageError, match="no HTTP header") as caught:
        check_key("sk-1\nx-evil: 1")
    assert "evil" not in caught.value.message


def test_the_clock_of_an_answer() -> None:
    answer = Answer(sent=10.0)
    answer.feed({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, 10.5)
    answer.feed({"choices": [{"delta": {"reasoning_content": "hm"}}]}, 11.0)
    answer.feed({"choices": [{"text": " a b c"}]}, 13.0)
    answer.feed({"choices": [{"text": "", "finish_reason": "stop"}]}, 15.0)
    assert answer.tpot_s is None, "without usage nobody counted the tokens"
    answer.feed({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 5}}, 16.0)
    assert (answer.ttft_s, answer.gaps_s, answer.finish_s) == (1.0, [2.0], 5.0)
    assert answer.tpot_s == (5.0 - 1.0) / 4
    assert (answer.prompt_tokens, answer.finish_reason) == (4, "stop")


def test_one_token_or_none_has_no_time_per_token() -> None:
    answer = Answer(sent=0.0)
    answer.feed({"choices": [], "usage": {"completion_tokens": 0}}, 1.0)
    assert (answer.ttft_s, answer.tpot_s, answer.completion_tokens) == (None, None, 0)
    answer.feed({"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}}, 1.0)
    assert answer.tpot_s is None


@pytest.mark.parametrize("concurrency", [1, 3])
def test_what_is_done_between_requests_is_in_no_time(monkeypatch: pytest.MonkeyPatch, concurrency: int) -> None:
    """A drawing of an hour, on a clock of our own: no stream is open meanwhile, and throughput does not see it."""
    clock, num_open, idle = [0.0], [0], []

    async def ask(*_):
        num_open[0] += 1
        for _second in range(3):
            clock[0] += 1
            await asyncio.sleep(0)
        num_open[0] -= 1
        return Answer(clock[0], arrivals=[1.0], completion_tokens=1)

    def draw() -> None:
        idle.append(num_open[0])
        clock[0] += 3600

    monkeypatch.setattr(sending, "perf_counter", lambda: clock[0])
    with serving(Fake()) as fake:
        plan = EndpointPlan(parse_address(fake.url), concurrency=concurrency)
        bench = EndpointBench(EndpointArm(plan, Sampling()), rows_of(list("abcdefg")))
        monkeypatch.setattr(Endpoint, "ask", ask)
        bench.run(lambda: False, draw)
    assert idle == [0] * (7 if concurrency == 1 else len(idle))
    assert idle
    assert bench.num_answered == 7
    assert bench.seconds == 7 * 3


def ask(fake: Fake, key: str | None = None, timeout_s: float = 20) -> Answer:
    async def go():
        async with Endpoint(parse_address(fake.url), key, timeout_s) as endpoint:
            return await endpoint.ask("/completions", {"model": "fake", "prompt": "hi", "stream": True})

    return asyncio.run(go())


def test_an_answer() -> None:
    with serving(Fake(words=4, tokens_per_word=2)) as fake:
        answer = ask(fake)
    assert (len(answer.arrivals), answer.completion_tokens, answer.finish_reason) == (4, 8, "length")
    assert 0 < not_none(answer.ttft_s) <= not_none(answer.finish_s) <= answer.end_s


def test_a_server_that_closes_connections_between_requests_is_asked_again() -> None:
    """As llama.cpp's does."""

    async def go(fake):
        async with Endpoint(parse_address(fake.url)) as endpoint:
            return [await endpoint.ask("/completions", {"model": "fake", "prompt": str(i)}) for i in range(5)]

    with serving(Fake(most_per_connection=2)) as fake:
        answers = asyncio.run(go(fake))
    assert [len(answer.arrivals) for answer in answers] == [5] * 5
    assert [body["prompt"] for body in fake.requests] == list("01234")
    with serving(Fake(most_per_connection=0)) as fake, pytest.raises(EndpointError, match="the connection to"):
        ask(fake)


@pytest.mark.parametrize(
    ("fault", "words", "status"),
    [
        (404, "refused the request (404): I say 404 to key ***", 404),
        (500, "refused the request (500): I say 500", 500),
        (401, "refuses the key (401)", 401),
        (307, "sends on to `http://elsewhere/`", 307),
        ("no stream", "answers with `application/json`, not with a stream", None),
        ("garbage", "is not JSON: `{nonsense`", None),
        ("error body", "`application/json`, not with a stream of events: no such model", None),
        ("error", "broke off its answer: the engine died", None),
        ("dies", "the connection to", None),
    ],
)
def test_every_fault_is_one_sentence_without_the_key(fault, words: str, status: int | None) -> None:
    with serving(Fake(fault=fault, key="sk-hidden")) as fake, pytest.raises(EndpointError) as caught:
        ask(fake, "sk-hidden")
    assert words in caught.value.message
    assert "\n" not in caught.value.message
    assert "\x1b" not in caught.value.message
    assert "sk-hidden" not in caught.value.message
    assert caught.value.status == status
    assert not caught.value.is_gone


def test_a_stream_without_an_end_is_no_answer() -> None:
    with (
        serving(Fake(words=0, usage=False, fault="cut")) as fake,
        pytest.raises(EndpointError, match="before the answer"),
    ):
        ask(fake)


def text(words: str = " a", reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"text": words, "finish_reason": reason}]}


def usage(**counts: Any) -> dict[str, Any]:
    return {"choices": [], "usage": counts}


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ([text(), {"error": {"message": "out of memory"}}, "[DONE]"], "broke off its answer: out of memory"),
        ([text(), {"error": "out of memory", "error_type": "generation"}], "broke off its answer: out of memory"),
        (
            [text(), {"object": "error", "message": "no memory", "code": 500}, "[DONE]"],
            "broke off its answer: no memory",
        ),
        ([text(), 'event: error\ndata: {"message": "no memory"}', "[DONE]"], "broke off its answer: no memory"),
        ([text(), "event: error\ndata: no memory"], "broke off its answer: no memory"),
        ([text(), {"detail": "no memory"}, "[DONE]"], "streams something else than chunks"),
        ([text(), [1], "[DONE]"], "streams something else than chunks"),
        ([text(), text("", "error"), "[DONE]"], "its finish_reason is `error`"),
        ([text(), text("", "abort"), usage(completion_tokens=9), "[DONE]"], "its finish_reason is `abort`"),
        ([text(), text()], "ended its stream before the answer was finished"),
        ([text(), usage(completion_tokens=2)], "ended its stream before the answer was finished"),
        (["[DONE]"], "holds no answer"),
        ([], "ended its stream before"),
        ([": ping", ": ping"], "ended its stream before"),
    ],
)
def test_15_what_is_no_whole_answer(script, words: str) -> None:
    with serving(Fake(script=script)) as fake, pytest.raises(EndpointError) as caught:
        ask(fake)
    assert words in caught.value.message


def test_15_what_servers_send_beside_chunks() -> None:
    script = [
        ": PROCESSING", 'event: ping\ndata: {"type": "ping"}', {"choices": [], "prompt_filter_results": []}, text(" a"),
        text(" b"), text("", "stop"), {"usage": {"completion_tokens": 2.0, "prompt_tokens": 1}},
        {"choices": [], "usage": None},
        usage(prompt_tokens=1), "[DONE]", 'data: {"error": {"message": "too late"}}',
    ]  # fmt: skip
    with serving(Fake(script=script)) as fake:
        answer = ask(fake)
    assert (answer.text, answer.completion_tokens, answer.prompt_tokens) == (" a b", 2, 1)
    assert (answer.finish_reason, answer.is_done) == ("stop", True)


@pytest.mark.in_turn(2, every=3)
@pytest.mark.parametrize("key", ["content", "reasoning_content", "reasoning", "thinking", "refusal"])
def test_15_the_first_output_of_any_kind_ends_the_time_to_it(key: str) -> None:
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    first, later = {"choices": [{"delta": {key: "hm"}}]}, {"choices": [{"delta": {"content": "so"}}]}
    with serving(Fake(script=[role, 0.02, first, 0.5, later, text("", "stop"), "[DONE]"])) as fake:
        answer = ask(fake)
    assert 0.02 <= not_none(answer.ttft_s) < answer.arrivals[1] - 0.4
    assert len(answer.arrivals) == 2
    assert answer.text == ("hmso" if key == "content" else "so")


def test_15_tool_calls_are_output() -> None:
    call = {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"name": "f"}}]}}]}
    with serving(Fake(script=[call, text("", "tool_calls"), "[DONE]"])) as fake:
        answer = ask(fake)
    assert answer.calls_tools
    assert len(answer.arrivals) == 1


def test_15_a_usage_that_cannot_be_right_counts_nothing() -> None:
    for wrong in (0, -1, 2.5, True, "3", None):
        with serving(Fake(script=[text(), text("", "stop"), usage(completion_tokens=wrong), "[DONE]"])) as fake:
            assert ask(fake).num_tokens is None
    with serving(Fake(script=[text("", "stop"), usage(completion_tokens=0), "[DONE]"])) as fake:
        assert ask(fake).num_tokens == 0


def test_15_one_chunk_has_no_time_per_token() -> None:
    """A server or a proxy that holds its stream back sends everything at once."""
    with serving(Fake(script=[text(" a b c d", "length"), usage(completion_tokens=4), "[DONE]"])) as fake:
        answer = ask(fake)
    assert (answer.tpot_s, answer.num_tokens) == (None, 4)


def test_15_only_a_kept_connection_is_tried_again() -> None:
    with serving(Fake(most_per_connection=0)) as fake, pytest.raises(EndpointError, match="the connection to"):
        ask(fake)
    assert fake.requests == []
    with serving(Fake()) as fake:
        assert ask(fake).opened_connection


def test_15_a_certificate_that_is_not_trusted_is_named() -> None:
    error = ssl.SSLCertVerificationError(1, "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed")
    error.verify_message = "self-signed certificate"
    assert system_words(error) == "no secure connection: self-signed certificate"
    assert system_words(ssl.SSLError(1, "wrong version number")) == "no secure connection: it failed"


def test_silence() -> None:
    with serving(Fake(pause_s=0.5)) as fake, pytest.raises(EndpointError, match=r"silent for 0\.1 s"):
        ask(fake, timeout_s=0.1)


def test_15_comments_are_silence() -> None:
    """A server that keeps its connection alive and never answers does not hold the benchmark for ever."""
    pings = [": ping", 0.05] * 40
    script = [*pings, text(" a", "stop"), "[DONE]"]
    with serving(Fake(script=script)) as fake, pytest.raises(EndpointError, match=r"silent for 0\.3 s"):
        ask(fake, timeout_s=0.3)
    with serving(Fake(script=[text(), 0.2, text(), 0.2, text(" b", "stop"), "[DONE]"])) as fake:
        assert len(ask(fake, timeout_s=0.35).arrivals) == 3


def test_nobody_there() -> None:
    with serving(Fake()) as fake:
        pass
    with pytest.raises(EndpointError, match="connection refused") as caught:
        ask(fake)
    assert caught.value.is_gone


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--endpoint", "name one with --endpoint-model"),
        ("--target-endpoint", "name one with --target"),
        ("--engine-command", "check --engine-command"),
    ],
)
def test_a_server_without_models_is_told_with_the_options_there_are(
    monkeypatch: pytest.MonkeyPatch, flag: str, hint: str
) -> None:
    async def none(_: Endpoint) -> list[str]:
        return []

    async def choose() -> str:
        async with Endpoint(parse_address("http://127.0.0.1:9", flag)) as endpoint:
            return await endpoint.choose_model("")

    monkeypatch.setattr(Endpoint, "models", none)
    with pytest.raises(RunError, match="lists no model") as refused:
        asyncio.run(choose())
    assert refused.value.hint == hint

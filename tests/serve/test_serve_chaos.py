"""What goes wrong around a server and within it: clients that leave, too many of them, and planted faults."""

import http.client
import json
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from live_server import HeldLM, LiveServer, live, until
from toy_engine import toy_engine
from typed import not_none, stand_in

from specdec_cli.errors import ExitCode
from specdec_cli.sampling.grammar import Matcher

BODY = {"prompt": "abcab", "temperature": 0, "max_tokens": 40, "ignore_eos": True}
LONG = BODY | {"max_tokens": 480}
PROMPTS = ["abcab", "hgfed", "ab.ab", "cafe "]
VICTIM = "hhhh"


def idle(server: LiveServer, seconds: float = 1.0) -> None:
    """Nothing is left within a second: no job, no sequence, no block."""
    until(lambda: not server.bridge.num_open, seconds)
    engine = server.bridge.engine
    assert not engine.has_work
    assert engine.target.num_free_blocks == engine.target.num_blocks


def begin(server: LiveServer, body: dict[str, Any]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """A stream whose first bytes came."""
    connection = server.connect()
    connection.request(
        "POST", "/v1/completions", json.dumps(body | {"stream": True}), {"content-type": "application/json"}
    )
    response = connection.getresponse()
    assert response.status == 200
    assert response.read(10)
    return connection, response


def in_company(server: LiveServer, victim: dict[str, Any]) -> tuple[tuple[int, dict[str, Any]], list[str]]:
    """A request that something is planted for, among others; its answer and their texts."""
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(server.text, BODY | {"prompt": prompt}) for prompt in PROMPTS]
        found = pool.submit(server.post, "/v1/completions", BODY | victim)
        return found.result(), [other.result() for other in others]


def alone() -> list[str]:
    with live(toy_engine(target=HeldLM())) as server:
        return [server.text(BODY | {"prompt": prompt}) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """What the others say where nothing is wrong."""
    return alone()


def test_clients_that_leave_at_any_moment_leave_nothing_behind() -> None:
    rng = random.Random(0)
    with live(toy_engine(target=HeldLM(0.002), max_num_seqs=4), max_waiting=100) as server:
        bodies = [LONG | {"stream": rng.random() < 0.5, "n": rng.choice([1, 1, 3])} for _ in range(60)]
        connections = []
        for body in bodies:
            connection = server.connect()
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            connections.append(connection)
            if rng.random() < 0.7:
                time.sleep(rng.random() * 0.02)
                connections.pop(rng.randrange(len(connections))).close()
        for connection in connections:
            connection.close()
        idle(server)
        assert server.text(BODY)


def test_at_ten_times_capacity_some_are_refused_and_all_others_complete(texts) -> None:
    with live(toy_engine(target=HeldLM(0.001), max_num_seqs=3), max_waiting=3) as server:
        with ThreadPoolExecutor(60) as pool:
            found = list(pool.map(lambda _: server.post("/v1/completions", BODY), range(60)))
        refused = [answer for status, answer in found if status == 429]
        assert refused
        assert {answer["error"]["type"] for answer in refused} == {"rate_limit_error"}
        complete = [answer["choices"][0]["text"] for status, answer in found if status == 200]
        assert len(complete) >= 6
        assert len(complete) + len(refused) == 60
        assert set(complete) == {texts[0]}
        idle(server)


def test_a_refusal_says_when_to_come_back() -> None:
    target, goes_on = HeldLM(), threading.Event()
    target.plant = stand_in(lambda rows: min(map(len, rows)) > len(str(LONG["prompt"])) and goes_on.wait(20))
    with live(toy_engine(target=target, max_num_seqs=1), max_waiting=0) as server:
        connection, _ = begin(server, LONG)
        refused = server.connect()
        refused.request("POST", "/v1/completions", json.dumps(BODY), {"content-type": "application/json"})
        response = refused.getresponse()
        goes_on.set()
        assert (response.status, response.getheader("retry-after")) == (429, "1")
        refused.close()
        connection.close()


def test_a_draft_that_raises_costs_guesses_and_no_output(texts) -> None:
    engine = toy_engine(target=HeldLM())
    engine.drafter.propose = stand_in(lambda rows: 1 / 0)
    with live(engine) as server:
        assert [server.text(BODY | {"prompt": prompt}) for prompt in PROMPTS] == texts
        assert list(server.models.all[0].metrics.draft_failures().values())[-1] > 0
        idle(server)


def test_logits_that_are_no_numbers_end_one_request(texts, monkeypatch: pytest.MonkeyPatch) -> None:
    target = HeldLM()
    score = target.score

    def poisoned(rows):
        logits = score(rows)
        first = 0
        for row in rows:
            if row.context[:4] == [8, 8, 8, 8]:
                logits[first : first + row.num_logits] = torch.nan
            first += row.num_logits
        return logits

    monkeypatch.setattr(target, "score", poisoned)
    with live(toy_engine(target=target)) as server:
        (status, answer), others = in_company(server, {"prompt": VICTIM})
        assert status == 500
        assert "nan" in answer["error"]["message"]
        assert others == texts
        idle(server)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA out of memory"), torch.OutOfMemoryError("none")])
def test_a_step_without_memory_ends_one_request_at_most_and_the_rest_say_the_same(texts, error) -> None:
    target, faults = HeldLM(), [error]
    with live(toy_engine(target=target)) as server:

        def plant(rows: list[str]) -> None:
            if faults:
                until(lambda: server.bridge.num_open == len(PROMPTS))
            if len(rows) >= 3 and faults:
                raise faults.pop()

        target.plant = plant
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda prompt: server.post("/v1/completions", BODY | {"prompt": prompt}), PROMPTS))
        assert not faults, "the fault was met"
        statuses = [status for status, _ in found]
        assert sorted(statuses) == [200, 200, 200, 500]
        for (status, answer), text in zip(found, texts, strict=True):
            assert status == 500 or answer["choices"][0]["text"] == text
        idle(server)


def test_a_matcher_that_fails_ends_its_own_request(texts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Matcher, "accept", lambda self, tokens: 1 / 0)
    with live(toy_engine(target=HeldLM())) as server:
        (status, answer), others = in_company(server, {"structured_outputs": {"regex": "[abc]+"}})
        assert (status, answer["error"]["code"]) == (500, "internal_error")
        assert others == texts
        idle(server)


def test_a_grammar_that_cannot_be_made_fails_before_it_has_a_place(texts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec_cli.sampling.grammar_sandbox.compile_grammar", lambda *_: 1 / 0)
    with live(toy_engine(target=HeldLM())) as server:
        (status, answer), others = in_company(server, {"structured_outputs": {"regex": "[abc]+"}})
        assert (status, answer["error"]["code"]) == (500, "internal_error")
        assert others == texts
        idle(server)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tokenizer_that_fails_ends_its_own_request(texts, stream: bool) -> None:
    engine = toy_engine(target=HeldLM())
    with live(engine) as server:
        tokenizer = engine.tokenizer
        encode, made = not_none(tokenizer).encode, not_none(tokenizer).stream
        not_none(tokenizer).encode = stand_in(
            lambda text, *rest, **more: 1 / 0 if text == VICTIM else encode(text, *rest, **more)
        )
        not_none(tokenizer).stream = stand_in(
            lambda stop=(), *rest, **more: (
                SimpleNamespace(feed=None) if stop == ("\n\n",) else made(stop, *rest, **more)
            )
        )
        for victim in ({"prompt": VICTIM}, {"stop": ["\n\n"]}):
            (status, answer), others = in_company(server, victim | {"stream": stream})
            assert (status, answer["error"]["code"]) == (500, "internal_error")
            assert others == texts
            idle(server)


def test_a_client_that_reads_nothing_holds_nobody_up() -> None:
    with live(toy_engine(target=HeldLM(), max_num_seqs=4)) as server:
        body = LONG | {"n": 8, "logprobs": 20, "return_token_ids": True}
        slow = [begin(server, body)[0] for _ in range(3)]
        assert server.text(BODY)
        until(lambda: not server.bridge.num_open)
        idle(server)
        for connection in slow:
            connection.close()
        assert server.text(BODY)


def test_sigterm_in_the_middle_of_streams_lets_them_end_and_refuses_others() -> None:
    target, goes_on = HeldLM(0.005), threading.Event()
    target.plant = stand_in(
        lambda rows: len(rows) == 4 and min(map(len, rows)) > len(str(LONG["prompt"])) and goes_on.wait(20)
    )
    with live(toy_engine(target=target)) as server:
        streams = [begin(server, LONG) for _ in range(4)]
        server.handle_exit(signal.SIGTERM, None)
        until(lambda: server.models.is_draining)
        assert server.post("/v1/completions", BODY)[0] == 503
        goes_on.set()
        ends: list[bytes] = []
        readers = [threading.Thread(target=lambda one=one: ends.append(one[1].read())) for one in streams]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(20)
        assert all(end.endswith(b"data: [DONE]\n\n") and b'"finish_reason":"length"' in end for end in ends)
        assert len(ends) == 4
        for connection, _ in streams:
            connection.close()
        until(lambda: server.ended is not None)
    assert server.ended == ExitCode.DONE

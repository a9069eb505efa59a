"""The routes end to end in this process: texts are the engine's, streamed or not, and what breaks has its status."""

import asyncio
import json
from typing import Any

import pytest
from toy_engine import toy_engine
from toy_server import served_engine, toy_client, toy_models
from typed import stand_in

from specdec_cli.engine.jobs.bridge import Bridge
from specdec_cli.recipe.schema import Serve
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.serve.answer.logprobs import CompletionLogprobs
from specdec_cli.serve.settings import Settings

GREEDY = {"temperature": 0, "max_tokens": 24}


def events(response) -> list[dict[str, Any]]:
    lines = [line for line in response.text.split("\n\n") if line and not line.startswith(":")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def expected(prompt: str, **settings) -> str:
    return toy_engine().generate([prompt], SamplingParams(max_new_tokens=24, **settings))[0].text


@pytest.fixture(scope="module")
def client():
    with toy_client() as made:
        yield made


@pytest.mark.parametrize("prompt", ["abcab", "h", "face a bad cafe."])
def test_a_completion_is_the_engines_streamed_or_not(client, prompt: str) -> None:
    body = {"model": "toy", "prompt": prompt, **GREEDY}
    whole = client.post("/v1/completions", json=body)
    assert whole.status_code == 200
    assert whole.headers["content-type"] == "application/json"
    assert whole.json()["choices"][0]["text"] == expected(prompt)
    streamed = client.post("/v1/completions", json=body | {"stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    chunks = events(streamed)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected(prompt)
    assert chunks[-1]["choices"][0]["finish_reason"] == whole.json()["choices"][0]["finish_reason"]


def test_the_seed_case_of_a_chat(client) -> None:
    turns = [("system", "be a bee"), ("user", "abc"), ("assistant", "cab"), ("user", "ha")]
    body = {
        "model": "toy",
        "messages": [{"role": role, "content": content} for role, content in turns],
        "max_tokens": 20, "top_k": -1, "top_p": 1, "temperature": 0, "ignore_eos": False, "stream": False,
    }  # fmt: skip
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["message"]["role"] == "assistant"
    streamed = events(client.post("/v1/chat/completions", json=body | {"stream": True}))
    told = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in streamed)
    assert told == choice["message"]["content"] != ""


def test_prompts_times_n_are_choices_in_order(client) -> None:
    body = {"prompt": ["abc", "hgf"], "n": 2, "temperature": 1, "seed": 5, "max_tokens": 9}
    first, again = (client.post("/v1/completions", json=body).json() for _ in range(2))
    texts = [choice["text"] for choice in first["choices"]]
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2, 3]
    assert texts == [choice["text"] for choice in again["choices"]]
    assert len(set(texts)) > 1
    chunks = events(client.post("/v1/completions", json=body | {"stream": True}))
    streamed = ["".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == i) for i in range(4)]
    assert streamed == texts


def test_one_token_a_chunk_and_many() -> None:
    body = {"prompt": "abcab", **GREEDY, "stream": True}
    with toy_client(stream_interval=1) as client:
        single = events(client.post("/v1/completions", json=body))
    with toy_client(stream_interval=7) as client:
        many = events(client.post("/v1/completions", json=body))
    assert len(many) <= 5 < 20 <= len(single)
    for chunks in (single, many):
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected("abcab")


def test_unknown_fields_are_listed(client) -> None:
    answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "colour": "red", "ü\n": 1})
    assert answer.status_code == 200
    assert "colour" in answer.headers["x-specdec-ignored"]
    assert answer.headers["x-specdec-ignored"].isascii()


@pytest.mark.parametrize(("change", "status", "param"), [
    ({"model": "gpt"}, 404, "model"), ({"temperature": -1}, 400, "temperature"), ({"n": 65}, 400, "n"),
    ({"max_tokens": 10**6}, 400, "max_tokens"), ({"prompt": []}, 400, "prompt"), ({"logprobs": 21}, 400, "logprobs"),
])  # fmt: skip
def test_what_is_wrong_is_named(client, change: dict[str, Any], status: int, param: str) -> None:
    answer = client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3} | change)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param


def test_tokens_go_there_and_back(client) -> None:
    tokens = client.post("/tokenize", json={"prompt": "abc"}).json()
    assert tokens["count"] == 3
    assert client.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "abc"}
    assert client.get("/tokenizer_info").status_code == 200


def test_models_version_page_metrics_and_the_document(client) -> None:
    listed = client.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["toy"]
    assert client.get("/v1/models/toy").json() == listed["data"][0]
    assert listed["data"][0]["max_model_len"] == 512
    assert set(client.get("/version").json()) == {"version"}
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    client.post("/v1/completions", json={"prompt": "abc", **GREEDY})
    numbers = client.get("/metrics").text
    assert 'specdec:generation_tokens_total{model_name="toy"}' in numbers
    document = client.get("/openapi.json").json()
    assert {"/v1/completions", "/v1/chat/completions", "/health"} <= set(document["paths"])
    assert "CompletionRequest" in document["components"]["schemas"]
    assert "422" not in json.dumps(document["paths"])


def test_a_full_queue_is_a_429(client) -> None:
    with toy_client(toy_engine(max_num_seqs=1), max_waiting=0) as small:
        bridge = small.models.all[0].bridge
        bridge._num_open += 1
        refused = small.post("/v1/completions", json={"prompt": "abc"})
        bridge._num_open -= 1
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert small.post("/v1/completions", json={"prompt": "abc"}).status_code == 200
        assert small.models.all[0].metrics.num_refused[429] == 1


def test_requests_that_are_being_prepared_have_places_and_bodies_of_others_are_not_read() -> None:
    with toy_client(toy_engine(max_num_seqs=1), max_waiting=0) as small:
        small.models.all[0].num_preparing += 1
        assert small.post("/v1/completions", content=b"no JSON").status_code == 429
        small.models.all[0].num_preparing -= 1
        assert small.post("/v1/completions", content=b"no JSON").status_code == 415


def test_a_full_server_that_is_going_away_says_that() -> None:
    with toy_client(toy_engine(max_num_seqs=1), max_waiting=0) as small:
        bridge = small.models.all[0].bridge
        bridge._num_open += 1
        bridge.is_draining = True
        refused = small.post("/v1/completions", json={"prompt": "abc"})
        bridge._num_open -= 1
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")


def test_a_request_that_leaves_no_token_is_its_own_fault(client) -> None:
    refused = client.post("/v1/completions", json={"prompt": "abc", "min_tokens": 4, "stop_token_ids": [*range(12)]})
    assert refused.status_code == 400
    assert "every token is banned" in refused.json()["error"]["message"]


def test_what_the_page_asks_for_works_where_there_is_no_draft() -> None:
    with toy_client(toy_engine(k=0)) as draftless:
        body = {"prompt": "abc", "stream": True, "speculative": {"details": True}, **GREEDY}
        assert draftless.post("/v1/completions", json=body).status_code == 200


def test_the_tokenizer_of_each_model(client) -> None:
    assert client.get("/tokenizer_info", params={"model": "none such"}).status_code == 404


def test_loading_and_draining_are_503() -> None:
    settings = Settings(Serve())
    models = toy_models(settings, load=False)
    models.all[0].state = "loading"
    with toy_client(models=models) as client:
        assert client.get("/health").status_code == 503
        waiting = client.post("/v1/completions", json={"prompt": "abc"})
        assert (waiting.status_code, waiting.json()["error"]["code"]) == (503, "model_loading")
        assert waiting.headers["retry-after"]
        models.all[0].load()
        assert client.get("/health").status_code == 200
        models.is_draining = models.all[0].bridge.is_draining = True
        assert client.get("/health").json() == {"status": "draining"}
        assert client.post("/v1/completions", json={"prompt": "abc"}).status_code == 503


def test_a_model_that_does_not_load_says_why() -> None:
    models = toy_models(Settings(Serve()), load=False)
    models.all[0]._load = stand_in(lambda: 1 / 0)
    models.all[0].load()
    with toy_client(models=models) as client:
        assert client.get("/health").json() == {"status": "failed"}
        assert "division by zero" in client.post("/v1/completions", json={"prompt": "a"}).json()["error"]["message"]


def test_a_stuck_or_dead_engine_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    with toy_client() as client:
        bridge = client.models.all[0].bridge
        monkeypatch.setattr(Bridge, "busy_seconds", 1000.0)
        assert client.get("/health").json() == {"status": "stuck"}
        bridge.stop()
        assert client.get("/health").json() == {"status": "dead"}


def test_a_scored_prompt_reaches_the_answer(client) -> None:
    body = {"prompt": "abcab", "max_tokens": 0, "echo": True, "logprobs": 2}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["text"] == "abcab"
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert len(choice["logprobs"]["token_logprobs"]) == 5
    assert all(value < 0 for value in choice["logprobs"]["token_logprobs"][1:])


def test_a_scored_prompt_is_written_off_the_event_loop_in_a_stream_too(client, monkeypatch: pytest.MonkeyPatch) -> None:
    loops, prompt = [], CompletionLogprobs.prompt

    def watched(*given):
        loops.append(asyncio._get_running_loop())
        return prompt(*given)

    monkeypatch.setattr(CompletionLogprobs, "prompt", watched)
    body = {"prompt": "abcab", "max_tokens": 3, "echo": True, "logprobs": 2, "stream": True}
    answer = client.post("/v1/completions", json=body)
    assert answer.text.endswith("data: [DONE]\n\n")
    assert '"token_logprobs":[null,' in answer.text
    assert loops == [None]


def test_a_broken_draft_is_in_the_numbers() -> None:
    engine = toy_engine()
    engine.drafter.propose = stand_in(lambda rows: 1 / 0)
    with toy_client(engine) as client:
        assert client.post("/v1/completions", json={"prompt": "abc", **GREEDY}).json()["choices"][0]["text"]
        assert "specdec:draft_failures_total" in client.get("/metrics").text


def test_an_answer_that_takes_too_long_is_a_504() -> None:
    with toy_client(request_timeout_seconds=0.02) as client:
        late = client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 500, "ignore_eos": True})
        assert late.status_code in (200, 504)
        bridge = client.models.all[0].bridge
        while bridge.num_open:
            pass


def test_prompts_are_logged_only_if_asked(caplog: pytest.LogCaptureFixture) -> None:
    import logging

    for wanted in (False, True):
        with caplog.at_level(logging.INFO, "specdec_cli"), toy_client(log_prompts=wanted) as client:
            client.post("/v1/completions", json={"prompt": "deadbeef", "max_tokens": 1})
        assert any("deadbeef" in str(record.__dict__) for record in caplog.records) is wanted
        assert any(getattr(record, "completion_tokens", None) == 1 for record in caplog.records)


def test_several_models_are_loaded_when_asked_for() -> None:
    from specdec_cli.serve.models import Model, Models

    settings = Settings(Serve())
    models = Models([Model(name, lambda: served_engine(toy_engine()), settings.serve) for name in ("one", "two")])
    with toy_client(models=models) as client:
        assert client.get("/health").status_code == 200
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["one", "two"]
        assert client.post("/v1/completions", json={"prompt": "abc", "model": "two"}).status_code == 503
        assert models.all[1].settled.wait(20)
        assert client.post("/v1/completions", json={"prompt": "abc", "model": "two"}).json()["model"] == "two"
        assert models.all[0].state == "idle"

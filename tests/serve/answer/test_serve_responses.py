"""`POST /v1/responses`: items in, items or typed events out, over the chat path."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from requests_for_tests import TOOL_TEMPLATE, compiled, facts
from test_serve_reasoning import PLAIN, deltas
from toy_server import toy_client
from typed import not_none

from specdec_cli.events import TokenLogprob
from specdec_cli.recipe.schema import Serve
from specdec_cli.serve.answer.responses import ResponseAnswer
from specdec_cli.serve.errors import ApiError
from specdec_cli.serve.request.prepare import ModelInfo, Prepared
from specdec_cli.serve.request.read import parse
from specdec_cli.serve.request.responses_protocol import ResponsesRequest
from specdec_cli.serve.request.responses_request import prepare_response

WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
GREEDY = {"model": "toy", "temperature": 0, "max_output_tokens": 20}
ITEMS = [
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Looking.", "annotations": [], "logprobs": []}],
    },
    {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "sun"},
]  # fmt: skip
READS_ALL = (
    "{% for m in messages %}[{{ m.role }}|{{ m.reasoning_content }}|{{ m.content }}|{{ m.tool_calls }}]{% endfor %}"
)


def prepared(over: ModelInfo | None = None, **fields: Any) -> tuple[ResponsesRequest, Prepared, list[str]]:
    known = over or facts()
    body = {"input": "hello there", **fields}
    request, ignored = parse(ResponsesRequest, json.dumps(body).encode(), known.serve)
    return request, compiled(prepare_response(request, known, "r1"), known), ignored


def answered(
    text: str, over: ModelInfo, reason: str = "stop", **fields: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole response, and the events of the same text streamed."""
    _, jobs, _ = prepared(over, **fields)
    whole = ResponseAnswer(jobs)
    for delta in deltas(text, reason=reason):
        whole.observe(0, delta)
    _, jobs, _ = prepared(over, **fields, stream=True)
    stream = ResponseAnswer(jobs)
    events = stream.opening()
    for delta in deltas(text, seed=1, reason=reason):
        events += stream.chunks(0, delta)
    return whole.document(), events + stream.closing()


def read_events(text: str) -> list[dict[str, Any]]:
    found = []
    for block in filter(None, text.split("\n\n")):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def joined(events: list[dict[str, Any]], kind: str) -> str:
    return "".join(event["delta"] for event in events if event["type"] == f"response.{kind}.delta")


def without_times(response: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in response.items() if key not in ("id", "created_at", "completed_at")}


def stable(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


def test_a_response_is_the_chats_answer_whole_and_streamed() -> None:
    with toy_client() as client:
        chat = client.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "abc"}], "temperature": 0, "max_tokens": 20},
        ).json()
        whole = client.post("/v1/responses", json=GREEDY | {"input": "abc"}).json()
        streamed = client.post("/v1/responses", json=GREEDY | {"input": "abc", "stream": True})
        counted = client.get("/metrics").text
    (message,) = whole["output"]
    assert message["content"][0]["text"] == chat["choices"][0]["message"]["content"] != ""
    assert whole["status"] == ("incomplete" if chat["choices"][0]["finish_reason"] == "length" else "completed")
    usage = whole["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (
        chat["usage"]["prompt_tokens"],
        chat["usage"]["completion_tokens"],
    )
    details = chat["usage"]["completion_tokens_details"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0, **details}
    assert whole["metrics"] == chat["metrics"]
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = read_events(streamed.text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert joined(events, "output_text") == message["content"][0]["text"]
    last = events[-1]["response"]
    assert stable(last["output"]) == stable(whole["output"])
    assert last["usage"]["output_tokens"] == usage["output_tokens"]
    assert last["metrics"] == chat["metrics"]
    ended = sum(
        float(line.split()[-1]) for line in counted.split("\n") if line.startswith("specdec:request_success_total")
    )
    assert ended == 3


def test_events_come_in_openais_order() -> None:
    _, events = answered("Hello.", facts())
    names = [event["type"].removeprefix("response.") for event in events]
    assert [name for i, name in enumerate(names) if name != names[i - 1]] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    added = next(event for event in events if event["type"] == "response.content_part.added")
    assert added["part"]["text"] == "", "an event shows what was there when it was sent"


def test_thinking_and_a_call_are_items_of_their_own() -> None:
    known = facts(TOOL_TEMPLATE, serve=Serve(tool_call_parser="hermes", reasoning_parser="qwen3"))
    whole, events = answered(f"<think>sun?</think>I look.{CALL}", known, tools=[WEATHER])
    thought, message, call = whole["output"]
    assert (thought["type"], thought["content"], thought["summary"]) == (
        "reasoning", [{"type": "reasoning_text", "text": "sun?"}], [],
    )  # fmt: skip
    assert message["content"][0]["text"] == "I look."
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "weather", {"city": "Rome"})
    assert stable(events[-1]["response"]["output"]) == stable(whole["output"])
    assert joined(events, "reasoning_text") == "sun?"
    assert joined(events, "function_call_arguments") == call["arguments"]
    done = next(event for event in events if event["type"] == "response.function_call_arguments.done")
    assert (done["name"], done["arguments"], done["output_index"]) == ("weather", call["arguments"], 2)
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


def test_a_cut_answer_is_incomplete() -> None:
    whole, events = answered("Once upon", facts(), reason="length")
    for response in (whole, events[-1]["response"]):
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["output"][-1]["status"] == "incomplete"
    assert events[-1]["type"] == "response.incomplete"


def test_an_answer_without_text_is_one_empty_message() -> None:
    whole, events = answered("", facts())
    assert [item["content"][0]["text"] for item in whole["output"]] == [""]
    assert stable(events[-1]["response"]["output"]) == stable(whole["output"])


def test_earlier_items_become_one_turn_of_the_assistant() -> None:
    known = facts(READS_ALL)
    _, jobs, ignored = prepared(known, input=[{"role": "user", "content": "Rome?"}, *ITEMS], instructions="be brief")
    text = not_none(known.tokenizer).decode(jobs.jobs[0].token_ids, False)
    assert text.startswith("[system||be brief|][user||Rome?|][assistant|hm|Looking.|[{")
    assert text.endswith("[tool||sun|]")
    assert "'weather'" in text
    assert ignored == []


@pytest.mark.parametrize(("fields", "param"), [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": {"id": "c"}}, "conversation"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "message", "content": "x"}]}, "input[0].role"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"instructions": "a", "input": [{"role": "user", "content": [{"type": "file"}]}]}, "input[0].content[0].type"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"n": 2}, "n"),
    ({"input": "word " * 600}, "input"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [WEATHER]}, "tools"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"stream": True, "speculative": {"details": True}}, "speculative.details"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"input": [{"role": "user", "content": "x"}, ITEMS[0], ITEMS[3]]}, "input[1].reasoning_content"),
    ({"input": [{"role": "user", "content": "x"}, ITEMS[1], ITEMS[2], ITEMS[3]]}, "input[2]"),
    ({"max_completion_tokens": 2}, "max_completion_tokens"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"logprobs": True}, "logprobs"),
    ({"continue_final_message": True}, "continue_final_message"),
])  # fmt: skip
def test_what_is_not_possible_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        prepared(facts(PLAIN), **fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert "messages" not in caught.value.message


def test_a_chats_messages_do_not_replace_the_input() -> None:
    with pytest.raises(ApiError, match="use `input`"):
        prepared(messages=[{"role": "user", "content": "other"}])
    _, jobs, ignored = prepared(messages=[])
    assert (jobs.jobs[0].token_ids, ignored) == (prepared()[1].jobs[0].token_ids, ["messages"])


def test_a_named_tool_is_named_as_it_was_sent() -> None:
    with pytest.raises(ApiError) as caught:
        prepared(facts(TOOL_TEMPLATE), tools=[WEATHER], tool_choice={"type": "function", "name": "other"})
    assert caught.value.param == "tool_choice.name"


def test_unknown_fields_are_listed_and_known_ones_kept() -> None:
    _, jobs, ignored = prepared(
        colour="red", top_k=3, seed=5, metadata={"a": "b"}, store=True, include=["reasoning.encrypted_content"],
        speculative={"num_speculative_tokens": 1}, max_output_tokens=7, temperature=0.5,
    )  # fmt: skip
    assert ignored == ["colour", "include[0]"]
    job = jobs.jobs[0]
    assert (job.params.top_k, job.params.seed, job.params.max_new_tokens) == (3, 5, 7)
    assert job.num_speculative_tokens == 1
    answer = ResponseAnswer(jobs).opening()[0]["response"]
    assert (answer["metadata"], answer["store"], answer["temperature"]) == ({"a": "b"}, False, 0.5)


def test_without_max_output_tokens_it_runs_to_the_contexts_end() -> None:
    _, jobs, _ = prepared()
    job = jobs.jobs[0]
    assert job.params.max_new_tokens == 512 - len(job.token_ids)


def test_logprobs_stand_with_the_text() -> None:
    body = GREEDY | {"input": "abc", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    with toy_client() as client:
        whole = client.post("/v1/responses", json=body).json()
        events = read_events(client.post("/v1/responses", json=body | {"stream": True}).text)
    (part,) = whole["output"][0]["content"]
    assert len(part["logprobs"]) == whole["usage"]["output_tokens"]
    assert len(part["logprobs"][0]["top_logprobs"]) == 2
    told = [one for event in events if event["type"] == "response.output_text.delta" for one in event["logprobs"]]
    assert len(told) == len(part["logprobs"])


def scored(tokens: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(token, -1.0, ()) for token in tokens)


@pytest.mark.parametrize("text", ["abc", "日本語 é", "a" + CALL, CALL, "<think>hé</think>日本"])
def test_logprobs_do_not_depend_on_steps(text: str) -> None:
    known = facts(TOOL_TEMPLATE, serve=Serve(reasoning_parser="qwen3")) if "think" in text else facts(TOOL_TEMPLATE)
    fields = {"tools": [WEATHER], "include": ["message.output_text.logprobs"]}
    given = [
        replace(delta, steps=tuple(replace(step, logprobs=scored(step.tokens)) for step in delta.steps))
        for delta in deltas(text, seed=2)
    ]
    _, jobs, _ = prepared(known, **fields)
    whole = ResponseAnswer(jobs)
    for delta in given:
        whole.observe(0, delta)
    stream = ResponseAnswer(jobs)
    events = [event for delta in given for event in stream.chunks(0, delta)]
    output = stable(whole.document()["output"])
    assert stable(stream.closing()[0]["response"]["output"]) == output
    told = [one for event in events if event["type"] == "response.output_text.delta" for one in event["logprobs"]]
    parts = [one for item in output if item["type"] == "message" for one in item["content"][0]["logprobs"]]
    said = "".join(item["content"][0]["text"] for item in output if item["type"] == "message")
    assert told == parts
    told_bytes = b"".join(bytes(one["bytes"]) for one in parts)
    assert told_bytes.removeprefix(b"</think>") == said.encode()


def test_an_error_in_the_middle_is_a_failed_response() -> None:
    _, jobs, _ = prepared(stream=True)
    answer = ResponseAnswer(jobs)
    answer.opening()
    (failed,) = read_events(answer.failure(ApiError(500, "the server failed")).decode())
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"]["code"] == "server_error"
    assert answer.end == b""


def test_a_key_and_a_full_queue_guard_it_too() -> None:
    with toy_client(keys=("k",)) as client:
        assert client.post("/v1/responses", json={"input": "a"}).status_code == 401
        head = {"authorization": "Bearer k"}
        assert client.post("/v1/responses", json=GREEDY | {"input": "a"}, headers=head).status_code == 200
        document = client.get("/openapi.json", headers=head).json()
    assert "ResponsesRequest" in json.dumps(document["paths"]["/v1/responses"])

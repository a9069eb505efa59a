"""Hostile and odd requests: each a 400 that names its field; strangers are listed; neutral fields pass."""

import json
import subprocess
import sys
from typing import Any

import pytest
from requests_for_tests import TOOL, TOOL_TEMPLATE, USER, chat, completion, facts

from specdec_cli.recipe.schema import Serve
from specdec_cli.serve.errors import ApiError
from specdec_cli.serve.protocol import Body, ChatCompletionRequest, CompletionRequest, FunctionTool, TokenizeRequest
from specdec_cli.serve.request.read import parse
from specdec_cli.serve.request.responses_protocol import ResponsesRequest

WITH_TOOLS = facts(TOOL_TEMPLATE)

RAW = [
    (b"", None, "not valid JSON"),
    (b"[]", None, "must be a JSON object"),
    (b"nope", None, "not valid JSON"),
    (b'{"prompt":"\xff\xfe"}', None, "not valid UTF-8"),
    (b'{"prompt":"a","temperature":NaN}', "temperature", "JSON does not allow"),
    (b'{"prompt":NaN}', "prompt", "`prompt` holds `NaN`, which JSON does not allow"),
    (b'{"prompt":"a","temperature":-Infinity}', "temperature", "JSON does not allow"),
    (b'{"prompt":"a","top_p":1e999}', "top_p", "finite"),
    (b'{"prompt":"a","seed":' + b"9" * 5000 + b"}", "seed", "digits"),
    (b'{"prompt":"a","logit_bias":{"3":Infinity}}', "logit_bias.3", "JSON does not allow"),
    (b'{"prompt":"a","stranger":[NaN]}', "stranger[0]", "JSON does not allow"),
    (b'{"prompt":"a","prompt":"b"}', "prompt", "twice"),
    (b'{"prompt":"\\ud800"}', "prompt", "surrogate"),
    (b'{"prompt":"a","metadata":' + b"[" * 40_000 + b"]" * 40_000 + b"}", "metadata", "nested"),
    (b'{"prompt":"a","x":' + b'{"a":' * 9_000 + b"1" + b"}" * 9_000 + b"}", "x", "nested"),
    (b'{"prompt":"' + b"a" * 100_000 + b'"}', None, "bytes"),
    (b"{}", "prompt", "is missing"),
]

COMPLETIONS = [
    ({"prompt": 3}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": [1, -2]}, "prompt[1]"),
    ({"prompt": [1, True]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [10**6]}, "prompt[0]"),
    ({"prompt": [[1], [2, 10**6]]}, "prompt[1][1]"),
    ({"prompt": ["a"] * 1000}, "prompt"),
    ({"prompt": [5] * 512}, "prompt"),
    ({"model": "gpt-9"}, "model"),
    ({"model": 7}, "model"),
    ({"n": 0}, "n"),
    ({"n": 10**9}, "n"),
    ({"n": "1"}, "n"),
    ({"n": True}, "n"),
    ({"n": 1.5}, "n"),
    ({"best_of": 3}, "best_of"),
    ({"logprobs": 10**6}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 10**9}, "max_tokens"),
    ({"max_tokens": "16"}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ({"min_tokens": 10**12}, "min_tokens"),
    ({"min_tokens": 600}, "min_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 10**29}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**40}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": "1"}, "frequency_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    ({"logit_bias": {"²": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": 1}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a"] * 100}, "stop"),
    ({"stop": "a" * 5000}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [1] * 100}, "stop_token_ids"),
    ({"stream": 1}, "stream"),
    ({"stream": "true"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"suffix": "tail"}, "suffix"),
    ({"echo": "yes"}, "echo"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"length_penalty": 2}, "length_penalty"),
    ({"allowed_token_ids": [1]}, "allowed_token_ids"),
    ({"bad_words": ["x"]}, "bad_words"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"speculative": True}, "speculative"),
    ({"speculative": {"num_speculative_tokens": -1}}, "speculative.num_speculative_tokens"),
    ({"speculative": {"num_speculative_tokens": 10**6}}, "speculative.num_speculative_tokens"),
    ({"speculative": {"draft": "gpt2"}}, "speculative.draft"),
    ({"speculative.n_max": 1000}, "speculative.n_max"),
    ({"speculative.n_max": 1, "speculative": {"num_speculative_tokens": 2}}, "speculative.n_max"),
    ({"speculative.n_min": 2}, "speculative.n_min"),
    ({"speculative.p_min": 0.5}, "speculative.p_min"),
    ({"prediction": {"type": "text", "content": "x"}}, "prediction.type"),
    ({"prediction": {"type": "content", "content": "x"}, "speculative": {"draft": "ngram"}}, "prediction"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"response_format": "json"}, "response_format"),
    ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"guided_choice": "a"}, "guided_choice"),
]

CHATS = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [*USER, {"role": "user", "content": [{"type": "image_url"}]}]}, "messages[1].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": ""}] * 300}, "messages"),
    ({"messages": [{"role": "user", "content": "word " * 600}]}, "messages"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 10**6}, "max_completion_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 1000}, "top_logprobs"),
    ({"tools": [TOOL]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"modalities": ["text", "audio"]}, "modalities[1]"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"verbosity": "high"}, "verbosity"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"chat_template": "x"}, "chat_template"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
    ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "messages"),
    ({"add_special_tokens": True}, "add_special_tokens"),
    ({"prompt": 3, "messages": None}, "messages"),
]

TOOLS = [
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    ({"tools": [{"type": "code"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [TOOL] * 1000}, "tools"),
    ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice.function.name"),
    ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
]


def refused(run) -> ApiError:
    with pytest.raises(ApiError) as caught:
        run()
    return caught.value


@pytest.mark.parametrize(("body", "param", "words"), RAW, ids=range(len(RAW)))
def test_a_hostile_body(body: bytes, param: str | None, words: str) -> None:
    error = refused(lambda: completion(body))
    assert error.status in (400, 413)
    assert error.param == param
    assert words in error.message
    assert len(error.message) < 400


@pytest.mark.parametrize(("fields", "param"), COMPLETIONS, ids=lambda value: str(value)[:50])
def test_a_wrong_completion(fields: dict[str, Any], param: str) -> None:
    error = refused(lambda: completion(**fields))
    assert (error.status, error.param) == (404 if fields.get("model") == "gpt-9" else 400, param)
    assert param.split(".")[-1].split("[")[0] in error.message or error.status == 404
    assert len(error.message) < 400


@pytest.mark.parametrize(("fields", "param"), CHATS, ids=lambda value: str(value)[:50])
def test_a_wrong_chat(fields: dict[str, Any], param: str) -> None:
    error = refused(lambda: chat(**fields))
    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize(("fields", "param"), TOOLS, ids=lambda value: str(value)[:50])
def test_wrong_tools(fields: dict[str, Any], param: str) -> None:
    error = refused(lambda: chat(over=WITH_TOOLS, **fields))
    assert (error.status, error.param) == (400, param)


MANY_PARTS = [{"type": "text", "text": "x"}] * 20_000
MANY = [
    (ChatCompletionRequest, {"messages": [USER] * 100_000}, "messages", "has `100000` turns, and at most 4096"),
    (ChatCompletionRequest, {"messages": [{"role": "user", "content": MANY_PARTS}]}, "messages[0].content", "20000"),
    (ChatCompletionRequest, {"messages": [{"role": "user", "content": MANY_PARTS[:300]}] * 60},
     "messages[54].content", "at most 16384 in all"),
    (ChatCompletionRequest, {"messages": [USER], "tools": [TOOL] * 9000}, "tools", "at most 128 are taken"),
    (ChatCompletionRequest, {"messages": [USER], "prediction": {"type": "content", "content": MANY_PARTS}},
     "prediction.content", "20000"),
    (TokenizeRequest, {"messages": [USER] * 5000}, "messages", "at most 4096"),
    (ResponsesRequest, {"input": [USER] * 80_000}, "input", "has `80000` turns, and at most 4096"),
    (CompletionRequest, {"prompt": "a", "stop": ["a"] * 100_000}, "stop", "has `100000` strings, and at most 16"),
    (CompletionRequest, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(3000)), 1)}, "logit_bias", "1024"),
    (CompletionRequest, {"prompt": [[1]] * 300_000}, "prompt", "has `300000` prompts, and at most 64"),
]  # fmt: skip


@pytest.mark.in_turn(1, every=3)
@pytest.mark.parametrize(("kind", "fields", "param", "words"), MANY, ids=lambda value: str(value)[:50])
def test_a_long_list_is_refused_before_its_items_are_read(
    kind: type[Body], fields: dict[str, Any], param: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec_cli.serve.request.read._check_values", lambda *_: pytest.fail("every value was read"))
    with pytest.raises(ApiError) as refused:
        parse(kind, json.dumps(fields).encode(), Serve(max_body_bytes=2**24))
    assert refused.value.param == param
    assert words in str(refused.value)
    assert len(str(refused.value)) < 200


def test_many_ids_are_refused_before_they_are_checked() -> None:
    with pytest.raises(ApiError, match="has `1000` tokens, and the model's context is 512"):
        completion(prompt=[10**6] * 1000)


NOT_OBJECTS = [
    {"type": "string"}, {"type": ["string", "null"]}, {"type": "array", "items": {}}, {"type": 5}, {"const": 1},
    {"enum": ["a"]}, {"anyOf": [{"type": "string"}, {"type": "null"}]}, {"allOf": [{"type": "integer"}, {}]},
]  # fmt: skip


@pytest.mark.parametrize("choice", ["none", "auto", "required"])
@pytest.mark.parametrize("schema", NOT_OBJECTS, ids=str)
def test_a_tools_parameters_are_of_an_object(schema: dict[str, Any], choice: str) -> None:
    tools = [TOOL, {"type": "function", "function": {"name": "f", "parameters": schema}}]
    with pytest.raises(ApiError, match="object") as refused:
        chat(over=WITH_TOOLS, tools=tools, tool_choice=choice)
    assert refused.value.param == "tools[1].function.parameters"


@pytest.mark.parametrize("schema", [
    {"type": ["object", "null"]}, {"anyOf": [{"type": "object"}, {"type": "null"}]}, {"$ref": "#/$defs/a"}, {},
], ids=str)  # fmt: skip
def test_a_schema_with_room_for_an_object_is_taken(schema: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert chat(over=WITH_TOOLS, tools=tools, tool_choice="none").jobs
    assert FunctionTool(name="f", parameters={"type": ["object", "null"]}).arguments_schema["type"] == "object"


def test_a_list_that_is_too_short_is_named_once() -> None:
    assert refused(lambda: chat(messages=[])).message == "`messages` must have at least 1 item, not `[]`"


def test_the_error_has_openais_shape() -> None:
    body = refused(lambda: completion(n=0)).body()
    assert body == {
        "error": {
            "message": "`n` must be greater than or equal to 1, not `0`",
            "type": "invalid_request_error",
            "param": "n",
            "code": None,
        }
    }


def test_an_unknown_model_has_its_code() -> None:
    error = refused(lambda: completion(model="gpt-9"))
    assert (error.status, error.code, error.type) == (404, "model_not_found", "not_found_error")


def test_strangers_are_listed_wherever_they_stand() -> None:
    body = {"messages": [{**USER[0], "mood": 1}], "zeal": 1, "speculative": {"k": 3}, "cache_prompt": True}
    _, ignored = parse(ChatCompletionRequest, json.dumps(body).encode(), Serve())
    assert ignored == ["cache_prompt", "messages[0].mood", "speculative.k", "zeal"]


def test_fields_at_their_neutral_values_pass() -> None:
    neutral: dict[str, Any] = {
        "user": "u",
        "metadata": {"a": [1]},
        "store": True,
        "service_tier": "flex",
        "use_beam_search": False,
        "length_penalty": 1,
        "bad_words": [],
        "early_stopping": False,
        "response_format": {"type": "text"},
        "top_k": -1,
        "speculative.n_min": 0,
        "speculative.p_min": 0.0,
    }
    assert completion(**neutral, best_of=1, suffix="").jobs
    assert chat(**neutral, verbosity="medium", modalities=["text"], functions=[], tool_choice="none", tools=[]).jobs


def test_null_is_absent_everywhere() -> None:
    for kind in (CompletionRequest, ChatCompletionRequest, TokenizeRequest):
        fields = {field.alias or name: None for name, field in kind.model_fields.items() if not field.is_required()}
        required = {"prompt": "a"} if kind is CompletionRequest else {"messages": USER}
        body = json.dumps(fields | required).encode()
        assert parse(kind, body, Serve())[1] == []


def test_brackets_inside_strings_are_no_depth() -> None:
    body = json.dumps({"prompt": '\\"[{' * 500}).encode()
    assert parse(CompletionRequest, body, Serve())[0].prompt == '\\"[{' * 500


PLANTED = """
from pydantic import Field, ValidationError
from specdec_cli.recipe import schema

class Sampling(schema.Sampling):
    planted_penalty: float = Field(0.0, ge=0, le=3, description="Subtract a planted number.")

schema.Sampling = Sampling
schema.Recipe.model_fields["sampling"].annotation = Sampling
from specdec_cli.serve.protocol import SAMPLING_FIELDS, ChatCompletionRequest, CompletionRequest
assert "planted_penalty" in SAMPLING_FIELDS
assert CompletionRequest(prompt="a", planted_penalty=2.0).planted_penalty == 2.0
try:
    CompletionRequest(prompt="a", planted_penalty=4.0)
except ValidationError as error:
    assert "less than or equal to 3" in str(error)
else:
    raise AssertionError("out of range")
described = ChatCompletionRequest.model_json_schema()["properties"]["planted_penalty"]
assert described["description"] == "Subtract a planted number."
"""


def test_a_new_sampling_field_of_recipes_is_a_field_of_requests() -> None:
    subprocess.run([sys.executable, "-c", PLANTED], check=True, timeout=120)

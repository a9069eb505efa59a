"""Requests become jobs: prompts, seeds, lengths, speculation, templates, tools, structured outputs."""

import json
from typing import Any

import pytest
from requests_for_tests import TOOL, TOOL_TEMPLATE, USER, chat, completion, facts, tokenizer
from typed import not_none

from specdec_cli.sampling.params import SamplingParams
from specdec_cli.serve.constraint import force_tools
from specdec_cli.serve.errors import ApiError
from specdec_cli.serve.protocol import CompletionRequest, DetokenizeRequest, TokenizeRequest, Tool
from specdec_cli.serve.request.parameters import Defaults
from specdec_cli.serve.request.prepare import prepare_completion
from specdec_cli.serve.request.read import parse
from specdec_cli.serve.request.tokens import detokenize, tokenize, tokenizer_info


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("ab", ["ab"]), (["ab", "c"], ["ab", "c"]), ([5, 6], [[5, 6]]), ([[5], [6, 7]], [[5], [6, 7]])],
)
def test_every_form_of_prompt(prompt, expected) -> None:
    encode = tokenizer().encode
    jobs = completion(prompt=prompt).jobs
    assert [list(job.token_ids) for job in jobs] == [encode(p) if isinstance(p, str) else p for p in expected]


def test_choices_are_prompt_by_prompt_and_index_the_noise() -> None:
    prepared = completion(prompt=["a", "b"], n=2, seed=7)
    assert [job.params.index for job in prepared.jobs] == [0, 1, 2, 3]
    assert prepared.jobs[0].token_ids == prepared.jobs[1].token_ids != prepared.jobs[2].token_ids
    assert {job.params.seed for job in prepared.jobs} == {7}


def test_a_seed_is_drawn_for_each_request_unless_given() -> None:
    assert completion().jobs[0].params.seed != completion().jobs[0].params.seed
    assert completion(seed=2**63 - 1).jobs[0].params.seed == 2**63 - 1


def test_lengths_by_default_and_by_wish() -> None:
    assert completion().jobs[0].params.max_new_tokens == 16
    prepared = chat()
    assert prepared.jobs[0].params.max_new_tokens == 512 - len(prepared.jobs[0].token_ids)
    assert chat(max_completion_tokens=9).jobs[0].params.max_new_tokens == 9
    assert completion(prompt=[5] * 510).jobs[0].params.max_new_tokens == 2
    assert completion(prompt=[5] * 600, truncate_prompt_tokens=4, max_tokens=1).jobs[0].token_ids == (5,) * 4


def test_sampling_fields_arrive() -> None:
    given: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}
    params = completion(**given, stop="x", logit_bias={"5": -100}, min_tokens=2, ignore_eos=True).jobs[0].params
    assert {name: getattr(params, name) for name in given} == given
    assert (params.stop, params.logit_bias, params.min_tokens, params.ignore_eos) == (("x",), {5: -100}, 2, True)
    assert completion().jobs[0].params.temperature == 1.0
    assert completion(top_k=-1).jobs[0].params.top_k is completion(top_k=0).jobs[0].params.top_k is None


def test_a_prompt_is_scored_for_echo_with_logprobs() -> None:
    job = completion(echo=True, max_tokens=0, logprobs=1).jobs[0]
    assert (job.prompt_logprobs, job.decodes) == (1, False)
    job = completion(echo=True, max_tokens=1, logprobs=1).jobs[0]
    assert (job.prompt_logprobs, job.decodes, job.params.logprobs) == (1, True, 1)
    assert completion(logprobs=1).jobs[0].prompt_logprobs is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (None, None, None)),
        ({"speculative": {"enabled": False, "num_speculative_tokens": 0}}, (0, None, None)),
        ({"speculative": {"num_speculative_tokens": 5, "draft": "ngram"}}, (5, "ngram", None)),
        ({"speculative.n_max": 2}, (2, None, None)),
        ({"prediction": {"type": "content", "content": ""}}, (None, None, None)),
    ],
)
def test_speculation_is_the_requests_own(fields: dict[str, Any], expected: tuple[Any, ...]) -> None:
    job = completion(**fields).jobs[0]
    assert (job.num_speculative_tokens, job.draft, job.prediction) == expected


def test_a_turn_is_the_api_key_or_else_the_request() -> None:
    assert {job.turn for job in completion(n=3).jobs} == {"r1"}
    request, _ = parse(CompletionRequest, b'{"prompt": "hello", "n": 2, "cache_salt": "own"}', facts().serve)
    assert {job.turn for job in prepare_completion(request, facts(), "r2", "key").jobs} == {"key"}


def test_a_prediction_far_beyond_the_context_is_refused() -> None:
    with pytest.raises(ApiError, match="`prediction` has more than `512` tokens") as caught:
        chat(prediction={"type": "content", "content": "ab c" * 20_000})
    assert caught.value.code == "context_length_exceeded"


def test_a_prompt_to_truncate_may_be_longer_than_the_context() -> None:
    whole = tokenizer().encode("ab c" * 2000)
    assert len(whole) > 512
    jobs = completion(prompt="ab c" * 2000, truncate_prompt_tokens=7, max_tokens=1).jobs
    assert list(jobs[0].token_ids) == whole[-7:]


def test_a_prediction_is_tokens_without_special_ones() -> None:
    parts = [{"type": "text", "text": "hello"}]
    job = chat(prediction={"type": "content", "content": parts}).jobs[0]
    assert list(not_none(job.prediction)) == tokenizer().encode("hello", add_special_tokens=False)


def test_text_parts_developer_and_calls_reach_the_template() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    given = facts(TOOL_TEMPLATE)
    job = chat(over=given, messages=messages, tools=[TOOL], chat_template_kwargs={"enable_thinking": True}).jobs[0]
    text = not_none(given.tokenizer).decode(job.token_ids, skip_special_tokens=False)
    assert "<|system|>a\nb" in text.replace("<|system|> ", "<|system|>")
    assert "Rome" in text
    assert '"weather"' in text
    assert "think" in text


def test_tools_are_read_by_the_templates_format() -> None:
    given = facts(TOOL_TEMPLATE)
    prepared = chat(over=given, tools=[TOOL], parallel_tool_calls=False)
    assert (not_none(prepared.plan.tools).form, not_none(prepared.plan.tools).only_one) == ("hermes", True)
    assert prepared.jobs[0].params.skip_special_tokens is False
    assert chat(over=given, tools=[TOOL], tool_choice="none").plan.tools is None


def test_forced_tools_are_a_schema() -> None:
    other = {"type": "function", "function": {"name": "g", "parameters": {"$ref": "#/$defs/x", "$defs": {"x": {}}}}}
    tools = [Tool.model_validate(TOOL), Tool.model_validate(other)]
    schema = json.loads(force_tools(tools, None, only_one=True).source)
    assert schema["$defs"] == {"x": {}}
    assert schema["maxItems"] == 1
    assert [one["properties"]["name"] for one in schema["items"]["anyOf"]] == [{"const": "weather"}, {"const": "g"}]
    closed = {"type": "object", "properties": {}, "additionalProperties": False}
    assert json.loads(force_tools(tools, "weather", only_one=False).source) == closed


def test_structured_outputs_become_grammars() -> None:
    pytest.importorskip("llguidance", reason="needs the extra `structured`")
    assert completion(structured_outputs={"choice": ["yes", "no"]}).jobs[0].grammar is not None
    assert chat(response_format={"type": "json_object"}).jobs[0].grammar is not None
    forced = chat(over=facts(TOOL_TEMPLATE), tools=[TOOL], tool_choice="required")
    assert forced.jobs[0].grammar is not None
    assert not_none(forced.plan.tools).form == "required"


def test_the_keys_salt_and_the_requests_are_joined() -> None:
    assert completion(cache_salt="x").jobs[0].cache_salt == "/x"


def test_tokens_there_and_back() -> None:
    given = facts()
    answer = tokenize(TokenizeRequest(prompt="hello there", return_token_strs=True), given)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    ids = tokenizer().encode("hello there", add_special_tokens=False)
    assert detokenize(DetokenizeRequest(tokens=ids), given) == {"prompt": "hello there"}
    chatted = tokenize(TokenizeRequest.model_validate({"messages": USER}), given)
    assert tuple(chatted["tokens"]) == chat().jobs[0].token_ids
    info = tokenizer_info(given)
    assert info["vocab_size"] == given.num_tokens
    assert [info[f"{name}_token"] for name in ("bos", "eos", "pad", "unk")] == ["<s>", "</s>", None, "<unk>"]


def test_what_somebody_set_for_the_server_holds_where_a_request_is_silent() -> None:
    values: dict[str, Any] = {
        "stop": ("x",),
        "stop_token_ids": (7,),
        "logit_bias": {5: -1.0},
        "min_tokens": 2,
        "seed": 11,
    }
    named = Defaults(SamplingParams(max_new_tokens=9, **values), frozenset({*values, "max_new_tokens"}))
    over = facts(sampling=named)
    for prepared in (completion(over=over), chat(over=over)):
        params = prepared.jobs[0].params
        assert {name: getattr(params, name) for name in values} == values
        assert params.max_new_tokens == 9
    params = (
        completion(over=over, stop=[], logit_bias={}, stop_token_ids=[], min_tokens=0, seed=3, max_tokens=4)
        .jobs[0]
        .params
    )
    assert (params.stop, params.stop_token_ids, params.logit_bias, params.min_tokens) == ((), (), {}, 0)
    assert (params.seed, params.max_new_tokens) == (3, 4)


DRAFTLESS: dict[str, Any] = {"drafters": ("none", "ngram", "prediction")}
PREDICTION = {"type": "content", "content": "hello"}


@pytest.mark.parametrize(
    ("server", "fields", "field"),
    [
        (DRAFTLESS, {"speculative": {"enabled": True}}, "speculative.enabled"),
        (DRAFTLESS, {"speculative": {"num_speculative_tokens": 3}}, "speculative.num_speculative_tokens"),
        (DRAFTLESS, {"speculative.n_max": 3}, "speculative.n_max"),
        ({"num_speculative_tokens": 0}, {"speculative": {"draft": "ngram"}}, "speculative.draft"),
        ({"num_speculative_tokens": 0}, {"speculative": {"enabled": True}}, "speculative.enabled"),
        ({"num_speculative_tokens": 0}, {"prediction": PREDICTION}, "prediction"),
        ({}, {"speculative": {"draft": "prediction"}}, "speculative.draft"),
        ({}, {"speculative": {"enabled": True, "num_speculative_tokens": 0}}, "speculative.enabled"),
        ({}, {"speculative": {"enabled": False, "num_speculative_tokens": 5}}, "speculative.enabled"),
        ({}, {"speculative": {"details": True}}, "speculative.details"),
    ],
)
def test_speculation_that_would_not_take_place_is_refused(
    server: dict[str, Any], fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(ApiError) as refused:
        chat(over=facts(**server), **fields)
    assert (refused.value.status, refused.value.param) == (400, field)


def test_a_server_that_reads_a_text_of_its_own_drafts_for_requests_without_one() -> None:
    server = facts(drafters=("prediction", "none", "ngram"))
    assert completion(over=server).jobs[0].draft is None
    assert completion(over=server, speculative={"draft": "prediction"}).jobs[0].draft == "prediction"


def test_a_prediction_is_no_longer_than_a_context() -> None:
    given: dict[str, Any] = {"type": "content", "content": "hello " * 600}
    with pytest.raises(ApiError) as refused:
        completion(prediction=given)
    assert (refused.value.status, refused.value.param) == (400, "prediction")


def test_where_the_server_verifies_greedily_a_request_does_not_sample() -> None:
    server = facts(sampling=Defaults(SamplingParams(), is_greedy=True))
    assert completion(over=server).jobs[0].params.temperature == 0
    with pytest.raises(ApiError) as refused:
        completion(over=server, temperature=0.7)
    assert (refused.value.status, refused.value.param) == (400, "temperature")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tool_calls", [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]),
        ("reasoning_content", "because"),
        ("reasoning", "because"),
    ],
)
def test_what_of_a_turn_the_template_does_not_read_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ApiError) as refused:
        chat(messages=[*USER, {"role": "assistant", "content": "a", field: value}, *USER])
    assert (refused.value.status, refused.value.param) == (400, f"messages[1].{field}")


def test_another_draft_stands_in_where_the_server_has_none() -> None:
    job = completion(over=facts(**DRAFTLESS), speculative={"enabled": True, "draft": "ngram"}).jobs[0]
    assert (job.num_speculative_tokens, job.draft) == (None, "ngram")
    assert completion(over=facts(**DRAFTLESS)).jobs[0].num_speculative_tokens == 0


@pytest.mark.parametrize(
    ("source", "fields", "param"),
    [
        (
            "{{ enable_thinking }}",
            {"chat_template_kwargs": {"enable_thinkin": True}},
            "chat_template_kwargs.enable_thinkin",
        ),
        (
            "enable_thinking {{ m.enable_thinking }}",
            {"chat_template_kwargs": {"enable_thinking": True}},
            "chat_template_kwargs.enable_thinking",
        ),
        (
            "{{ raise_exception }}",
            {"chat_template_kwargs": {"raise_exception": 1}},
            "chat_template_kwargs.raise_exception",
        ),
        ("{# reasoning_effort #}", {"reasoning_effort": "low"}, "reasoning_effort"),
        ("{% set tools = 1 %}{{ tools }}", {"tools": [TOOL]}, "tools"),
        (
            "tool_calls",
            {"messages": [*USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]},
            "messages[1].tool_calls",
        ),
        ("reasoning_content", {"messages": [*USER, {"role": "assistant", "reasoning": "so"}]}, "messages[1].reasoning"),
    ],
)
def test_12_a_name_that_merely_occurs_in_the_template_is_refused(
    source: str, fields: dict[str, Any], param: str
) -> None:
    template = source + "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ApiError) as refused:
        chat(over=facts(template), **fields)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_12_reasoning_goes_in_under_the_name_that_the_template_reads(name: str) -> None:
    over = facts("{% for m in messages %}{{ m.content }}{{ m.get('" + name + "', '') }}{% endfor %}")
    messages = [*USER, {"role": "assistant", "content": "a", "reasoning_content": "because"}]
    job = chat(over=over, messages=messages).jobs[0]
    assert "because" in not_none(over.tokenizer).decode(job.token_ids)


def test_12_a_developer_is_a_system_message_where_the_template_compares_no_role_with_it() -> None:
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    messages = [{"role": "developer", "content": "be brief"}]
    for source, role in ((turns + "{# developer #}", "system"), (turns + "{{ 1 if x == 'developer' }}", "developer")):
        over = facts(source)
        text = not_none(over.tokenizer).decode(
            chat(over=over, messages=messages).jobs[0].token_ids, skip_special_tokens=False
        )
        assert f"<{role}>" in text.replace(" ", "")

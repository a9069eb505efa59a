"""Answers in OpenAI's shapes: whole, streamed, with logprobs, tools, usage and which tokens were drafted."""

import json
from dataclasses import replace
from typing import Any

import pytest
from requests_for_tests import TOOL, TOOL_TEMPLATE, chat, completion, facts, step_delta, tokenizer
from typed import stand_in

from specdec_cli.engine.jobs.records import Delta
from specdec_cli.engine.jobs.ticket import merged
from specdec_cli.errors import QueueFull, Unavailable
from specdec_cli.events import TokenLogprob
from specdec_cli.recipe.schema import Serve
from specdec_cli.serve.answer.respond import CompletionAnswer, compact, sse
from specdec_cli.serve.errors import ApiError, as_api_error
from specdec_cli.serve.request.prepare import Prepared
from specdec_cli.serve.tools.parser import ToolPlan

WORDS = tokenizer().encode("the little cat sat down", add_special_tokens=False)


def deltas(logprobs: bool = False, **last) -> list[Delta]:
    """A prefill token, a step of three (two of three drafts stand), and what is left."""
    stream, found = tokenizer().stream(), []
    for tokens, drafted, accepted in ((WORDS[:1], 0, 0), (WORDS[1:4], 3, 2), (WORDS[4:], 2, 0)):
        known = tuple(TokenLogprob(t, -0.5, ((t, -0.5), (9, -1.5))) for t in tokens) if logprobs else ()
        found.append(step_delta(stream.feed(tokens).text, tokens, drafted, accepted, known))
    return [*found[:-1], replace(found[-1], **({"finish_reason": "stop"} | last))]


def whole(prepared: Prepared, given: list[Delta], over=None) -> dict[str, Any]:
    answer = CompletionAnswer(prepared, created=1)
    for index in range(len(prepared.jobs)):
        for delta in given:
            answer.observe(index, delta)
    return json.loads(compact(answer.document()))


def streamed(prepared: Prepared, given: list[Delta], over=None, **how) -> list[dict[str, Any]]:
    answer = CompletionAnswer(prepared, created=1, **how)
    found = answer.opening() + [chunk for delta in given for chunk in answer.chunks(0, delta)] + answer.closing()
    return [json.loads(sse(chunk)[6:]) for chunk in found]


def test_a_completion_document() -> None:
    document = whole(completion(n=2), deltas())
    assert (document["id"], document["object"], document["model"]) == ("cmpl-r1", "text_completion", "demo")
    text = tokenizer().decode(WORDS)
    assert [choice["text"] for choice in document["choices"]] == [text, text]
    assert [choice["index"] for choice in document["choices"]] == [0, 1]
    usage, num_prompt = document["usage"], len(completion().jobs[0].token_ids)
    assert usage["prompt_tokens"] == num_prompt
    assert usage["completion_tokens"] == 2 * len(WORDS)
    assert usage["total_tokens"] == num_prompt + 2 * len(WORDS)
    assert usage["completion_tokens_details"] == {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 6}
    assert document["metrics"] == {"speculative_decoding": None}


@pytest.mark.parametrize("given", [deltas(), [merged(deltas())]])
@pytest.mark.parametrize("level", ["none", "summary", "detailed"])
def test_a_request_reports_its_acceptance_as_vllm_does(level: Any, given: list[Delta]) -> None:
    model = facts(serve=Serve(per_request_spec_decode_metrics=level))
    figures = whole(completion(over=model), given)["metrics"]["speculative_decoding"]
    options = {"include_usage": True}
    last = streamed(completion(over=model, stream=True, stream_options=options), given)[-1]
    assert last["metrics"]["speculative_decoding"] == figures
    if level == "none":
        assert figures is None
        return
    steps = {"per_step_accepted": [2, 0], "per_step_drafted": [3, 2]} if level == "detailed" else {}
    assert figures == steps | {
        "mean_acceptance_length": 2.0,
        "draft_acceptance_rate": 0.4,
        "acceptance_histogram": [1, 0, 1, 0],
        "num_spec_steps": 2,
        "num_accepted_draft_tokens": 2,
        "num_draft_tokens": 5,
        "num_spec_tokens": 3,
    }


def test_acceptance_of_a_request_that_drafted_nothing() -> None:
    """Length 1 and rate 0, as in vLLM; null on a server that drafts nothing."""
    told = [replace(deltas()[0], finish_reason="length")]
    figures = whole(completion(), told)["metrics"]["speculative_decoding"]
    assert (figures["mean_acceptance_length"], figures["draft_acceptance_rate"]) == (1.0, 0.0)
    assert (figures["acceptance_histogram"], figures["num_spec_steps"]) == ([0, 0, 0, 0], 0)
    details = whole(completion(return_spec_tokens_details=True), told)["sglext"]["spec_tokens_details"]
    assert (details["spec_verify_ct"], details["spec_correct_drafts_histogram"]) == (0, [])
    plain = whole(completion(speculative={"enabled": False}, return_spec_tokens_details=True), told)
    assert (plain["metrics"]["speculative_decoding"]["acceptance_histogram"]) == [0]
    assert plain["sglext"] == {"spec_tokens_details": None}
    without = whole(completion(over=facts(num_speculative_tokens=0)), told)
    assert without["metrics"] == {"speculative_decoding": None}


def test_acceptance_as_sglang_reports_it() -> None:
    """An object for one choice, a list for several; a chunk of its own before the stream's last."""
    asked: dict[str, Any] = {"return_spec_tokens_details": True}
    details = whole(completion(**asked), deltas())["sglext"]["spec_tokens_details"]
    assert details == {
        "spec_accept_rate": 2 / 6,
        "spec_accept_length": len(WORDS) / 2,
        "spec_cap_length": 0.0,
        "spec_block_accept_length": 0.0,
        "spec_num_correct_drafts": 2,
        "spec_num_proposed_drafts": 6,
        "spec_verify_ct": 2,
        "spec_correct_drafts_histogram": [1, 0, 1],
        "spec_cap_lens_histogram": [],
    }
    assert whole(completion(n=2, **asked), deltas())["sglext"]["spec_tokens_details"] == [details, details]
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    *_, own, last = streamed(chat(**asked, **options), deltas())
    assert (own["choices"], own["sglext"]["spec_tokens_details"], "sglext" in last) == ([], details, False)
    assert "sglext" not in whole(completion(), deltas())


def test_a_chat_document() -> None:
    document = whole(chat(), deltas(stop_reason=2))
    assert document["object"] == "chat.completion"
    choice = document["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": tokenizer().decode(WORDS), "refusal": None}
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("stop", 2, None)


def test_a_stream_has_a_chunk_for_each_step_and_usage_last() -> None:
    options = {"include_usage": True}
    chunks = streamed(chat(stream=True, stream_options=options), deltas())
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len(chunks) == 1 + 3 + 1
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == tokenizer().decode(WORDS)
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None, None, None, "stop"]
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], len(WORDS))
    assert chunks[1]["usage"] is None
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}


def test_continuous_usage_counts_up() -> None:
    chunks = streamed(completion(stream=True, stream_options={"continuous_usage_stats": True}), deltas())
    assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 4, len(WORDS)]


@pytest.mark.parametrize("per_token", [False, True])
def test_details_say_which_tokens_were_drafted(per_token: bool) -> None:
    chunks = streamed(completion(stream=True, speculative={"details": True}), deltas(), per_token=per_token)
    assert len(chunks) == (len(WORDS) if per_token else 3)
    said = [c["choices"][0]["speculative"] for c in chunks]
    tokens = [token for one in said for token in one["tokens"]]
    assert "".join(token["text"] for token in tokens) == tokenizer().decode(WORDS)
    assert [token["accepted"] for token in tokens] == [False, True, True, False] + [False] * (len(WORDS) - 4)
    assert (sum(one["num_drafted"] for one in said), sum(one["num_accepted"] for one in said)) == (5, 2)


def test_chat_logprobs_have_bytes_and_the_very_number() -> None:
    choice = whole(chat(logprobs=True, top_logprobs=2), deltas(logprobs=True))["choices"][0]
    content = choice["logprobs"]["content"]
    assert bytes(b for one in content for b in one["bytes"]).decode().strip() == tokenizer().decode(WORDS).strip()
    assert all(one["logprob"] == one["top_logprobs"][0]["logprob"] for one in content)
    assert all(one["token"] == one["top_logprobs"][0]["token"] for one in content)


def test_an_echoed_prompt_is_scored_with_offsets() -> None:
    prepared = completion(prompt="the cat", echo=True, max_tokens=1, logprobs=1)
    prompt = prepared.jobs[0].token_ids
    scored = tuple(TokenLogprob(t, -2.0, ((3, -1.0),)) for t in prompt[1:])
    known = (TokenLogprob(WORDS[2], -0.5, ((WORDS[2], -0.5),)),)
    own = step_delta(" sat", (WORDS[2],), 0, 0, known, finish_reason="length")
    choice = whole(prepared, [replace(own, prompt_logprobs=scored)])["choices"][0]
    assert choice["text"] == "the cat sat"
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [None] + [-2.0] * (len(prompt) - 1) + [-0.5]
    assert logprobs["top_logprobs"][0] is None
    assert all(-2.0 in one.values() and max(one.values()) == -1.0 for one in logprobs["top_logprobs"][1:-1])
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == len(prompt) + 1
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert logprobs["text_offset"][-1] == len("the cat")


def test_a_prompt_that_is_only_scored() -> None:
    prepared = completion(prompt=WORDS, echo=True, max_tokens=0, logprobs=1)
    scored = tuple(TokenLogprob(t, float("-inf"), ()) for t in WORDS[1:])
    document = whole(prepared, [Delta(finish_reason="length", prompt_logprobs=scored)])
    assert document["choices"][0]["text"] == tokenizer().decode(WORDS)
    assert document["choices"][0]["logprobs"]["token_logprobs"] == [None] + [-9999.0] * (len(WORDS) - 1)
    assert document["usage"]["completion_tokens"] == 0


def called(prepared: Prepared, form: Any) -> Prepared:
    return replace(prepared, plan=replace(prepared.plan, tools=ToolPlan(form, stand_in(("weather",)))))


CALL = 'So: <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


def test_tool_calls_whole_and_streamed() -> None:
    over = facts(TOOL_TEMPLATE)
    given = [
        step_delta(CALL[:20], (5,)),
        step_delta(CALL[20:50], (6,)),
        step_delta(CALL[50:], (7,), finish_reason="stop"),
    ]
    choice = whole(called(chat(over=over, tools=[TOOL]), "hermes"), given, over)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    call = choice["message"]["tool_calls"][0]
    assert (choice["message"]["content"], call["function"]) == (
        "So:",
        {"name": "weather", "arguments": '{"city": "Rome"}'},
    )
    chunks = streamed(called(chat(over=over, tools=[TOOL], stream=True), "hermes"), given, over)
    calls = [one for c in chunks for one in c["choices"][0]["delta"].get("tool_calls", ())]
    assert calls[0]["id"].startswith("call_")
    assert calls[0]["function"]["name"] == "weather"
    assert "".join(one["function"]["arguments"] for one in calls) == '{"city": "Rome"}'
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_the_stop_string_is_in_the_text_only_if_asked_for() -> None:
    given = [step_delta("ab", (5,), finish_reason="stop", stop_reason="END")]
    assert whole(completion(stop="END"), given)["choices"][0]["text"] == "ab"
    assert whole(completion(stop="END", include_stop_str_in_output=True), given)["choices"][0]["text"] == "abEND"


def test_token_ids_on_request() -> None:
    choice = whole(completion(return_token_ids=True, prompt=[5, 6]), deltas())["choices"][0]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (WORDS, [5, 6])
    chunks = streamed(completion(return_token_ids=True, prompt=[5, 6], stream=True), deltas())
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [one.get("prompt_token_ids") for one in choices] == [[5, 6], None, None]
    assert [token for one in choices for token in one["token_ids"]] == WORDS


def test_a_chats_prompt_stands_beside_its_choices() -> None:
    prepared = chat(return_token_ids=True)
    document = whole(prepared, deltas())
    assert document["prompt_token_ids"] == list(prepared.jobs[0].token_ids)
    assert document["choices"][0]["token_ids"] == WORDS
    chunks = streamed(chat(return_token_ids=True, stream=True), deltas())
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [document["prompt_token_ids"], None, None, None]


def test_an_error_ends_the_answer() -> None:
    answer = CompletionAnswer(completion(stream=True))
    with pytest.raises(ApiError) as caught:
        answer.chunks(0, Delta(error=ValueError("secret")))
    assert (caught.value.status, "secret" in caught.value.message) == (500, False)


def test_states_of_the_server_are_answers() -> None:
    full, closed = as_api_error(QueueFull(9)), as_api_error(Unavailable("the server is draining", "draining"))
    assert (full.status, full.code, full.headers) == (429, "queue_full", {"Retry-After": "1"})
    assert (closed.status, closed.code) == (503, "draining")


def test_steps_that_arrive_as_one_delta_count_as_steps() -> None:
    apart = whole(completion(), deltas())["metrics"]
    together = whole(completion(), [merged(deltas())])["metrics"]
    assert together == apart
    assert together["speculative_decoding"]["num_spec_steps"] == 2


def test_steps_that_arrive_as_one_delta_keep_their_colours() -> None:
    chunks = streamed(completion(stream=True, speculative={"details": True}), [merged(deltas())], per_token=True)
    said = [c["choices"][0]["speculative"] for c in chunks]
    tokens = [token for one in said for token in one["tokens"]]
    assert [token["accepted"] for token in tokens] == [False, True, True, False] + [False] * (len(WORDS) - 4)
    assert (sum(one["num_drafted"] for one in said), sum(one["num_accepted"] for one in said)) == (5, 2)


def test_cached_tokens_are_those_of_the_prompts() -> None:
    prepared = completion(prompt=["hello there", "you"], n=2)
    answer = CompletionAnswer(prepared, created=1)
    for index, cached in enumerate((0, 2, 1, 1)):
        first, *rest = deltas()
        for delta in (replace(first, steps=(replace(first.steps[0], num_cached_tokens=cached),)), *rest):
            answer.observe(index, delta)
    assert json.loads(compact(answer.document()))["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


def test_an_echo_without_text_is_scored_all_the_same() -> None:
    prepared = replace_echo(completion(prompt=[5], echo=True, max_tokens=0, logprobs=1), "")
    document = whole(prepared, [Delta(finish_reason="length")])
    assert document["choices"][0]["logprobs"]["token_logprobs"] == [None]


def replace_echo(prepared: Prepared, text: str) -> Prepared:
    return replace(prepared, plan=replace(prepared.plan, echoed=(text,)))

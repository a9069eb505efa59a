"""Thinking apart from the answer: streamed and whole, opened by the prompt or not, cut, before tools and grammars."""

from __future__ import annotations

import random
from typing import Any

import pytest
from requests_for_tests import TOOL, chat, facts, planner, step_delta, tokenizer
from test_serve_respond import streamed, whole
from typed import not_none

from specdec_cli.engine.jobs.records import Delta
from specdec_cli.recipe.schema import Serve
from specdec_cli.serve.errors import ApiError
from specdec_cli.serve.request.prepare import ModelInfo
from specdec_cli.serve.request.reasoning import ReasoningPlan, ThoughtReader, markers_of

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}|"
OPENS = PLAIN + "<think>\n"
CLOSES = PLAIN + "<think>\n\n</think>\n\n"
SWITCHED = PLAIN + "{% if thinks is defined and not thinks %}<think></think>{% else %}<think>{% endif %}"
TOOLS = "{% if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}" + PLAIN
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CASES = [
    # parser, template, text, reasoning, content
    ("deepseek_r1", OPENS, "I see.\n</think>\n\nYes.", "I see.\n", "\n\nYes."),
    ("deepseek_r1", PLAIN, "I see.</think>Yes.", "I see.", "Yes."),
    ("deepseek_r1", PLAIN, "<think>\nI see.</think>Yes.", "\nI see.", "Yes."),
    ("deepseek_r1", OPENS, "<think>\nagain</think>Yes.", "\nagain", "Yes."),
    ("deepseek_r1", OPENS, "no end", "no end", ""),
    ("deepseek_r1", CLOSES, "Yes. </think>", "", "Yes. </think>"),
    ("qwen3", PLAIN, "<think>\nI see.\n</think>\n\nYes.", "\nI see.\n", "\n\nYes."),
    ("qwen3", PLAIN, "\n<think>a</think>b", "a", "b"),
    ("qwen3", PLAIN, "Yes.", "", "Yes."),
    ("qwen3", PLAIN, "  Yes <think>no</think>", "", "  Yes <think>no</think>"),
    ("qwen3", PLAIN, "<thin", "", "<thin"),
    ("qwen3", PLAIN, "<think>cut in the mid</thi", "cut in the mid</thi", ""),
    ("qwen3", OPENS, "a < b </ c </think>d", "a < b </ c ", "d"),
    ("qwen3", CLOSES, "Yes.", "", "Yes."),
    ("qwen3", PLAIN, "<think></think>", "", ""),
    ("qwen3", PLAIN, "", "", ""),
    ("qwen3", PLAIN, "\n\n", "", "\n\n"),
    ("glm45", PLAIN, "<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
    ("seed_oss", PLAIN, "<seed:think>a</seed:think>b", "a", "b"),
    ("mistral", PLAIN, "[THINK]a[/THINK]b", "a", "b"),
    ("granite", PLAIN, "Here is my thought process: a\nHere is my response: b", " a\n", " b"),
    ("step3", PLAIN, "a</think>b", "a", "b"),
]


def given(parser: str, template: str = PLAIN) -> ModelInfo:
    return facts(template, serve=Serve.model_validate({"reasoning_parser": parser}))


def deltas(text: str, seed: int | None = None, reason: Any = "stop") -> list[Delta]:
    """A text as the engine gives it, cut at random into steps."""
    tokens, stream, found = tokenizer().encode(text, False), tokenizer().stream(), []
    draw = random.Random(seed)
    while tokens:
        num = len(tokens) if seed is None else draw.randint(1, 3)
        found.append(step_delta(stream.feed(tokens[:num]).text, tokens[:num]))
        tokens = tokens[num:]
    return [*found, Delta(rest=stream.finish(), finish_reason=reason)]


def folded(chunks: list[dict[str, Any]]) -> tuple[str, str, list[dict[str, Any]]]:
    """Reasoning, content and calls of a stream."""
    thought, said, calls = "", "", []
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            assert delta.get("reasoning") == delta.get("reasoning_content")
            thought += delta.get("reasoning", "")
            said += delta.get("content") or ""
            calls += delta.get("tool_calls", [])
    return thought, said, calls


@pytest.mark.parametrize(("parser", "template", "text", "thought", "said"), CASES)
def test_thinking_is_apart_whole_and_streamed(parser: str, template: str, text: str, thought: str, said: str) -> None:
    over = given(parser, template)
    document = whole(chat(over=over), deltas(text), over)
    message = document["choices"][0]["message"]
    assert message["reasoning_content"] == message["reasoning"] == (thought or None)
    assert message["content"] == (None if thought and not said else said)
    details = document["usage"]["completion_tokens_details"]
    counts = {details["reasoning_tokens"]}
    for seed in range(5):
        for per_token in (False, True):
            prepared = chat(over=over, stream=True, stream_options={"include_usage": True})
            chunks = streamed(prepared, deltas(text, seed), over, per_token=per_token)
            assert folded(chunks)[:2] == (thought, said)
            counts.add(chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"])
    assert len(counts) == 1
    num = len(tokenizer().encode(thought, False)) if thought else 0
    assert abs(counts.pop() - num) <= (2 if thought else 0), "tokens at the markers may be joined with others"


@pytest.mark.parametrize("parser", [case[0] for case in CASES])
def test_letters_one_by_one_read_as_the_whole(parser: Any) -> None:
    for begins in ("thinking", "undecided", "content"):
        plan = ReasoningPlan(markers_of(parser), begins)
        for text in (case[2] for case in CASES):
            one, many = ThoughtReader(plan), ThoughtReader(plan)
            parts = [one.feed(text), one.finish()]
            letters = [*(many.feed(letter) for letter in text), many.finish()]
            assert ["".join(side) for side in zip(*letters, strict=True)] == [
                "".join(side) for side in zip(*parts, strict=True)
            ]


def test_a_thought_that_is_cut_is_no_answer() -> None:
    over = given("qwen3", OPENS)
    choice = whole(chat(over=over), deltas("on and on", reason="length"), over)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "length")
    assert choice["message"]["reasoning_content"] == "on and on"


def test_thinking_is_switched_off_by_the_templates_variable() -> None:
    over = given("deepseek_r1", SWITCHED)
    off = chat(over=over, chat_template_kwargs={"thinks": False})
    assert whole(off, deltas("Yes."), over)["choices"][0]["message"]["content"] == "Yes."
    assert whole(chat(over=over), deltas("a</think>b"), over)["choices"][0]["message"]["content"] == "b"


def test_a_last_turn_that_goes_on_says_where_its_thought_stands() -> None:
    over = given("qwen3", "{% for m in messages %}{{ m.content }}{% endfor %}")
    for begun, text, thought in [("<think>so", " far</think>b", " far"), ("<think>so</think>a", "b", None)]:
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": begun}]
        prepared = chat(over=over, messages=messages, continue_final_message=True, add_generation_prompt=False)
        message = whole(prepared, deltas(text), over)["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == (thought, "b")


def test_an_earlier_turns_thought_does_not_count() -> None:
    over = given("qwen3")
    messages = [{"role": "user", "content": "x <think> y </think>"}, {"role": "user", "content": "z <think>a"}]
    message = whole(chat(over=over, messages=messages), deltas("Yes."), over)["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (None, "Yes.")


@pytest.mark.parametrize("seed", range(4))
def test_tool_calls_come_after_the_thought(seed: int) -> None:
    over = facts(TOOLS, serve=Serve(reasoning_parser="qwen3", tool_call_parser="hermes"))
    text = f"<think>{CALL}</think>Well.\n{CALL}"
    prepared = chat(over=over, tools=[TOOL])
    choice = whole(prepared, deltas(text), over)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning"] == CALL
    assert choice["message"]["content"] == "Well."
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]
    chunks = streamed(chat(over=over, tools=[TOOL], stream=True), deltas(text, seed), over)
    thought, said, calls = folded(chunks)
    assert (thought, said) == (CALL, "Well.")
    assert "".join(call["function"].get("arguments", "") for call in calls) == '{"city": "Rome"}'


def test_a_forced_call_after_a_thought_and_none_where_the_thought_is_cut() -> None:
    over = given("qwen3", TOOLS)
    forced = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    message = whole(chat(over=over, **forced), deltas('<think>a</think>{"city":"Rome"}'), over)["choices"][0]["message"]
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city":"Rome"}'}
    cut = whole(chat(over=over, **forced), deltas("<think>a", reason="length"), over)["choices"][0]
    assert "tool_calls" not in cut["message"]
    assert cut["finish_reason"] == "length"


def test_a_grammar_binds_the_answer_alone() -> None:
    for template, begins in [(OPENS, "a</think>"), (PLAIN, "<think>a</think>"), (PLAIN, "")]:
        over = given("qwen3", template)
        job = chat(over=over, structured_outputs={"regex": "[0-9]{2}"}).jobs[0]
        matcher = not_none(job.grammar).start(over.num_tokens, (2,), (2,))
        tokens = tokenizer().encode(f"{begins}42", False)
        for token in tokens:
            assert matcher.allowed[token]
            matcher.accept([token])
        assert matcher.is_finished
    over = given("qwen3", CLOSES)
    job = chat(over=over, structured_outputs={"regex": "[0-9]{2}"}).jobs[0]
    assert not not_none(job.grammar).start(over.num_tokens, (2,), (2,)).allowed[tokenizer().encode("<", False)[-1]]


def test_the_thought_is_left_out_where_nobody_wants_it() -> None:
    over = given("qwen3")
    message = whole(chat(over=over, include_reasoning=False), deltas("<think>a</think>b"), over)["choices"][0][
        "message"
    ]
    assert (message["reasoning"], message["content"]) == (None, "b")
    with pytest.raises(ApiError, match="--reasoning-parser"):
        chat(include_reasoning=False)
    assert "reasoning" not in whole(chat(include_reasoning=True), deltas("a"))["choices"][0]["message"]


def test_markers_that_are_special_tokens_are_seen() -> None:
    from specdec_cli.text.tokenizer import Tokenizer

    text = Tokenizer(tokenizer(PLAIN).hf.__class__.from_pretrained(tokenizer().hf.name_or_path))
    text.hf.chat_template = PLAIN
    text.hf.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    text = Tokenizer(text.hf)
    over = ModelInfo(text, text.num_tokens, 512, ("demo",), planner(), serve=Serve(reasoning_parser="mistral"))
    assert chat(over=over).jobs[0].params.skip_special_tokens is False
    assert chat(over=given("mistral")).jobs[0].params.skip_special_tokens is True


def test_without_a_parser_a_thought_is_content() -> None:
    message = whole(chat(over=facts(PLAIN)), deltas("<think>a</think>b"), facts(PLAIN))["choices"][0]["message"]
    assert message["content"] == "<think>a</think>b"
    assert "reasoning_content" not in message

"""Conversations of the Python API reach a chat template as those of `serve` do: parts, calls, roles, tools."""

from __future__ import annotations

import json
from typing import Any

import pytest
from requests_for_tests import TOOL_TEMPLATE, USER, chat, facts, tokenizer
from typed import not_none

from specdec_cli.engine.requests import encode
from specdec_cli.errors import UsageError
from specdec_cli.text.conversation import MessageError

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
PARTS = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}


def served(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
    over = facts(TOOL_TEMPLATE)
    job = chat(over=over, messages=messages, tools=tools).jobs[0]
    return not_none(over.tokenizer).decode(job.token_ids, skip_special_tokens=False)


def encoded(messages: Any) -> str:
    text = tokenizer(TOOL_TEMPLATE)
    return text.decode(encode(messages, text), skip_special_tokens=False)


@pytest.mark.parametrize(
    ("messages", "part"),
    [
        ([PARTS], "one\ntwo"),
        ([*USER, CALLS], '"arguments": {"a": 1}}'),
        ([*USER, CALLS | {"tool_calls": [CALL | {"function": {"name": "f", "arguments": {"a": 1}}}]}], '{"a": 1}}'),
        ([*USER, CALLS | {"tool_calls": [CALL | {"function": {"name": "f"}}]}], '"arguments": {}}'),
        ([{"role": "developer", "content": "Be brief."}, *USER], "<|system|>Be brief."),
        ([*USER, {"role": "assistant", "content": None, "refusal": "No."}, *USER], "<|assistant|>No."),
    ],
)
def test_messages_are_read_as_by_serve(messages: list[dict[str, Any]], part: str) -> None:
    if part != "<|assistant|>No.":  # the API asks for content or calls
        assert encoded(messages) == served(messages)
    assert part in served(messages)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"content": [{"type": "image_url"}]}, r"messages\[0\].content\[0\].type` must be `text`, not `image_url`"),
        ({"content": ["x"]}, r"messages\[0\].content\[0\]` must be a part such as"),
        ({"content": [{"type": "text"}]}, r"messages\[0\].content\[0\].text` is missing"),
        ({"content": [{"type": "text", "text": 5}]}, r"messages\[0\].content\[0\].text` must be text"),
        ({"tool_calls": 5}, r"messages\[0\].tool_calls` must be a list of calls"),
        ({"tool_calls": [{"name": "f"}]}, r"messages\[0\].tool_calls\[0\]` must be a call such as"),
        ({"tool_calls": [{"function": {"arguments": {1, 2}}}]}, r"function.arguments` must be a JSON object"),
        ({"content": "x", "reasoning": "hm"}, r"messages\[0\].reasoning` is not read by the model's chat template"),
    ],
)
def test_wrong_fields_are_named(message: dict[str, Any], said: str) -> None:
    with pytest.raises(MessageError, match=said):
        encoded([{"role": "assistant"} | message])


def test_half_a_character_in_a_part_is_refused() -> None:
    with pytest.raises(UsageError, match="a message is not valid Unicode"):
        encoded([{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}])


def test_fields_that_openai_does_not_know_reach_the_template() -> None:
    text = tokenizer("{% for m in messages %}{{ m.mood }}{% endfor %}")
    assert text.decode(text.chat([USER[0] | {"mood": "fine"}])) == "fine"


def test_functions_are_given_as_llama_cpp_gives_them() -> None:
    """With a description and parameters, and without `strict`, which is for the server."""
    tools = [{"type": "function", "function": {"name": "f", "strict": True}}]
    expected = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
    assert served(USER, tools).startswith(json.dumps(expected))
    text = tokenizer(TOOL_TEMPLATE)
    assert text.decode(text.chat(USER, tools=tools), skip_special_tokens=False) == served(USER, tools)


def test_tools_that_the_template_ignores_are_refused() -> None:
    with pytest.raises(UsageError, match="`tools` cannot be used: the model's chat template reads no tools"):
        tokenizer("{{ messages[0].content }}").chat(USER, tools=[{"type": "function", "function": {"name": "f"}}])

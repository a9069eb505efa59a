"""Tool calls out of text, whole and letter by letter."""

from typing import Any

import pytest
from test_serve_tool_formats import folded

from specdec_cli.serve.tools.calls import ToolDelta
from specdec_cli.serve.tools.parser import ToolPlan

SCHEMAS: dict[str, dict[str, Any]] = {"f": {}, "g": {}}
CASES = [
    (
        "hermes",
        'Hi\n<tool_call>\n{"name": "f", "arguments": {"a": "}\\"", "b": [1]}}\n</tool_call>\n'
        '<tool_call>{"name": "g"}</tool_call>',
        ("Hi", [("f", '{"a": "}\\"", "b": [1]}'), ("g", "{}")]),
    ),
    ("hermes", "plain < text <tool_cal nothing \n", ("plain < text <tool_cal nothing \n", [])),
    ("hermes", "<tool_call>nope</tool_call> x", ("<tool_call>nope</tool_call> x", [])),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":1', ("", [("f", '{"a":1')])),
    ("hermes", '<tool_call>{"nam', ('<tool_call>{"nam', [])),
    ("hermes", '<tool_call>{"arguments":{"a":1},"name":"f"}</tool_call>.', (".", [("f", '{"a":1}')])),
    ("hermes", '<tool_call>{"name":"f","arguments":"{\\"a\\":1}"}</tool_call>', ("", [("f", '{"a":1}')])),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}; {"name": "g"}', ("", [("f", '{"a": 1}'), ("g", "{}")])),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "z", "parameters": {}}', ("", [("z", "{}")])),
    ("llama3_json", '{"answer": 42} ok', ('{"answer": 42} ok', [])),
    ("llama3_json", '{"name": "Bob", "age": 3}', ('{"name": "Bob", "age": 3}', [])),
    ("llama3_json", 'Hello {"name": "f"}', ('Hello {"name": "f"}', [])),
    ("llama3_json", "<|python_tag|>print(1)", ("<|python_tag|>print(1)", [])),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]',
        ("", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
    (
        "mistral",
        'Sure[TOOL_CALLS] f{"a": 1}[TOOL_CALLS]g[CALL_ID]12[ARGS]{}',
        ("Sure", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
    ("mistral", "[TOOL_CALLS]", ("[TOOL_CALLS]", [])),
    ("named", '{"a": 1}', ("", [("f", '{"a": 1}')])),
    (
        "required",
        '[{"name":"f","parameters":{"a":1}},{"name":"g","parameters":{}}]',
        ("", [("f", '{"a":1}'), ("g", "{}")]),
    ),
    ("required", "hello", ("hello", [])),
    ("hermes", "", ("", [])),
    ("hermes", '<tool_call>{"name":' + "[" * 5000, ('<tool_call>{"name":' + "[" * 5000, [])),
]


@pytest.mark.parametrize(("form", "text", "expected"), CASES, ids=range(len(CASES)))
def test_whole_and_streamed_are_the_same(form: Any, text: str, expected: tuple[Any, ...]) -> None:
    whole, streamed = ToolPlan(form, SCHEMAS).parser(), ToolPlan(form, SCHEMAS).parser()
    assert folded(whole.feed(text) + whole.finish()) == expected
    assert folded([one for letter in text for one in streamed.feed(letter)] + streamed.finish()) == expected


def test_the_name_comes_before_the_arguments_end() -> None:
    parser = ToolPlan("hermes", SCHEMAS).parser()
    assert parser.feed('<tool_call>{"name": "f", "argum') == [ToolDelta(name="f")]
    assert parser.feed('ents": {"a": ') == [ToolDelta(arguments='{"a": ')]


def test_only_one_call_where_that_was_asked() -> None:
    parser = ToolPlan("llama3_json", SCHEMAS, only_one=True).parser()
    found = parser.feed('{"name":"f","parameters":{}};{"name":"g","parameters":{"b":1}}') + parser.finish()
    assert folded(found) == ("", [("f", "{}")])

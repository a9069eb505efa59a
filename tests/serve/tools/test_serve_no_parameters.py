"""Point 11: a function without parameters has no arguments where its call is enforced, whichever way it is declared."""

from typing import Any

import numpy as np
import pytest
from requests_for_tests import TOOL_TEMPLATE, chat, facts
from test_serve_responses import prepared as prepared_response
from test_serve_strict import NAMES, turn
from tool_templates import TEMPLATES
from typed import not_none

from specdec_cli.serve.protocol import FunctionTool
from specdec_cli.serve.request.prepare import Prepared

pytest.importorskip("llguidance", reason="needs the extra `structured`")

DECLARED: list[dict[str, Any]] = [
    {},
    {"parameters": None},
    {"parameters": {}},
    {"parameters": {"type": "object", "properties": {}}},
    {"parameters": {"type": "object", "properties": {}, "required": []}},
    {"parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
    {"parameters": {"type": "object"}},
    {"parameters": {"properties": {}}},
    {"parameters": {"title": "Ping", "required": []}},
]
NAMED = {"type": "function", "function": {"name": "ping"}}


def drawn(prepared: Prepared, begun: str = "") -> list[tuple[str | None, str]]:
    """Names and arguments of the calls in texts that are drawn from the grammar's masks, each the same ones."""
    tokenizer = not_none(facts().tokenizer)
    found = set()
    for seed in range(8):
        draw, tokens = np.random.default_rng(seed), tokenizer.encode(begun, add_special_tokens=False)
        matcher = not_none(prepared.jobs[0].grammar).start(facts().num_tokens, {0})
        assert matcher.accept(tokens) == len(tokens)
        while not matcher.is_finished and not matcher.allowed[0] and len(tokens) < 300:
            tokens.append(int(draw.choice(np.flatnonzero(matcher.allowed))))
            matcher.accept(tokens[-1:])
        parser = not_none(prepared.plan.tools).parser()
        deltas = parser.feed(tokenizer.decode(tokens, skip_special_tokens=False)) + parser.finish()
        calls = [one for one in deltas if not one.content]
        found.add(tuple((one.name, one.arguments) for one in calls if one.index == 0))
    (one,) = found
    return list(one)


@pytest.mark.in_turn(1, every=5)
@pytest.mark.parametrize("strict", [None, False, True])
@pytest.mark.parametrize("declared", DECLARED)
def test_49_11_a_forced_call_of_a_function_without_parameters_has_no_arguments(
    declared: dict[str, Any], strict: bool | None
) -> None:
    function = {"name": "ping", "strict": strict, **declared}
    tool = {"type": "function", "function": function}
    over = facts(TOOL_TEMPLATE)
    for choice in ("required", NAMED):
        given = chat(over=over, tools=[tool], tool_choice=choice, parallel_tool_calls=False)
        assert drawn(given) == [("ping", "{}")]
    choices: tuple[Any, ...] = ("required", {"type": "function", "name": "ping"})
    for choice in choices:
        fields = {"tools": [{"type": "function", **function}], "tool_choice": choice, "parallel_tool_calls": False}
        assert drawn(prepared_response(over, **fields)[1]) == [("ping", "{}")]


@pytest.mark.in_turn(5, every=6)
@pytest.mark.parametrize("name", [*NAMES])
def test_49_11_a_strict_function_without_parameters_has_no_arguments(name: str) -> None:
    said = turn(name, [("ping", {})])
    begun = said[: said.index("ping") + 4]
    for declared in DECLARED[:4]:
        tool = {"type": "function", "function": {"name": "ping", "strict": True, **declared}}
        given = chat(over=facts(TEMPLATES[name][1]), tools=[tool], parallel_tool_calls=False)
        assert drawn(given, begun) == [("ping", "{}")]


def test_49_11_an_enforced_call_has_no_argument_that_its_function_does_not_declare() -> None:
    listed = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "title": "t"}
    assert FunctionTool(name="f", parameters=listed).arguments_schema == {**listed, "additionalProperties": False}
    for as_given in (
        {"type": "object", "additionalProperties": True},
        {"type": "object", "properties": {}, "additionalProperties": True},
        {"type": "object", "properties": {}, "required": ["x"]},
        {"type": "object", "properties": {}, "patternProperties": {"^a": {}}},
        {"$ref": "#/$defs/x", "$defs": {"x": {"type": "object"}}},
    ):
        assert FunctionTool(name="f", parameters=as_given).arguments_schema == as_given

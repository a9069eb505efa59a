"""Tool calls written as JSON objects, and as a name before the JSON of its arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from specdec_cli.serve.tools.calls import Calls
from specdec_cli.serve.tools.letters import (
    NoCallError,
    Steps,
    after_space,
    expect,
    loads,
    one_of,
    read_arguments,
    read_until,
    read_value,
)

MarkedFormat = Literal["hermes", "granite", "jamba", "phi4_mini_json"]
TokenFormat = Literal["deepseek", "kimi_k2"]
MARKS: Mapping[str, tuple[str, str]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "granite": ("<|tool_call|>", ""),
    "jamba": ("<tool_calls>", "</tool_calls>"),
    "phi4_mini_json": ("functools", ""),
}
"""The text before and after an object, or a list of objects."""


@dataclass(frozen=True, slots=True)
class CallTokens:
    """The tokens around calls whose arguments are JSON behind a name.

    Args:
        begin: before all calls.
        end: after all of them.
        call: before a call.
        arguments: between its name and its arguments.
        end_call: after them.
        name: pattern of what stands for the name.
    """

    begin: str
    end: str
    call: str
    arguments: str
    end_call: str
    name: re.Pattern[str] = re.compile("(.+)")


TOKENS: Mapping[str, CallTokens] = {
    "deepseek": CallTokens(
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
        call="<｜tool▁call▁begin｜>",
        arguments="<｜tool▁sep｜>",
        end_call="<｜tool▁call▁end｜>",
    ),
    "kimi_k2": CallTokens(
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
        call="<|tool_call_begin|>",
        arguments="<|tool_call_argument_begin|>",
        end_call="<|tool_call_end|>",
        name=re.compile(r"(?:functions\.)?(.+?)(?::\d+)?"),
    ),
}


def read_marked(calls: Calls, end: str) -> Steps:
    """An object or a list of objects, and the closing mark."""
    char = yield from after_space((yield))
    if char == "[":
        char = yield from read_array(calls, char, any_name=True)
    else:
        char = yield from read_object(calls, char, any_name=True)
    if not end:
        return char
    yield from one_of((end,), (yield from after_space(char)))
    return (yield)


def read_mistral(calls: Calls) -> Steps:
    """A list of objects, or a name and its arguments; an id may stand between them."""
    char = yield from after_space((yield))
    if char == "[":
        return (yield from read_array(calls, char, any_name=True))
    name = ""
    while char is not None and char not in "[{":
        name += char
        char = yield
    while char is not None and char != "{":  # [CALL_ID]…[ARGS]
        char = yield
    if char is None or not name.strip():
        raise NoCallError
    calls.begin(name.strip())
    char = yield from read_value(char, calls.argue)
    calls.close_object(char)
    return char


def read_tokened(tokens: CallTokens, calls: Calls, marker: str) -> Steps:
    """Calls between tokens; DeepSeek-V3 writes `function` first, then the name and a block of code."""
    char: str | None = None
    if marker == tokens.begin:
        yield from one_of((tokens.call,), (yield from after_space((yield))))
    while True:
        name = (yield from read_until(tokens.arguments, (yield))).strip()
        char = yield from after_space((yield))
        if char != "{":
            name = (yield from read_until("```json", char)).strip()
            char = yield from after_space((yield))
        expect("{", char)
        named = tokens.name.fullmatch(name)
        calls.begin(calls.known(named and named[1], any_name=True))
        char = yield from read_value(char, calls.argue)
        calls.close_object(char)
        char = yield from after_space(char)
        if char == "`":
            yield from one_of(("```",), char)
            char = yield from after_space((yield))
        yield from one_of((tokens.end_call,), char)
        char = yield from after_space((yield))
        if char != "<":
            return char
        if (yield from one_of((tokens.end, tokens.call), char)) == tokens.end:
            return (yield)


def read_objects(calls: Calls, char: str | None, any_name: bool) -> Steps:
    """Objects with semicolons or space between them, or a list of objects."""
    if char == "[":
        return (yield from read_array(calls, char, any_name))
    char = yield from after_space((yield from read_object(calls, char, any_name)))
    while char == ";" or char == "{":
        if char == ";":
            char = yield from after_space((yield))
        char = yield from after_space((yield from read_object(calls, char, any_name)))
    return char


def read_array(calls: Calls, char: str | None, any_name: bool) -> Steps:
    """Objects inside brackets."""
    expect("[", char)
    char = yield from after_space((yield))
    if char != "{":
        raise NoCallError
    while char == "{":
        char = yield from after_space((yield from read_object(calls, char, any_name)))
        if char == ",":
            char = yield from after_space((yield))
    expect("]", char)
    return (yield)


def read_object(calls: Calls, char: str | None, any_name: bool) -> Steps:
    """One call: `{"name": …, "arguments": …}`, keys in any order, other keys left out."""
    early: list[str] = []
    name: str | None = None
    expect("{", char)
    char = yield from after_space((yield))
    while char == '"':
        said: list[str] = []
        char = yield from after_space((yield from read_value(char, said.append)))
        key = loads(said)
        expect(":", char)
        char = yield from after_space((yield))
        said.clear()
        if key in ("arguments", "parameters"):
            char = yield from read_arguments(char, early.append if name is None else calls.argue)
        else:
            char = yield from read_value(char, said.append)
        if key == "name":
            name = calls.known(loads(said), any_name)
            calls.begin(name)
            calls.argue("".join(early))
        char = yield from after_space(char)
        if char == ",":
            char = yield from after_space((yield))
    expect("}", char)
    if name is None:
        raise NoCallError
    calls.close_object()
    return (yield)

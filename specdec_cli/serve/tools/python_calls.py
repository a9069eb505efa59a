"""Tool calls written as Python: `f(x=1, y='a')`, inside brackets or one to a line."""

from __future__ import annotations

import re
from collections.abc import Generator

from specdec_cli.serve.tools import arguments
from specdec_cli.serve.tools.calls import Calls
from specdec_cli.serve.tools.letters import NoCallError, Steps, after_space

_KEYWORD = re.compile(r"\s*(\w+)\s*=(?!=)\s*(.*)", re.DOTALL)


def read_python_calls(calls: Calls, char: str | None, any_name: bool) -> Steps:
    """Calls from their first letter on, with commas, semicolons or white space between them.

    Args:
        calls: takes them.
        char: the first character.
        any_name: whether a call may have the name of no tool.
    """
    num_before = calls.num_calls
    char = yield from after_space(char)
    while char is not None and (char.isalnum() or char == "_"):
        name = ""
        while char is not None and (char.isalnum() or char in "_.-"):
            name += char
            char = yield
        if (yield from after_space(char)) != "(":
            raise NoCallError
        calls.begin(calls.known(name, any_name))
        yield from _read_arguments(calls)
        calls.close()
        char = yield from after_space((yield))
        if char is not None and char in ",;":
            char = yield from after_space((yield))
    if calls.num_calls == num_before:
        raise NoCallError
    return char


def _read_arguments(calls: Calls) -> Generator[None, str | None, None]:
    """The arguments up to the closing parenthesis; those without a name have the schema's, in its order."""
    places = iter(arguments.property_names(calls.schema))
    end: str | None = ","
    while end == ",":
        said: list[str] = []
        end = yield from _read_expression(said)
        source = "".join(said)
        named = _KEYWORD.fullmatch(source)
        if end is None:
            _begin_argument(calls, named)
            raise NoCallError
        if not source.strip():
            continue
        key = next(places, None) if named is None else named[1]
        if key is None:
            raise NoCallError
        calls.argument(key, arguments.from_python(source if named is None else named[2], calls.schema, key))


def _begin_argument(calls: Calls, named: re.Match[str] | None) -> None:
    """An argument that the output's end cuts: of a string as much as is there, of anything else nothing."""
    if named is not None and named[2][:1] in ("'", '"'):
        calls.argument(named[1], arguments.begun(named[2][1:], {}, named[1]))


def _read_expression(said: list[str]) -> Steps:
    """One expression; returns the comma or parenthesis that ends it, None at the output's end."""
    depth, quote, is_escaped, num_quoted = 0, "", False, 0
    while (char := (yield)) is not None:
        if quote:
            num_quoted += 1
            if is_escaped:
                is_escaped = False
            elif char == "\\":
                is_escaped = True
            elif char == quote[0] and (len(quote) == 1 or (num_quoted >= 3 and said[-2:] == [char, char])):
                quote = ""
        elif char in "\"'":
            is_third = len(said) > 1 and said[-2:] == [char, char]
            quote, num_quoted = (char * 3 if is_third else char), 0
        elif depth == 0 and char in ",)":
            return char
        else:
            depth += (char in "([{") - (char in ")]}")
        said.append(char)
    return None

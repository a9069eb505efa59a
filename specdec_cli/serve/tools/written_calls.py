"""Calls as a model writes them, for the history of a chat template that reads no calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specdec_cli.serve.tools.json_calls import MARKS, TOKENS
from specdec_cli.serve.tools.tag_calls import TAGS
from specdec_cli.serve.tools.tools import Format

Call = tuple[str, str, Mapping[str, Any]]
"""A call's name, the text of its arguments, and what can be read of them."""


def write_calls(form: Format, calls: Sequence[Call]) -> str:
    """The text in which a model of a format calls tools.

    Args:
        form: the model's format.
        calls: at least one.
    """
    if form in TAGS:
        return _tagged(form, calls)
    if form in TOKENS:
        return _tokened(form, calls)
    writers: Mapping[str, Callable[[Sequence[Call]], str]] = {
        "hermes": lambda calls: "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in _objects(calls)),
        "glm45": _glm,
        "llama3_json": lambda calls: "; ".join(_objects(calls, "parameters")),
        "mistral": lambda calls: f"[TOOL_CALLS][{', '.join(_objects(calls))}]",
        "pythonic": lambda calls: f"[{', '.join(_python(calls))}]",
        "olmo3": lambda calls: "<function_calls>\n{}\n</function_calls>".format("\n".join(_python(calls))),
    }
    if form in writers:
        return writers[form](calls)
    begin, end = MARKS[form]
    return f"{begin}[{', '.join(_objects(calls))}]{end}"


def _objects(calls: Sequence[Call], key: str = "arguments") -> list[str]:
    return [f'{{"name": {json.dumps(name)}, "{key}": {text or "{}"}}}' for name, text, _ in calls]


def _python(calls: Sequence[Call]) -> list[str]:
    return [f"{name}({', '.join(f'{key}={_json(value)}' for key, value in given.items())})" for name, _, given in calls]


def _glm(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{_plain(value)}</arg_value>\n" for key, value in given.items())
        + "</tool_call>"
        for name, _, given in calls
    )


def _tagged(form: str, calls: Sequence[Call]) -> str:
    tags, line = TAGS[form], "\n" if form == "qwen3_coder" else ""
    written = [
        f"{name.join(tags.call)}\n"
        + "".join(
            f"{key.join(tags.parameter)}{line}{_plain(value)}{line}{tags.end_parameter}\n"
            for key, value in given.items()
        )
        + tags.end_call
        for name, _, given in calls
    ]
    return "\n".join(f"{tags.begin}\n{one}\n{tags.end}" for one in written)


def _tokened(form: str, calls: Sequence[Call]) -> str:
    tokens = TOKENS[form]
    names = [f"functions.{name}:{i}" if form == "kimi_k2" else name for i, (name, _, _) in enumerate(calls)]
    written = (
        f"{tokens.call}{name}{tokens.arguments}{text or '{}'}{tokens.end_call}"
        for name, (_, text, _) in zip(names, calls, strict=True)
    )
    return f"{tokens.begin}{''.join(written)}{tokens.end}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

"""Arguments of a tool call, written as plain text or as Python, become JSON of the types in the tool's schema."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

_MAX_DEPTH = 16
_KINDS: Mapping[type, str] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
_WORDS: Mapping[str, Any] = {"true": True, "false": False, "null": None, "none": None}
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_PYTHON_ESCAPES = "\\'\"abfnrtvxuUN01234567\n"


def from_text(text: str, parameters: Mapping[str, Any], key: str) -> str:
    """JSON of an argument that stands between tags.

    Args:
        text: what stands there.
        parameters: the tool's schema; an empty one allows every type.
        key: the argument's name.
    """
    types = types_of(parameters, key)
    if types == {"string"}:
        return _quoted(text)
    readings = _readings(text.strip())
    if types:
        readings = [
            reading for reading in readings if reading[0] in types or (reading[0] == "integer" and "number" in types)
        ]
    if readings:
        return readings[0][1]
    number = _integral(text) if "integer" in types else None
    return _quoted(text) if number is None else number


def from_python(source: str, parameters: Mapping[str, Any], key: str) -> str:
    """JSON of an argument that is a Python literal, or a JSON value; anything else is a string of its source.

    Args:
        source: the expression.
        parameters: the tool's schema.
        key: the argument's name.
    """
    types = types_of(parameters, key)
    try:
        value = _literal(source)
    except ValueError:
        return from_text(source, parameters, key)
    if isinstance(value, str):
        return _quoted(value) if not types or "string" in types else from_text(value, parameters, key)
    if types == {"string"} and not isinstance(value, list | dict):
        return _quoted(source.strip())
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def begun(text: str, parameters: Mapping[str, Any], key: str) -> str:
    """The beginning of an argument's JSON, where the output ends inside it."""
    return _quoted(text)[:-1] if types_of(parameters, key) in ({"string"}, frozenset()) else text.strip()


def types_of(parameters: Mapping[str, Any], key: str) -> frozenset[str]:
    """JSON types that a schema allows for an argument; empty where it allows all."""
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    if schema is None:
        schema = parameters.get("additionalProperties")
    return frozenset(_types(schema, parameters, 0))


def property_names(parameters: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of a tool's arguments in the order of its schema."""
    properties = parameters.get("properties")
    return tuple(properties) if isinstance(properties, Mapping) else ()


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[str]:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return
    if isinstance(schema.get("$ref"), str):
        yield from _types(_resolve(schema["$ref"], root), root, depth + 1)
    stated = schema.get("type")
    yield from (name for name in ([stated] if isinstance(stated, str) else stated or ()) if isinstance(name, str))
    if stated is None:
        values = [schema["const"]] if "const" in schema else schema.get("enum") or ()
        yield from (_KINDS[type(value)] for value in values if type(value) in _KINDS)
        for choice in ("anyOf", "oneOf", "allOf"):
            for alternative in schema.get(choice) or ():
                yield from _types(alternative, root, depth + 1)


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    schema: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        schema = schema.get(name) if isinstance(schema, Mapping) else None
    return schema


def _readings(text: str) -> list[tuple[str, str]]:
    """Readings of a text other than as a string, as type and JSON, best first."""
    readings = []
    try:
        value = json.loads(text, parse_constant=_refuse)
        if not isinstance(value, str):
            readings.append((_KINDS[type(value)], text))
    except (ValueError, RecursionError):
        pass
    if text.lower() in _WORDS:
        value = _WORDS[text.lower()]
        readings.append((_KINDS[type(value)], json.dumps(value)))
    elif text[:1] in ("[", "{", "(") and not readings:
        try:
            value = _literal(text)
            readings.append((_KINDS[type(value)], json.dumps(value, ensure_ascii=False, allow_nan=False)))
        except ValueError:
            pass
    return readings


def _integral(text: str) -> str | None:
    """A whole number that is written with a point."""
    whole, point, zeros = text.strip().partition(".")
    is_whole = bool(point) and whole.lstrip("-").isdecimal() and whole.isascii() and not zeros.strip("0")
    return str(int(whole)) if is_whole and len(whole) < 1000 else None


def _literal(source: str) -> Any:
    """The value of a Python literal, in which JSON's words may stand.

    Raises:
        ValueError: it is none, or has no JSON form.
    """
    with suppress(ValueError, RecursionError):  # JSON first: Python reads a surrogate pair as two characters
        return json.loads(source, parse_constant=_refuse)
    try:
        tree = ast.parse(_ESCAPE.sub(_escaped, source.strip()), mode="eval")
        value = _value(tree.body)
        json.dumps(value, allow_nan=False)
    except (SyntaxError, RecursionError, MemoryError, TypeError) as error:
        raise ValueError("no literal") from error
    return value


def _escaped(match: re.Match[str]) -> str:
    return match[0] if match[1] in _PYTHON_ESCAPES else "\\" + match[0]


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in _KINDS:
        return node.value
    if isinstance(node, ast.Name) and node.id.lower() in _WORDS:
        return _WORDS[node.id.lower()]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        if type(value) in (int, float):
            return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [_value(element) for element in node.elts]
    if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
        keys = [_value(key) for key in node.keys if key is not None]
        return {key: _value(element) for key, element in zip(map(_as_key, keys), node.values, strict=True)}
    raise ValueError("no literal")


def _as_key(value: Any) -> str:
    if isinstance(value, str):
        return value
    if type(value) in (int, float, bool, type(None)):
        return json.dumps(value)
    raise ValueError("no key")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse(name: str) -> Any:
    raise ValueError(name)

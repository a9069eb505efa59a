"""From the bytes of a body to a typed request: strict JSON, and errors that name the field."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from specdec_cli.files import RepeatedKeyError, parse_json
from specdec_cli.recipe.schema import Serve
from specdec_cli.serve.errors import ApiError, bad_field
from specdec_cli.serve.protocol import TOO_MANY, AnyBody, ListLengths

_MAX_DIGITS = 30
_NO_JSON = ("NaN", "Infinity", "-Infinity")
_JSON_WORDS = {"False": "false", "True": "true"}
# A string goes to its end or to the body's, and nothing of it is tried twice: this is linear whatever the body is.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)


def parse(kind: type[AnyBody], body: bytes, limits: Serve) -> tuple[AnyBody, list[str]]:
    """A request and the paths of its unknown fields (for the header `x-specdec-ignored`).

    Args:
        kind: the model of the route.
        body: the HTTP body.
        limits: of bytes and depth.

    Raises:
        ApiError: 413 for a body too large; else 400 naming the field: no JSON, invalid UTF-8, NaN or Infinity, a key
            twice, too deep, a list too long, a wrong type, a value out of range.
    """
    document = _load(body, limits)
    refusal = request = None
    try:
        request = kind.model_validate(document, context=ListLengths(limits))
    except ValidationError as error:
        refusal = error
        if any(detail["type"] == TOO_MANY for detail in error.errors(include_url=False)):
            raise _refusal(kind, document, error) from None
    _check_values(document, ())
    if refusal is not None:
        raise _refusal(kind, document, refusal)
    assert request is not None, "it was refused or read"
    return request, request.ignored()


def read_json(body: bytes, limits: Serve) -> dict[str, Any]:
    """A JSON object of a body, strictly.

    Raises:
        ApiError: as `parse`.
    """
    document = _load(body, limits)
    _check_values(document, ())
    return document


def _load(body: bytes, limits: Serve) -> dict[str, Any]:
    """A JSON object whose numbers and texts are still to be checked."""
    if len(body) > limits.max_body_bytes:
        raise ApiError(
            413,
            f"the body has `{len(body)}` bytes, and at most `{limits.max_body_bytes}` are taken",
            code="body_too_large",
        )
    _check_depth(body, limits.max_json_depth)
    try:
        document = parse_json(body.decode("utf-8"), parse_int=_parse_int, parse_constant=_Unreadable)
    except RepeatedKeyError as error:
        raise bad_field(_printable(str(error)), "is given twice", "invalid_json") from None
    except UnicodeDecodeError as error:
        raise bad_field(None, f"the body is not valid UTF-8 at byte `{error.start}`", "invalid_json") from None
    except json.JSONDecodeError as error:
        message = f"the body is not valid JSON: {error.msg} at line `{error.lineno}`, column `{error.colno}`"
        raise bad_field(None, message, "invalid_json") from None
    if not isinstance(document, dict):
        raise bad_field(None, "the body must be a JSON object", "invalid_json")
    return document


def field_path(path: Sequence[str | int]) -> str:
    """A place in a body as people write it: `messages[0].content`."""
    joined = ""
    for part in path:
        joined += f"[{part}]" if isinstance(part, int) else f".{part}" if joined else part
    return joined


class _Unreadable(str):
    """Stands for a number that no field takes, until the place where it stands is known."""

    __slots__ = ()


def _parse_int(digits: str) -> int | _Unreadable:
    return int(digits) if len(digits) <= _MAX_DIGITS else _Unreadable(f"a number of {len(digits)} digits")


def _check_depth(body: bytes, limit: int) -> None:
    """Refuse what is nested too deeply before a recursive parser sees it, naming the outermost field."""
    depth, name = 0, b""
    for match in _TOKEN.finditer(body):
        token = match[0]
        if token in b"[{":
            depth += 1
            if depth > limit:
                field = _printable(name[1:-1].decode("utf-8", "replace")) or None
                raise bad_field(
                    field, f"is nested more than `{limit}` deep" if field else "the body is nested too deep"
                )
        elif token in b"]}":
            depth -= 1
        elif depth == 1:
            name = token


def _check_values(value: object, path: tuple[str | int, ...]) -> None:
    """Refuse numbers that are none and text that is none, by their field."""
    if isinstance(value, _Unreadable) or (isinstance(value, float) and not math.isfinite(value)):
        if value in _NO_JSON:
            raise bad_field(field_path(path), f"holds `{value}`, which JSON does not allow")
        raise bad_field(field_path(path), f"must be a finite number of a sensible size, not `{value}`")
    if isinstance(value, str):
        if not value.isascii() and not _is_text(value):
            raise bad_field(field_path(path), "holds half of a surrogate pair, which is no text")
    elif isinstance(value, dict):
        for name, item in value.items():
            if not _is_text(name):
                raise bad_field(field_path(path) or None, "has a key with half of a surrogate pair, which is no text")
            _check_values(item, (*path, name))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            if type(item) is not int:
                _check_values(item, (*path, i))


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _printable(name: str) -> str:
    return name.encode("utf-8", "replace").decode()[:100]


def _refusal(kind: type[AnyBody], document: dict[str, Any], error: ValidationError) -> ApiError:
    """A 400 for pydantic's errors at one field. The errors of a union, one for each member, are joined."""
    errors = error.errors(include_url=False)
    long = next((each for each in errors if each["type"] == TOO_MANY), None)
    if long is not None:
        return bad_field(field_path(_place(document, long)), long["msg"])
    rivals = [rival for rival in errors if rival["loc"][:1] == errors[0]["loc"][:1]]
    field = kind.model_fields.get(str(errors[0]["loc"][0]))
    if len(rivals) > 1 and field is not None and field.description and all(_is_about_type(rival) for rival in rivals):
        return bad_field(str(errors[0]["loc"][0]), f"must be {field.description}, not `{_short(errors[0]['input'])}`")
    chosen = max(rivals, key=lambda rival: (not _is_about_type(rival), len(_place(document, rival))))
    where = _place(document, chosen)
    if chosen["type"] == "missing":
        return bad_field(field_path(where), "is missing")
    alike = [rival for rival in rivals if _is_about_type(rival) == _is_about_type(chosen)]
    messages = dict.fromkeys(_told(rival) for rival in alike if _place(document, rival) == where)
    return bad_field(field_path(where), f"{' or '.join(messages)}, not `{_short(chosen['input'])}`")


def _is_about_type(error: ErrorDetails) -> bool:
    return error["type"].endswith("_type")


def _place(document: dict[str, Any], error: ErrorDetails) -> tuple[str | int, ...]:
    """Place of the error: pydantic's location without the tags of union members."""
    path: list[str | int] = []
    value: Any = document
    for part in error["loc"]:
        is_key = isinstance(value, dict) and part in value
        if is_key or (isinstance(value, list) and isinstance(part, int)):
            value = value[part]
            path.append(part)
    return (*path, error["loc"][-1]) if error["type"] == "missing" else tuple(path)


def _told(error: ErrorDetails) -> str:
    """Pydantic's message in JSON's words."""
    message = error["msg"]
    if error["type"] == "literal_error":
        expected = str(error["ctx"]["expected"])
        if expected == "None":
            return "is not supported: only `null` is neutral here"
        return f"must be {_JSON_WORDS.get(expected, expected)}"
    if error["type"] == "model_type":
        return "must be an object"
    message = re.sub("^(Input|Value|String|List|Dictionary) should ", "must ", message)
    message = re.sub(" after validation, not [0-9]+$", "", message)
    return message.replace("a valid dictionary", "an object")


def _short(value: object) -> str:
    start = value[:80] if isinstance(value, list | str) else value
    text = json.dumps(start, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."

"""A recipe for other eyes: YAML that reads back as itself, and the JSON Schema for editors."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from specdec_cli.recipe.document import plain_value
from specdec_cli.recipe.draft import DraftMethods
from specdec_cli.recipe.resolve import Resolved
from specdec_cli.recipe.schema import Recipe

_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string"}


def to_yaml(resolved: Resolved, origins: bool = False, only: Collection[str] | None = None) -> str:
    """A resolved recipe as YAML.

    Args:
        resolved: the recipe.
        origins: whether a comment names the origin of every value.
        only: the values to write, as `section.key`; None writes all.
    """
    lines, document = [], resolved.recipe.as_dict()
    document["sampling"]["logit_bias"] = resolved.recipe.sampling.logit_bias  # whole numbers, which are no JSON's keys
    for section, all_keys in document.items():
        keys = {key: value for key, value in all_keys.items() if only is None or f"{section}.{key}" in only}
        if not keys:
            continue
        lines.append(f"{section}:")
        rows = [(f"  {key}: {yaml_value(value)}", f"{section}.{key}") for key, value in keys.items()]
        width = min(max(len(text) for text, _ in rows), 44)
        for text, path in rows:
            lines.append(f"{text:<{width}}  # {_one_line(resolved.origins[path])}" if origins else text)
    return "\n".join(lines) + "\n"


def _one_line(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def yaml_value(value: Any) -> str:
    """A value as YAML writes it in one line; the loader reads it back as the same."""
    if isinstance(value, str):
        plain = re.fullmatch(r"[A-Za-z0-9][\w./+%-]*(:[\w./+%-]+)*", value, re.ASCII) and plain_value(value) == value
        return value if plain else _quoted(value)
    if isinstance(value, list):
        return f"[{', '.join(map(yaml_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{yaml_value(key)}: {yaml_value(item)}' for key, item in value.items())}}}"
    return json.dumps(value, allow_nan=False)


def _quoted(text: str) -> str:
    """Text in double quotes; what is not ASCII as one escape, which YAML and JSON write differently beyond U+FFFF."""
    inner = json.dumps(text, ensure_ascii=False)
    return "".join(letter if " " <= letter <= "~" else _escape(ord(letter)) for letter in inner)


def _escape(code: int) -> str:
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def json_schema(methods: DraftMethods | None = None) -> dict[str, Any]:
    """The JSON Schema of recipes, for editors that complete and check YAML as it is typed."""
    schema = Recipe.model_json_schema()
    draft = schema["$defs"]["Draft"]
    if methods is not None:
        draft["additionalProperties"] = False
        draft["properties"]["method"]["enum"] = [*methods.names, None]
        for method in methods.names:
            for option, default in methods.options(method).items():
                draft["properties"].setdefault(option, _option_schema(method, default))
    single = schema["properties"]["draft"]
    many = {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/Draft"}, "description": "For compare-drafts."}
    schema["properties"]["draft"] = {"anyOf": [{"$ref": "#/$defs/Draft"}, many]} | {
        key: value for key, value in single.items() if key != "$ref"
    }
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "specdec recipe"}
    return head | {key: value for key, value in schema.items() if key != "title"}


def _option_schema(method: str, default: Any) -> Mapping[str, Any]:
    kind = _NAMES.get(type(default))
    described = {"description": f"Option of the drafting method {method}."}
    return described | ({"type": kind, "default": default} if kind else {})

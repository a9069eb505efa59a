"""The page at `/docs`: the OpenAPI document as plain HTML, without scripts and without anything from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from specdec_cli.serve.page import WebPage, page_of

_STYLE = """
:root { color-scheme: light dark; --dim: #5a6068; --line: #d5d8dc; }
@media (prefers-color-scheme: dark) { :root { --dim: #a4abb4; --line: #3a4048; } }
body { max-width: 70rem; margin: 0 auto; padding: 1rem; font: 16px/1.5 system-ui, sans-serif; }
h2 { margin: 2rem 0 .25rem; padding-top: .75rem; border-top: 1px solid var(--line); font-size: 1.1rem; }
h3 { margin: 1rem 0 .25rem; font-size: 1rem; }
code { overflow-wrap: anywhere; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .2rem .75rem .2rem 0; border-bottom: 1px solid var(--line); }
th { color: var(--dim); font-weight: 600; }
"""


def reference_page(document: Mapping[str, Any]) -> WebPage:
    """The page of an OpenAPI document."""
    info = document["info"]
    schemas = document.get("components", {}).get("schemas", {})
    title = escape(f"{info['title']} {info['version']}")
    bodies: dict[str, None] = {}
    routes = "".join(_route(path, verbs, bodies) for path, verbs in document["paths"].items())
    models = "".join(_model(name, schemas[name]) for name in _with_parts(bodies, schemas))
    return page_of(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}: HTTP API</title>'
        f"<style>{_STYLE}</style></head><body><h1>{title}: HTTP API</h1>"
        '<p>The same as a document for programs: <a href="openapi.json">openapi.json</a>. '
        'The <a href="./">page</a> lets you try the model.</p>'
        f"{routes}{models}</body></html>\n"
    )


def _route(path: str, operations: Mapping[str, Any], bodies: dict[str, None]) -> str:
    parts = []
    for verb, operation in operations.items():
        parts.append(f"<h2><code>{verb.upper()} {escape(path)}</code></h2><p>{_prose(operation['description'])}</p>")
        content = operation.get("requestBody", {}).get("content", {})
        for kind in content.values():
            name = _name(kind["schema"])
            bodies[name] = None
            parts.append(f'<p>Body: <a href="#{escape(name)}">{escape(name)}</a></p>')
        rows = (
            (f"<code>{status}</code>", _prose(response["description"]))
            for status, response in operation["responses"].items()
        )
        parts.append(_table(("status", "meaning"), rows))
    return "".join(parts)


def _model(name: str, schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = (
        (f"<code>{escape(field)}</code>{' (required)' if field in required else ''}", _type(part), _words(part))
        for field, part in schema.get("properties", {}).items()
    )
    head = f'<h2 id="{escape(name)}">{escape(name)}</h2><p>{_prose(schema.get("description", ""))}</p>'
    return head + _table(("field", "type", "description"), rows)


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="table"><table><tr>{"".join(f"<th>{part}</th>" for part in head)}</tr>{body}</table></div>'


def _with_parts(names: Mapping[str, None], schemas: Mapping[str, Any]) -> list[str]:
    """The schemas of these names and all that they refer to, each once."""
    names_seen: dict[str, None] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop(0)
        if name not in names_seen:
            names_seen[name] = None
            waiting += _references(schemas[name])
    return list(names_seen)


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield _name(schema)
        for value in schema.values():
            yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)


def _name(schema: Mapping[str, Any]) -> str:
    return str(schema["$ref"]).rsplit("/", 1)[-1]


def _type(schema: Mapping[str, Any]) -> str:
    """A schema in a few words, as HTML."""
    if "$ref" in schema:
        name = escape(_name(schema))
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_type, schema["anyOf"])))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"<code>{escape(_literal(value))}</code>" for value in values)
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}" if "items" in schema else "list"
    return escape(str(schema.get("type", "any"))) + _range(schema)


def _literal(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _range(schema: Mapping[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": "&gt;", "maximum": "≤", "exclusiveMaximum": "&lt;"}
    bounds = [f"{sign} {schema[name]}" for name, sign in signs.items() if name in schema]
    return f" {', '.join(bounds)}" if bounds else ""


def _words(schema: Mapping[str, Any]) -> str:
    return _prose(str(schema.get("description", "")))


def _prose(text: str) -> str:
    """A description as HTML: what stands in backticks is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))

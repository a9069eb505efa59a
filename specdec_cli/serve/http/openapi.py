"""The server's own description: bodies as their models say, answers with their errors."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from specdec_cli import __version__
from specdec_cli.serve.protocol import Body

_REF = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_WORDS = {
    400: "The request is wrong; `param` names the field.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    408: "The body did not arrive in time.",
    413: "The body is too long.",
    415: "The body is not JSON.",
    429: "The queue is full; `Retry-After` says when to try again.",
    503: "The server is loading, shutting down or stuck.",
    504: "The time is up.",
}
_BODIES: dict[str, type[Body]] = {}


def body_of(kind: type[Body]) -> dict[str, Any]:
    """A route's request body in OpenAPI."""
    _BODIES[kind.__name__] = kind
    schema = {"$ref": _REF.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def responses(*statuses: int, takes_body: bool = False, generates: bool = False) -> dict[int | str, dict[str, Any]]:
    """A route's responses in OpenAPI.

    Args:
        statuses: of errors beside those that follow.
        takes_body: it reads JSON and needs a model.
        generates: it decodes.
    """
    known = {400, 401, *statuses}
    known |= {404, 408, 413, 415, 503} if takes_body or generates else set()
    known |= {429, 504} if generates else set()
    error = {"application/json": {"schema": _ERROR}}
    answers: dict[int | str, dict[str, Any]] = {
        status: {"description": _WORDS[status], "content": error} for status in sorted(known)
    }
    if generates:
        stream = {"text/event-stream": {"schema": {"type": "string"}}}
        answers[200] = {"description": "The answer, or with `stream` its chunks.", "content": stream}
    return answers


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, made once."""
    if app.openapi_schema is None:
        document = get_openapi(title="specdec", version=__version__, routes=app.routes)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for name, kind in _BODIES.items():
            schema = kind.model_json_schema(ref_template=_REF, mode="validation")
            schemas |= schema.pop("$defs", {})
            schemas[name] = schema
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        app.openapi_schema = document
    return app.openapi_schema

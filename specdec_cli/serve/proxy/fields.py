"""Fields of requests that specdec has and another engine has not; it would pass over them in silence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specdec_cli.serve.errors import ApiError

_AT_ITS_START = "it drafts as it was started, and reports this request's acceptance by itself"
REFUSED: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        "speculative": _AT_ITS_START,
        "speculative.n_max": _AT_ITS_START,
        "speculative.n_min": _AT_ITS_START,
        "speculative.p_min": _AT_ITS_START,
        "prediction": "it drafts from no predicted text",
    }
}
"""By engine and field: the reason."""


def check_fields(body: bytes, refused: Mapping[str, str], name: str) -> None:
    """Refuse a request that uses one of these fields.

    Args:
        body: JSON. What is none is left to the engine, which refuses it.
        refused: fields with their reasons.
        name: the engine, for people.

    Raises:
        ApiError: 400 that names the field.
    """
    try:
        found: Any = json.loads(body)
    except (ValueError, RecursionError):
        return
    for field, reason in refused.items():
        if isinstance(found, dict) and found.get(field) is not None:
            raise ApiError(400, f"`{field}` has no effect with {name}: {reason}", param=field, code="unsupported")

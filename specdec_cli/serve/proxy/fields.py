"""Fields of requests that specdec has and another engine has not; it would pass over them in silence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdec_cli.serve.errors import ApiError, bad_field

_AT_ITS_START = "it drafts as it was started, and reports this request's acceptance by itself"
_OF_SPECDEC = {
    "speculative": _AT_ITS_START,
    "speculative.n_max": _AT_ITS_START,
    "speculative.n_min": _AT_ITS_START,
    "speculative.p_min": _AT_ITS_START,
    "prediction": "it drafts from no predicted text",
}


@dataclass(frozen=True, slots=True)
class ProxiedEngine:
    """An engine behind our server.

    Args:
        refused: fields of requests that it does not have, with their reasons.
        version_path: route that tells its version.
        version_key: where that stands in the answer.
    """

    refused: Mapping[str, str]
    version_path: str = "/version"
    version_key: str = "version"


PROXIED = {
    "vllm": ProxiedEngine(
        _OF_SPECDEC | {"return_spec_tokens_details": "it reports acceptance in `metrics.speculative_decoding`"}
    ),
    "llamacpp": ProxiedEngine(
        _OF_SPECDEC
        | {
            "return_spec_tokens_details": "it reports acceptance in `timings`",
            "cache_salt": "its slots share cached prompts among all requests",
        },
        version_path="/props",
        version_key="build_info",
    ),
}
"""By the engine's name."""


def check_fields(document: Mapping[str, Any], refused: Mapping[str, str], name: str) -> None:
    """Refuse a request that uses one of these fields.

    Raises:
        ApiError: 400 that names the field.
    """
    for field, reason in refused.items():
        if document.get(field) is not None:
            raise ApiError(400, f"`{field}` has no effect with {name}: {reason}", param=field, code="unsupported")


def salted(body: bytes, document: dict[str, Any], salt: str) -> bytes:
    """The body for the engine: `cache_salt` begins with that of the API key, so that keys share no cached prompts.

    Args:
        body: as the client sent it; it stays so without keys.
        document: what it says.
        salt: of the API key; empty without keys.

    Raises:
        ApiError: 400, the request's own salt is no text.
    """
    if not salt:
        return body
    own = document.get("cache_salt")
    if own is not None and not isinstance(own, str):
        raise bad_field("cache_salt", "must be a string")
    joined = salt if own is None else f"{salt}/{own}"
    return json.dumps(document | {"cache_salt": joined}, ensure_ascii=False).encode()

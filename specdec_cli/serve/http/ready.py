"""The lines of a server that is ready: what it serves, where its page is, and a command that tries it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec_cli.serve.models import Model, Models

_ANY = {"//0.0.0.0:": "//127.0.0.1:", "//[::]:": "//[::1]:"}
_TRY_TOKENS = 64


def ready_lines(models: Models, url: str) -> Iterator[str]:
    """The lines that a user needs once the server accepts requests."""
    yield f"serving {', '.join(models.names)} at {url}"
    for model in models.all:
        name = f"{model.name}: " if len(models.all) > 1 else ""
        suggested = f", generation config: {model.suggested}" if model.suggested else ""
        yield f"{name}target {model.root}, {model.drafting}{suggested}"
    near = _near(url)
    yield f"page {near}/, API reference {near}/docs"


def curl_line(models: Models, url: str, key_variable: str | None) -> str:
    """A command that tries the first model.

    Args:
        models: what is served.
        url: where the server listens.
        key_variable: environment variable that holds the API key; None without keys.
    """
    return _curl(models.all[0], _near(url), key_variable, is_named=len(models.all) > 1)


def _near(url: str) -> str:
    """The address on this machine of a server that listens on all of the machine's."""
    for everywhere, here in _ANY.items():
        url = url.replace(everywhere, here)
    return url


def _curl(model: Model, url: str, key_variable: str | None, is_named: bool) -> str:
    """A request that the model can answer: a chat where it has a chat template, else a completion."""
    has_template = model.loaded is None or _has_template(model)
    body: dict[str, Any] = {"model": model.name} if is_named else {}
    if has_template:
        body["messages"] = [{"role": "user", "content": "Tell me a story"}]
    else:
        body["prompt"] = "Once upon a time"
    body |= {"max_tokens": _TRY_TOKENS, "temperature": 0}
    key = f' -H "Authorization: Bearer ${key_variable}"' if key_variable else ""
    route = "chat/completions" if has_template else "completions"
    data = shlex.quote(json.dumps(body, ensure_ascii=False))
    return f"curl {url}/v1/{route} -H 'Content-Type: application/json'{key} -d {data}"


def _has_template(model: Model) -> bool:
    tokenizer = model.info.tokenizer
    return tokenizer is not None and bool(tokenizer.chat_template)

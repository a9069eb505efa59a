"""`--speculative-config`: vLLM's JSON about speculation, as the recipe's keys that mean the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specdec_cli.errors import UsageError, did_you_mean

FLAG = "--speculative-config"
_KEYS = {
    "num_speculative_tokens": "speculation.num_speculative_tokens",
    "disable_by_batch_size": "speculation.disable_by_batch_size",
    "draft_tensor_parallel_size": "draft.tensor_parallel_size",
    "revision": "draft.revision",
}
_DRAFT = ("model", "method", "prompt_lookup_max", "prompt_lookup_min")
_NEUTRAL = (
    *("quantization", "max_model_len", "code_revision", "enforce_eager", "parallel_drafting"),
    *("speculative_token_tree", "disable_padded_drafter_batch", "draft_load_config"),
)
"""Keys of vLLM's that mean nothing here while they are null or false."""
_NGRAM = ("ngram", "[ngram]")


def read_speculative_config(text: str) -> dict[str, tuple[Any, str]]:
    """The recipe's keys with their values, and each one's name in messages.

    Raises:
        UsageError: no JSON object, a key that is unknown or not supported, or no draft.
    """
    given = _parse(text)
    known = [*_KEYS, *_DRAFT]
    for key, value in given.items():
        if key in _NEUTRAL and value not in (None, False):
            raise UsageError(f"`{FLAG}` sets `{key}`, which is not supported", f"supported: {', '.join(known)}")
        if key not in (*known, *_NEUTRAL):
            message = f"`{FLAG}` has the unknown key `{key}`{did_you_mean(key, known)}"
            raise UsageError(message, f"supported: {', '.join(known)}")
    said = {key: value for key, value in given.items() if value is not None and key in known}
    found: dict[str, tuple[Any, str]] = {"draft": (_draft(said), FLAG)}
    return found | {path: (said[key], f"{FLAG} {key}") for key, path in _KEYS.items() if key in said}


def _parse(text: str) -> dict[str, Any]:
    hint = """for example `--speculative-config '{"model": "./draft", "num_speculative_tokens": 4}'`"""
    try:
        given = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"`{FLAG}` is not JSON: {error}", hint) from None
    if not isinstance(given, dict):
        raise UsageError(f"`{FLAG}` must be a JSON object, not `{text[:60]}`", hint)
    return given


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"`{FLAG}` has `{twice}` twice", "give it once")
    return dict(pairs)


def _draft(said: Mapping[str, Any]) -> dict[str, Any]:
    """The draft as a recipe names it."""
    model, method = said.get("model"), said.get("method")
    if method is None and model in _NGRAM:
        method = "ngram"
    if method in _NGRAM:
        return _ngram(said)
    for key in ("prompt_lookup_max", "prompt_lookup_min"):
        if key in said:
            raise UsageError(f"`{FLAG}` sets `{key}`, which is for the method `ngram`", "leave it out")
    if method not in (None, "draft_model"):
        raise UsageError(f"`{FLAG}` asks for the method `{method}`, which is not supported", "use draft_model or ngram")
    if model is None:
        raise UsageError(f"`{FLAG}` names no draft", "give it a `model`, or the method `ngram`")
    return {"model": model}


def _ngram(said: Mapping[str, Any]) -> dict[str, Any]:
    """Prompt lookup; where one bound alone is given it is both, as in vLLM."""
    if said.get("model") not in (None, *_NGRAM):
        raise UsageError(f"`{FLAG}` gives the method `ngram` a model", "leave one of them out")
    for key in ("revision", "draft_tensor_parallel_size"):
        if key in said:
            raise UsageError(f"`{FLAG}` sets `{key}`, which is for a draft model", "leave it out")
    most, least = said.get("prompt_lookup_max"), said.get("prompt_lookup_min")
    if most is None and least is None:
        return {"method": "ngram"}
    return {"method": "ngram", "max": least if most is None else most, "min": most if least is None else least}

"""Checks of requests before anything runs: prompts in three forms, and the reasons to refuse one."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specdec_cli.call_checks import check_kind
from specdec_cli.engine.prompts import check_unicode
from specdec_cli.errors import UsageError
from specdec_cli.sampling.params import SamplingParams

if TYPE_CHECKING:
    from specdec_cli.sampling.grammar import Grammar
    from specdec_cli.text.tokenizer import Tokenizer

Prompt = str | list[int] | list[dict[str, str]]
_FORMS = 'a prompt is text, a list of token ids, or a list of messages such as {"role": "user", "content": "Hi"}'
_MOST_SHOWN = 60  # characters of a value in an error


def encode(prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    """Token ids of a prompt: text, ids as they are, or chat messages by the template.

    Raises:
        UsageError: none of them, or text or messages without a tokenizer.
    """
    given: Any = prompt
    is_chat = _is_list(given) and len(given) > 0 and isinstance(given[0], dict)
    if not isinstance(given, str) and not is_chat:
        return _token_ids(given)
    if is_chat:
        _check_messages(given)
    else:
        check_unicode(given, "the prompt")
    if tokenizer is None:
        raise UsageError("a prompt of text needs a tokenizer", "give token ids")
    return tokenizer.chat(given) if is_chat else tokenizer.encode(given)


def _is_list(value: Any) -> bool:
    """Whether a value holds others by their places: a list, a tuple, an array or a tensor."""
    return all(hasattr(value, name) for name in ("__len__", "__getitem__")) and not isinstance(value, bytes | Mapping)


def _token_ids(given: Any) -> list[int]:
    try:
        if _is_list(given) and not any(isinstance(token, bool) for token in given):
            return [operator.index(token) for token in given]
    except TypeError:
        pass
    raise UsageError(f"a prompt cannot be `{_shown(given)}`", _FORMS)


def _check_messages(messages: Sequence[Any]) -> None:
    for message in messages:
        is_whole = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        content = message.get("content") if is_whole else None
        if not isinstance(content, str | list) and not (content is None and is_whole and message.get("tool_calls")):
            raise UsageError(f"`{_shown(message)}` is no chat message", _FORMS)
        parts = [part.get("text") for part in content or () if isinstance(part, Mapping)]
        for text in [content, *parts] if isinstance(content, list | tuple) else [content]:
            if isinstance(text, str):
                check_unicode(text, "a message")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 1] + "…"


def text_of(prompt: Prompt, tokens: list[int], tokenizer: Tokenizer | None) -> str | None:
    """A prompt's text: as it was given, else its tokens'; None for token ids without a tokenizer."""
    if isinstance(prompt, str):
        return prompt
    return None if tokenizer is None else tokenizer.decode(tokens)


def check(
    tokens: Sequence[int],
    params: SamplingParams,
    num_tokens: int,
    max_context: int,
    prediction: Sequence[int] = (),
) -> None:
    """Refuse a request that cannot run.

    Raises:
        UsageError: an empty prompt, no room left in the context, a token id that does not exist.
    """
    if not tokens:
        raise UsageError("the prompt is empty", "give at least one token")
    if len(tokens) >= max_context:
        raise UsageError(
            f"the prompt has `{len(tokens)}` tokens, and the target's context is `{max_context}`",
            "shorten the prompt, or raise --max-model-len if it was set",
        )
    for name, ids in (
        ("the prompt", tokens),
        ("the prediction", prediction),
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
    ):
        wrong = next((token for token in ids if not 0 <= token < num_tokens), None)
        if wrong is not None:
            raise UsageError(f"{name} names token `{wrong}`, and the vocabulary has `{num_tokens}` tokens")


def check_tokenizer(tokenizer: Tokenizer | None, params: SamplingParams, grammar: Grammar | None) -> None:
    """Refuse a request that needs another tokenizer than the engine's.

    Raises:
        UsageError: stop strings without one, or a grammar that was compiled for another one.
    """
    if params.stop and tokenizer is None:
        raise UsageError("stop strings need a tokenizer", "use stop_token_ids")
    if grammar is not None and tokenizer is not None and grammar.tokenizer is not tokenizer:
        raise UsageError("the grammar was compiled for another tokenizer", "compile it for the engine's own")


def spread(params: SamplingParams | Sequence[SamplingParams] | None, num: int) -> list[SamplingParams]:
    """Sampling parameters for each of `num` prompts; one set serves all, its noise's index counted up row by row.

    Raises:
        UsageError: another number of sets than of prompts, or something else.
    """
    check_kind("params", params, SamplingParams | tuple[SamplingParams, ...] | None)
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [replace(params, index=params.index + i) for i in range(num)]
    if len(params) != num:
        raise UsageError(f"`{len(params)}` sets of sampling parameters for `{num}` prompts")
    return list(params)


def params_of(params: SamplingParams | None) -> SamplingParams:
    """A request's sampling parameters, the defaults without any.

    Raises:
        UsageError: something else was given.
    """
    check_kind("params", params, SamplingParams | None)
    return params or SamplingParams()


def as_many(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Prompts as a list, also where one alone was given: a text, token ids, or chat messages.

    Raises:
        UsageError: neither.
    """
    given: Any = prompts
    if not _is_list(given):
        raise UsageError(f"prompts cannot be `{_shown(given)}`", _FORMS)
    is_one = isinstance(given, str) or (
        len(given) > 0 and (isinstance(given[0], dict) or hasattr(given[0], "__index__"))
    )
    return [given] if is_one else given

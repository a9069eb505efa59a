"""Conversations in tokens, and which of these the assistant wrote: what a model that answers is trained on.

A template says it by `{% generation %}` around what the assistant writes. Of others, a conversation is rendered up to
the head of each answer and up to its end, and the texts are compared.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec_cli.errors import UsageError
from specdec_cli.text.tokenizer import Tokenizer

_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class AnsweredChat:
    """A conversation, or the part of it that a template renders as one text.

    Args:
        tokens: of the whole.
        is_answer: of each token, whether the assistant wrote it.
    """

    tokens: list[int]
    is_answer: list[bool]


def answered_chats(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], end_tokens: Collection[int]
) -> list[AnsweredChat]:
    """The texts of a conversation in which every message of the assistant is an answer of exactly one text.

    A message of the assistant that begins the conversation, as in many ShareGPT rows, answers nothing.
    It is one text, unless the template changes earlier messages as the conversation grows, for example drops their
    thoughts. Then each answer that was changed stands in a text of its own, as the model saw it when it answered.

    Args:
        tokenizer: with a chat template.
        messages: the conversation, at least one of them the assistant's; the last one, too, or it is left out.
        end_tokens: tokens that end the target's outputs; what a template writes behind one is no part of an answer.

    Raises:
        UsageError: there is no template, it refuses the messages, or it does not begin an answer as it asks for one.
    """
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant" and place]
    assert places, "there is an answer"
    if _TAG.search(tokenizer.chat_template) and getattr(tokenizer.hf, "is_fast", False):
        return [_tagged(tokenizer, messages[: places[-1] + 1])]
    answers = [_rendered(tokenizer, messages, place) for place in places]
    groups: list[list[tuple[str, str]]] = []
    for head, whole in answers:
        if groups and head.startswith(groups[-1][-1][1]):
            groups[-1].append((head, whole))
        else:
            groups.append([(head, whole)])
    return [_compared(tokenizer, group, end_tokens) for group in groups]


def _tagged(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> AnsweredChat:
    """A conversation by a template that tags what the assistant writes."""
    tokenizer.render_chat(messages, add_generation_prompt=False)  # which refuses in our words
    encoded = tokenizer.hf.apply_chat_template(
        list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **tokenizer.chat_variables
    )
    tokens, is_answer = list(encoded["input_ids"]), [bool(mask) for mask in encoded["assistant_masks"]]
    if messages[0]["role"] == "assistant":
        first = tokenizer.render_chat(messages[:1], add_generation_prompt=False)
        num = _num_common(tokens, tokenizer.encode(first, add_special_tokens=False))
        is_answer[:num] = [False] * num
    return AnsweredChat(tokens, is_answer)


def _rendered(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], place: int) -> tuple[str, str]:
    """The text that asks for the answer at a place, and the text with that answer."""
    head = tokenizer.render_chat(messages[:place])
    whole = tokenizer.render_chat(messages[: place + 1], add_generation_prompt=False)
    if not whole.startswith(head):
        message = f"the chat template of `{tokenizer.template_owner}` writes an answer otherwise than it asks for one"
        hint = "set target.chat_template to a template with {% generation %} around what the assistant writes"
        raise UsageError(f"{message}, so which tokens are its own is unknown", hint)
    return head, whole


def _compared(tokenizer: Tokenizer, group: Sequence[tuple[str, str]], end_tokens: Collection[int]) -> AnsweredChat:
    """The longest text of a group, in which the others' answers stand as well."""
    tokens = tokenizer.encode(group[-1][1], add_special_tokens=False)
    is_answer = [False] * len(tokens)
    for head, whole in group:
        begin, end = (_num_common(tokens, tokenizer.encode(text, add_special_tokens=False)) for text in (head, whole))
        end = next((place + 1 for place in range(begin, end) if tokens[place] in end_tokens), end)
        is_answer[begin:end] = [True] * (end - begin)
    return AnsweredChat(tokens, is_answer)


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens at the beginning that two texts have in common."""
    pairs = zip(first, second, strict=False)
    return next((place for place, (token, other) in enumerate(pairs) if token != other), min(len(first), len(second)))

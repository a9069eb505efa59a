"""Which tokens of a conversation the assistant wrote, against what transformers makes of the same template's tags."""

from __future__ import annotations

import pytest
from tiny_engine import letter_tokenizer

from specdec_cli.errors import UsageError
from specdec_cli.text.answered_chat import answered_chats
from specdec_cli.text.tokenizer import Tokenizer

END = "</s>"
CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "and the rest"},
    {"role": "assistant", "content": "the tent"},
    {"role": "user", "content": "in the inn"},
    {"role": "assistant", "content": "on an ant"},
]
TAGGED = (
    "{% for m in messages %}{{ m.role[0] + ', ' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '</s>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '</s>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a, ' }}{% endif %}"
)
PLAIN = TAGGED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
FORGETFUL = PLAIN.replace("m.content + '</s>'", "(m.content if loop.last else m.content.split(' ')[-1]) + '</s>'", 1)
"""Drops all but the last word of earlier answers, as some templates drop thoughts."""


def tokenizer_of(template: str) -> Tokenizer:
    return Tokenizer(letter_tokenizer(), template)


def texts(tokenizer: Tokenizer, chat: list[dict[str, str]]) -> list[list[str]]:
    """Of each text, its answers."""
    found = []
    for one in answered_chats(tokenizer, chat, tokenizer.eos_token_ids):
        assert len(one.tokens) == len(one.is_answer)
        parts = "".join(
            tokenizer.decode([token], skip_special_tokens=False) if is_answer else "|"
            for token, is_answer in zip(one.tokens, one.is_answer, strict=True)
        )
        found.append([part for part in parts.split("|") if part])
    return found


@pytest.mark.parametrize("template", [TAGGED, PLAIN])
@pytest.mark.parametrize("end", [3, 5])
def test_answers_are_those_of_the_templates_tags(template: str, end: int) -> None:
    reference = letter_tokenizer()
    reference.chat_template = TAGGED
    wanted = reference.apply_chat_template(CHAT[:end], return_dict=True, return_assistant_tokens_mask=True)
    tokenizer = tokenizer_of(template)
    [found] = answered_chats(tokenizer, CHAT[:end], tokenizer.eos_token_ids)
    assert found.tokens == wanted["input_ids"]
    assert found.is_answer == [bool(one) for one in wanted["assistant_masks"]]
    assert texts(tokenizer, CHAT[:end]) == [[f"the tent{END}", f"on an ant{END}"][: end // 2]]


@pytest.mark.parametrize("template", [TAGGED, PLAIN])
def test_49_what_the_assistant_begins_with_is_no_answer(template: str) -> None:
    tokenizer = tokenizer_of(template)
    begun = [{"role": "assistant", "content": "the sea"}, *CHAT]
    assert texts(tokenizer, begun) == texts(tokenizer, CHAT)
    assert "the sea" in tokenizer.decode(answered_chats(tokenizer, begun, tokenizer.eos_token_ids)[0].tokens)


def test_an_answer_ends_with_its_end_token_and_else_with_its_message() -> None:
    assert texts(tokenizer_of(PLAIN), CHAT) == [[f"the tent{END}", f"on an ant{END}"]]
    assert texts(tokenizer_of(PLAIN.replace("</s>", ".")), CHAT) == [["the tent.\n", "on an ant.\n"]]


def test_answers_that_a_template_changes_later_stand_in_texts_of_their_own() -> None:
    assert texts(tokenizer_of(FORGETFUL), CHAT) == [[f"the tent{END}"], [f"on an ant{END}"]]
    tokenizer = tokenizer_of(FORGETFUL)
    last = answered_chats(tokenizer, CHAT, tokenizer.eos_token_ids)[-1]
    assert "a, tent</s>" in tokenizer.decode(last.tokens, skip_special_tokens=False)
    one_word = [*CHAT[:2], {"role": "assistant", "content": "rest"}, *CHAT[3:]]
    assert texts(tokenizer, one_word) == [[f"rest{END}", f"on an ant{END}"]]


def test_what_follows_the_last_answer_is_left_out() -> None:
    for template in (TAGGED, PLAIN):
        assert texts(tokenizer_of(template), [*CHAT, {"role": "user", "content": "so"}])[0][-1] == f"on an ant{END}"


def test_a_template_that_asks_for_answers_otherwise_is_refused() -> None:
    thinking = PLAIN.replace("'a, '", "'a, thought '")
    with pytest.raises(UsageError, match="writes an answer otherwise than it asks for one") as error:
        texts(tokenizer_of(thinking), CHAT)
    assert error.value.hint is not None
    assert "{% generation %}" in error.value.hint
    with pytest.raises(UsageError, match="has no chat template"):
        texts(Tokenizer(letter_tokenizer()), CHAT)
    with pytest.raises(UsageError, match="refuses these messages"):
        texts(tokenizer_of("{{ raise_exception('no') }}" + TAGGED), CHAT)

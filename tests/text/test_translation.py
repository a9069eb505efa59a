"""Contexts in another tokenizer's tokens: a function of the context however it came about, and guesses back."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
from many_tokenizers import KINDS, PERMUTED, TEXTS, tokenizer

from specdec_cli.text.pieces import MOST_BYTES, num_incomplete, piece_starts
from specdec_cli.text.shared_vocabulary import shared_vocabulary
from specdec_cli.text.translation import Translator

PAIRS = [(a, b) for a, b in product(KINDS, KINDS) if a != b]
EXACT = ["byte-level", "coarser byte-level", "sentencepiece"]  # that lose nothing of a text


def translator(target: str, draft: str) -> Translator:
    first, second = tokenizer(target), tokenizer(draft)
    return Translator(first, second, shared_vocabulary(first, second))


@pytest.mark.in_turn(9, every=11)
@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_a_translation_depends_on_the_context_alone(target: str, draft: str) -> None:
    """Grown token by token, in chunks, cut back and grown again, or read at once."""
    one, rng = translator(target, draft), Random(0)
    for text in TEXTS:
        tokens = [1, *tokenizer(target).encode(text, False), 3, *tokenizer(target).encode(text[:20], False)]
        whole = {end: list(one.start().follow(tokens[:end])) for end in range(len(tokens) + 1)}
        grown = one.start()
        for end in range(len(tokens) + 1):
            assert grown.follow(tokens[:end]) == whole[end]
        for _ in range(30):
            end = rng.randrange(len(tokens) + 1)
            assert grown.follow(tokens[:end]) == whole[end]
            beside = [*tokens[:end], *(rng.randrange(4, 200) for _ in range(5))]
            assert grown.follow(beside) == one.start().follow(beside)


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("draft", EXACT)
def test_the_text_stays_the_same(target: str, draft: str) -> None:
    one = translator(target, draft)
    for text in TEXTS:
        tokens = tokenizer(target).encode(text, False)
        assert tokenizer(draft).decode(one.start().follow(tokens)) == tokenizer(target).decode(tokens)


@pytest.mark.parametrize("draft", ["byte-level", "coarser byte-level", "sentencepiece", "unigram", "characters"])
def test_a_text_is_cut_as_the_draft_cuts_it_at_once(draft: str) -> None:
    """Of common text, pieces give the tokens that the whole text gives."""
    text = "Once upon a time there was a lion named Bear. He loved the river, and Lily."
    target = "coarser byte-level" if draft == "byte-level" else "byte-level"
    one = translator(target, draft)
    tokens = tokenizer(target).encode(text, False)
    assert one.start().follow(tokens) == [*one.prefix, *tokenizer(draft).encode(text, False)]


@pytest.mark.in_turn(7, every=8)
@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_a_guess_continues_the_context(target: str, draft: str) -> None:
    """Whatever is guessed, the context's text and the guess's read on as the draft's text does."""
    one, rng = translator(target, draft), Random(1)
    first, second = tokenizer(target), tokenizer(draft)
    num_found = 0
    for text in TEXTS:
        tokens = first.encode(text, False)
        for end in range(len(tokens)):
            translation = one.start()
            translation.follow(tokens[:end])
            guess = [rng.randrange(4, second.num_tokens) for _ in range(5)]
            found = one.guessed(translation, guess)
            num_found += bool(found)
            assert all(0 <= token < first.num_tokens for token in found)
            if target in EXACT and draft in EXACT and found:
                before = b"".join(first.added_bytes(token, i == 0) for i, token in enumerate(tokens[:end]))
                after = b"".join(first.added_bytes(token, end + i == 0) for i, token in enumerate(found))
                said = b"".join(second.added_bytes(token, end + i == 0) for i, token in enumerate(guess))
                whole = (before[: len(before) - num_incomplete(before)] + said).decode("utf-8", "ignore")
                assert (before + after).decode("utf-8", "ignore").startswith(whole[:-5] if len(whole) > 5 else "")
    assert num_found > 20


@pytest.mark.parametrize(("target", "draft"), [pair for pair in PAIRS if set(pair) <= set(EXACT)])
def test_the_right_guess_gives_the_right_tokens(target: str, draft: str) -> None:
    """A draft that goes on with the text itself guesses the target's own next tokens."""
    one, first = translator(target, draft), tokenizer(target)
    text = "Once upon a time 🙂 there was a lion named Bear, and the café — 你好 — was very cold."
    tokens = first.encode(text, False)
    for end in range(1, len(tokens) - 12):
        translation = one.start()
        held = list(translation.follow(tokens[:end]))
        whole = one.start().follow(tokens)
        if whole[: len(held)] != held:  # the draft cuts this place elsewhere
            continue
        found = one.guessed(translation, whole[len(held) :])
        assert found == tokens[end:], first.decode(tokens[:end])


def test_half_characters_wait_and_are_completed() -> None:
    one, first, second = translator("byte-level", "sentencepiece"), tokenizer("byte-level"), tokenizer("sentencepiece")
    tokens = first.encode("the 😀 bear", False)
    begin = next(i for i in range(len(tokens)) if "\ufffd" in first.decode(tokens[: i + 1]))
    translation = one.start()
    assert second.decode(translation.follow(tokens[: begin + 1])).rstrip() == "the"
    said = list(one.to_draft.encode("the 😀 bear".encode()[len(second.decode(translation.translated)) :], False))
    assert one.guessed(translation, said) == tokens[begin + 1 :]
    assert one.guessed(translation, second.encode("bear", False)) == [], "it completes no half character"


def test_special_tokens_become_those_of_the_same_name_and_a_leading_one_is_not_repeated() -> None:
    one, first, second = translator("byte-level", "sentencepiece"), tokenizer("byte-level"), tokenizer("sentencepiece")
    ids = {name: first.vocabulary[name] for name in ("<s>", "</s>", "<|user|>")}
    context = [ids["<s>"], ids["<|user|>"], *first.encode("the bear", False), ids["</s>"]]
    found = one.start().follow(context)
    user, end = second.vocabulary["<|user|>"], second.vocabulary["</s>"]
    assert found == [second.vocabulary["<s>"], user, *second.encode("the bear", False), end]


def test_a_guessed_end_is_the_targets_end_and_nothing_follows() -> None:
    one, first, second = translator("byte-level", "sentencepiece"), tokenizer("byte-level"), tokenizer("sentencepiece")
    translation = one.start()
    translation.follow(first.encode("the", False))
    guess = [*second.encode("bear", False), second.vocabulary["</s>"], *second.encode("river", False)]
    assert one.guessed(translation, guess) == [*first.encode(" bear", False), first.vocabulary["</s>"]]


def test_pieces_begin_at_spaces_and_in_long_words_at_characters() -> None:
    text = ("a bc  d " + "é" * 120 + " e").encode()
    starts = [0, *piece_starts(text, 0, 1)]
    assert text[starts[1] :].startswith(b" bc")
    assert text[starts[2] :].startswith(b"  d")
    assert all(text[start] & 0xC0 != 0x80 for start in starts)
    assert max(b - a for a, b in zip(starts, [*starts[1:], len(text)], strict=True)) <= MOST_BYTES + 3


@pytest.mark.parametrize(("text", "num"), [(b"", 0), (b"ab", 0), ("é".encode(), 0), ("é".encode()[:1], 1)])
def test_incomplete_bytes(text: bytes, num: int) -> None:
    assert num_incomplete(text) == num
    assert num_incomplete("a🙂".encode()[:-1]) == 3


def test_shared_tokens_are_one_to_one_and_say_the_same() -> None:
    for target, draft in PAIRS:
        first, second = tokenizer(target), tokenizer(draft)
        shared = shared_vocabulary(first, second)
        assert len(set(shared.of_draft)) == len(set(shared.of_target)) == len(shared) > 20
        for token, other in zip(shared.of_target, shared.of_draft, strict=True):
            if token not in shared.special_of_target:
                assert first.added_bytes(token, False) == second.added_bytes(other, False) != b""
        assert 0 < shared.share_of_target <= 1
        assert 0 < shared.share_of_text <= 1


def test_a_permuted_vocabulary_is_shared_whole() -> None:
    shared = shared_vocabulary(tokenizer("byte-level"), tokenizer(PERMUTED))
    assert shared.share_of_target == shared.share_of_draft == shared.share_of_text == 1
    assert shared.of_target != shared.of_draft

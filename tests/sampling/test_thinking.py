"""A grammar after a thought: free until the marker, bound after it, whatever tokens the markers are made of."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tiny_grammar import _wrapped
from tokenizers import AddedToken, pre_tokenizers

from specdec_cli.drafted import Drafted
from specdec_cli.sampling.grammar import Matcher, compile_grammar
from specdec_cli.sampling.thinking import ThinkingMarkers, after_thinking
from specdec_cli.text.tokenizer import Tokenizer

EOS = 0
MARKERS = ThinkingMarkers("<think>", "</think>")


def tokenizer(kind: str) -> Tokenizer:
    """Bytes with a few merges, some of which go on past the markers; or the markers as tokens of their own."""
    merges = [("<", "t"), ("h", "i"), ("k", ">"), ("k>", "Ċ"), ("<", "/"), (">", "a"), ("{", '"'), ("<t", "hi")]
    merges = merges if kind == "merged" else []
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = _wrapped(["</s>", *letters, *(one + other for one, other in merges)], merges, eos_token="</s>")
    if kind == "added":
        made.hf.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in ("<think>", "</think>")])
        made = Tokenizer(made.hf)
    return made


KINDS = {kind: tokenizer(kind) for kind in ("bytes", "merged", "added")}


def start(kind: str, begins: Any, source: str = "[0-9]{2}") -> Matcher:
    tokens = KINDS[kind]
    grammar = compile_grammar("regex", source, tokens)
    return after_thinking(grammar, MARKERS, begins).start(tokens.num_tokens, (EOS,), (EOS,))


def feed(matcher: Matcher, kind: str, text: str) -> None:
    """Say a text; every token must be allowed where it stands."""
    for token in KINDS[kind].encode(text, False):
        assert matcher.allowed[token], (text, KINDS[kind].piece(token))
        assert matcher.accept([token]) == 1


def texts(matcher: Matcher, kind: str) -> set[str]:
    return {KINDS[kind].piece(int(token)) for token in matcher.allowed.nonzero()[0]}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("begins", "thought"), [("thinking", "so < it is </th"), ("undecided", "<think>12 ")])
def test_a_thought_is_free_and_the_answer_is_bound(kind: str, begins: str, thought: str) -> None:
    matcher = start(kind, begins)
    feed(matcher, kind, thought)
    assert not matcher.allowed[EOS], "nothing ends in a thought"
    assert {"a", "7", "\n"} <= texts(matcher, kind)
    feed(matcher, kind, " x</think>")
    assert texts(matcher, kind) == set("0123456789")
    feed(matcher, kind, "12")
    assert matcher.is_finished


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_without_a_thought_is_bound_from_its_beginning(kind: str) -> None:
    matcher = start(kind, "undecided")
    assert set("0123456789") <= texts(matcher, kind)
    assert {one for one in texts(matcher, kind) if one[0] not in "0123456789"} <= {"<", "<t", "<thi", "<think>"}
    feed(matcher, kind, "45")
    assert matcher.is_finished


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_ends_a_thought_and_says_more(kind: str) -> None:
    matcher = start(kind, "thinking")
    feed(matcher, kind, "a</thin" if kind != "added" else "a")
    assert {one for one in texts(matcher, kind) if one.startswith("k>") and one != "k>"} == set()
    feed(matcher, kind, "k>" if kind != "added" else "</think>")
    assert texts(matcher, kind) == set("0123456789")


@pytest.mark.parametrize("kind", KINDS)
def test_a_grammar_that_takes_the_marker_for_text_is_kept_beside_the_thought(kind: str) -> None:
    matcher = start(kind, "undecided", "<t[a-z]*>|<think>")
    feed(matcher, kind, "<ta")
    assert ">" in texts(matcher, kind)
    assert "\n" not in texts(matcher, kind)
    other = start(kind, "undecided", "<t[a-z]*>|<think>")
    feed(other, kind, "<think>")
    assert "\n" in texts(other, kind), "the whole marker begins a thought"


def test_without_a_thought_the_grammar_stays_itself() -> None:
    grammar = compile_grammar("regex", "a", KINDS["bytes"])
    assert after_thinking(grammar, MARKERS, "content") is grammar


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("begins", ["thinking", "undecided", "content"])
@pytest.mark.parametrize("seed", range(12))
def test_looking_ahead_sees_what_accepting_finds(kind: str, begins: str, seed: int) -> None:
    """Masks along any guess are those of the tokens accepted one by one, and the place stays as it was."""
    draw = random.Random(seed)
    said = draw.choice(["<think>ab</think>12", "x </think>123", "12", "1<think>", "<thin7", "</think></think>"])
    guess = KINDS[kind].encode(said, False)
    guess = [*guess[: draw.randint(0, len(guess))], *([EOS] if draw.random() < 0.3 else [])]
    looking, walking = start(kind, begins), start(kind, begins)
    before = looking.allowed.copy()
    seen = looking.look(Drafted.chain(guess))
    assert (looking.allowed == before).all()
    num = 0
    for token in guess:
        assert (seen.masks[num - 1] == walking.allowed).all()
        if not walking.allowed[token]:
            break
        num += 1
        walking.accept([token])
        if token == EOS or walking.is_finished:
            break
    else:
        assert (seen.masks[num - 1] == walking.allowed).all()
    assert seen.fitting == tuple(range(num))
    is_closed = num > 0 and (guess[num - 1] == EOS or walking.is_finished)
    assert (num - 1 not in seen.masks) == is_closed


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_accepted_together_end_where_single_ones_do(kind: str) -> None:
    tokens = KINDS[kind].encode("<think>a</think>123", False)
    together = start(kind, "undecided")
    assert together.accept(tokens) == len(tokens) - 1
    assert together.is_finished

"""A stop string that a special token spells, alone or with text around it, stops where the token comes."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_cli.text.tokenizer import Tokenizer

LETTERS = "ab<>/s\n"
NAMES = ("</s>", "<a>", "<<")


class Letters:
    """A letter a token, and special tokens behind them; no fast backend."""

    all_special_ids: ClassVar[list[int]] = list(range(len(LETTERS), len(LETTERS) + len(NAMES)))
    eos_token_id = len(LETTERS)

    def get_vocab(self) -> dict[str, int]:
        return {name: i for i, name in enumerate((*LETTERS, *NAMES))}

    def decode(self, ids: list[int], skip_special_tokens: bool, **_: bool) -> str:
        words = (*LETTERS, *NAMES)
        return "".join(words[i] for i in ids if not (skip_special_tokens and i in self.all_special_ids))


def ids_of(*parts: str) -> list[int]:
    """Tokens of parts, each a special token's name or letters."""
    vocabulary = Letters().get_vocab()
    return [vocabulary[one] for part in parts for one in ([part] if part in NAMES else part)]


def run(
    ids: list[int], stop: list[str], size: int = 1, num_unstoppable: int = 0, **given: Any
) -> tuple[str, int, str | int | None]:
    """Text, tokens kept and what stopped, where tokens come in groups of a size."""
    stream = Tokenizer(Letters()).stream(stop, **given)
    text, num_kept = "", 0
    for place in range(0, len(ids), size):
        released = stream.feed(ids[place : place + size], max(0, num_unstoppable - place))
        text, num_kept = text + released.text, num_kept + released.num_kept
        if released.stop is not None:
            break
    return text + stream.finish(), num_kept, stream.stop


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    ("parts", "stop", "expected"),
    [
        (("ab", "</s>", "b"), ["</s>"], ("ab", 3, "</s>")),
        (("ab", "</s>", "b"), ["b</s>"], ("a", 3, "b</s>")),
        (("ab", "</s>", "ba"), ["</s>b"], ("ab", 4, "</s>b")),
        (("ab", "</s>", "<a>", "b"), ["</s><a>b"], ("ab", 5, "</s><a>b")),
        (("ab</s>b",), ["</s>"], ("ab", 6, "</s>")),
        (("ab", "</s>", "b"), ["never", "</s>"], ("ab", 3, "</s>")),
        (("ab", "</s>", "<a>"), ["<a>", "</s>"], ("ab", 3, "</s>")),
        (("</s>", "</s>"), ["</s></s>"], ("", 2, "</s></s>")),
        (("b", "<<", "<<", "a"), ["<<a"], ("b", 4, "<<a")),
    ],
)
def test_49_7_a_special_token_completes_a_stop_string(
    skip: bool, parts: tuple[str, ...], stop: list[str], expected: tuple[str, int, str]
) -> None:
    for size in (1, 2, 10):
        found = run(ids_of(*parts), stop, size, skip_special_tokens=skip)
        if skip:
            assert found == expected
        else:
            whole = "".join(parts)
            assert found[1:] == expected[1:]
            assert found[0] == whole[: whole.find(expected[2])]


@pytest.mark.parametrize("stop", [">", "/s>b", "b</", "s", "</s><", "b<a"])
def test_part_of_an_unseen_name_is_no_match(stop: str) -> None:
    ids = ids_of("a", "</s>", "<a>", "a")
    assert run(ids, [stop]) == ("aa", len(ids), None)
    assert run(ids_of("ab", "</s>", "<a>", "a"), ["b<a", "</s><"]) == ("aba", 5, None)


def test_text_around_an_unseen_token_still_stops() -> None:
    assert run(ids_of("ab", "</s>", "ba"), ["bb"]) == ("a", 4, "bb"), "as the text shows it"


def test_what_stands_around_a_name_is_not_joined_by_forgetting_it() -> None:
    assert run(ids_of("a", "</s>", "<<"), ["a<<"]) == ("a", 3, None)


def test_what_ends_the_output_may_complete_a_stop_string() -> None:
    (end,) = Tokenizer(Letters()).eos_token_ids
    for skip in (True, False):
        assert run(ids_of("ab", "</s>"), ["b</s>"], stop_ids={end}, skip_special_tokens=skip) == ("a", 3, "b</s>")
        assert run(ids_of("ab", "</s>"), ["bb", "</s>b"], stop_ids={end}, skip_special_tokens=skip) == ("ab", 3, end)


def test_min_tokens_counts_special_tokens_too() -> None:
    ids = ids_of("a", "</s>", "b", "</s>", "a")
    assert run(ids, ["</s>"], num_unstoppable=1) == ("a", 2, "</s>")
    assert run(ids, ["</s>"], num_unstoppable=2) == ("ab", 4, "</s>")
    assert run(ids, ["</s>b", "a</s>"], num_unstoppable=3) == ("aba", 5, None)


def expected(ids: list[int], stops: list[str]) -> tuple[str, int, str | None]:
    """By brute force: after each token, every stop string at every place, with and without the names."""
    words = (*LETTERS, *NAMES)
    for num_kept in range(1, len(ids) + 1):
        found = []
        for with_names in (False, True):
            text, shown, inside = "", [], set[int]()
            for token in ids[:num_kept]:
                is_name = token >= len(LETTERS)
                if is_name and not with_names:
                    continue
                inside |= set(range(len(text) + 1, len(text) + len(words[token]))) if is_name else set()
                shown += [not is_name] * len(words[token])
                text += words[token]
            for order, stop in enumerate(stops):
                for begin in range(len(text) - len(stop) + 1):
                    if text.startswith(stop, begin) and not {begin, begin + len(stop)} & inside:
                        found.append((sum(shown[:begin]), order))
        if found:
            begin, order = min(found)
            return Tokenizer(Letters()).decode(ids)[:begin], num_kept, stops[order]
    return Tokenizer(Letters()).decode(ids), len(ids), None


@given(
    ids=st.lists(st.integers(0, len(LETTERS) + len(NAMES) - 1), max_size=14),
    stops=st.lists(
        st.lists(st.sampled_from((*LETTERS, *NAMES)), min_size=1, max_size=4).map("".join), min_size=1, max_size=3
    ),
    size=st.integers(1, 5),
)
@settings(max_examples=400, deadline=None)
def test_the_first_stop_string_in_text_and_names_stops(ids: list[int], stops: list[str], size: int) -> None:
    assert run(ids, stops, size) == expected(ids, stops)

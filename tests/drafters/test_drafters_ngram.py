"""Prompt lookup against a brute-force reading of its rule, and its cost by counted work."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from typed import stand_in

from specdec_cli.drafters import ngram, prediction
from specdec_cli.drafters.contract import DraftRow, Resources
from specdec_cli.drafters.ngram import Index
from specdec_cli.sampling.params import SamplingParams


def row(context: list[int], k: int, num_prompt_tokens: int = 1, handle: int = 0) -> DraftRow:
    return DraftRow(handle, context, num_prompt_tokens, k, SamplingParams(), frozenset(), False, False, 0.0)


def load(longest: int, shortest: int) -> ngram.Drafter:
    drafter = ngram.Drafter(longest, shortest)
    drafter.load(Resources(lambda name: None, None, 100))  # type: ignore[arg-type, return-value]
    return drafter


def by_reading(context: list[int], k: int, longest: int, shortest: int) -> list[int]:
    for length in range(longest, shortest - 1, -1):
        for end in range(len(context) - 1, length - 1, -1):
            if context[end - length : end] == context[-length:]:
                text = list(context)
                for i in range(k):
                    text.append(text[end + i])
                return text[len(context) :]
    return []


tokens = st.lists(st.integers(0, 2), max_size=12)


@given(st.lists(st.tuples(st.integers(0, 30), tokens), min_size=1, max_size=12), st.integers(1, 3), st.integers(0, 2))
@settings(max_examples=400, deadline=None)
def test_it_reads_as_the_rule_says(changes: list[tuple[int, list[int]]], shortest: int, more: int) -> None:
    """Contexts that grow, are cut back to any length, and change abruptly, all under one handle."""
    drafter = load(shortest + more, shortest)
    context: list[int] = []
    for kept, new in changes:
        context = [*context[:kept], *new]
        assert drafter.propose([row(context, 5)])[0].drafted.tokens == tuple(
            by_reading(context, 5, shortest + more, shortest)
        )


def test_longest_match_first_then_the_latest() -> None:
    drafter = load(3, 1)
    assert drafter.propose([row([1, 2, 3, 7, 9, 3, 8, 1, 2, 3], 1)])[0].drafted.tokens == (7,), (
        "three tokens beat the later one"
    )
    assert drafter.propose([row([3, 7, 3, 8, 5, 3], 2, handle=1)])[0].drafted.tokens == (8, 5), "the later of equals"
    assert drafter.propose([row([4, 4], 3, handle=2)])[0].drafted.tokens == (4, 4, 4), "a loop goes on"
    assert drafter.propose([row([1, 2, 3], 3, handle=3)])[0].drafted.tokens == ()


def test_work_is_linear_in_new_tokens() -> None:
    drafter = load(4, 2)
    context = [(i * i) % 37 for i in range(2000)]
    drafter.propose([row(context, 4)])
    index: Index = drafter._indexes[0]
    before = index.num_insertions
    for step in range(300):
        context = [*context, step % 5, step % 7, step % 3]
        drafter.propose([row(context, 4)])
    assert index.num_insertions - before == 300 * 3 * 3, "three new tokens a step, three n-gram lengths"
    drafter.propose([row(context[:-2], 4)])
    drafter.propose([row(context, 4)])
    assert index.num_insertions - before == 300 * 3 * 3 + 2 * 3, "a cut back costs what was cut"


def read_ahead(text: list[int], **options: int) -> prediction.Drafter:
    drafter = prediction.Drafter("text", **stand_in(options))
    drafter.load(Resources(lambda name: None, lambda given: [0, *text, 0] if given else [0, 0], 100))  # type: ignore[arg-type, return-value]
    return drafter


def test_a_prediction_is_read_from_its_beginning() -> None:
    drafter = read_ahead([5, 6, 7, 8, 9, 5, 6])
    assert drafter.propose([row([1, 2], 3, 2)])[0].drafted.tokens == (5, 6, 7), "without what the tokenizer puts around"
    assert drafter.propose([row([1, 2, 5, 6], 3, 2)])[0].drafted.tokens == (7, 8, 9)
    assert drafter.propose([row([1, 2, 5, 6, 7, 8, 9, 5, 6], 3, 2)])[0].drafted.tokens == (), "read to its end"


def test_a_prediction_is_found_again() -> None:
    drafter = read_ahead([5, 6, 7, 8, 9, 5, 6, 4, 3])
    assert drafter.propose([row([1, 50], 3)])[0].drafted.tokens == (), "the output went elsewhere"
    assert drafter.propose([row([1, 50, 8], 3)])[0].drafted.tokens == (9, 5, 6), "and came back"
    assert drafter.propose([row([1, 50, 8, 60, 5, 6], 3)])[0].drafted.tokens == (4, 3), "the next place ahead"
    assert drafter.propose([row([1, 50, 8, 60, 5, 6, 7], 2)])[0].drafted.tokens == (8, 9), "or back where it stands"
    assert drafter.propose([row([1, 50, 8], 2)])[0].drafted.tokens == (9, 5), "a cut back"


@given(st.lists(tokens, min_size=1, max_size=6), tokens)
@settings(max_examples=100, deadline=None)
def test_a_prediction_depends_on_the_context_alone(steps: list[list[int]], text: list[int]) -> None:
    walked = read_ahead(text, max=2)
    context = [1]
    for new in steps:
        context = [*context, *new]
        found = walked.propose([row(context, 4)])[0].drafted.tokens
        assert found == read_ahead(text, max=2).propose([row(context, 4)])[0].drafted.tokens

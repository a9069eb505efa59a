"""Suffix decoding: the index against a slow one, whose outputs a request sees, and what is forgotten."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from typed import stand_in

from specdec_cli import drafters
from specdec_cli.drafted import CONTEXT_END, Drafted
from specdec_cli.drafters import suffix, suffix_index
from specdec_cli.drafters.contract import Drafter, DraftRow, Resources
from specdec_cli.drafters.suffix_index import GuessLimits, SuffixIndex
from specdec_cli.errors import RunError, UsageError
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.tree_shape import TreeShape

LONGEST, ESCAPE, LONGER, SHORTER, MOST, HORIZON = 32, 32, 6, 2, 16, 8
NUM_TOKENS = 50


class SlowIndex:
    """The same as `SuffixIndex`, by looking at all of every text."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self.begin = 0

    def extend(self, tokens: Sequence[int]) -> None:
        self.text += tokens

    def drop(self, num: int) -> None:
        self.begin += num

    def occurrences(self, end: Sequence[int]) -> list[tuple[int, int]]:
        """Length and place of the latest occurrences of an end, those of the longer part first."""
        found: list[tuple[int, int]] = []
        for shortest, longest in ((LONGER, LONGEST), (SHORTER, LONGER - 1)):
            lengths = [(self.agreeing(end, place), place) for place in range(len(self.text), self.begin, -1)]
            found += [one for one in lengths if shortest <= one[0] <= longest]
        return found

    def agreeing(self, end: Sequence[int], place: int) -> int:
        length = 0
        while length < min(LONGEST, len(end), place - self.begin) and self.text[place - 1 - length] == end[-1 - length]:
            length += 1
        return length

    def propose(self, limits: GuessLimits, others: SlowIndex | None = None) -> Drafted:
        texts = [self, *([] if others is None else [others])]
        alive = [(one, *found) for one in texts for found in one.occurrences(self.text)]
        alive = [one for one in alive if one[0] is not self or one[2] < len(self.text)]
        chain = replace(limits, k=HORIZON, most_nodes=HORIZON, shape=None)
        is_expected = sum(self.grown(chain, alive)[2]) >= limits.min_expected
        return Drafted(*self.grown(limits, alive)[:2]) if is_expected else Drafted()

    def grown(self, limits: GuessLimits, alive: list[Any]) -> tuple[tuple[int, ...], list[int], list[float]]:
        """Tokens, parents and probabilities of nodes."""
        open_nodes = self.children((), 1.0, alive, limits, CONTEXT_END)
        tokens, parents, probabilities = [], [], []
        while open_nodes and len(tokens) < limits.most_nodes:
            best = max(open_nodes, key=lambda node: node[0])
            open_nodes.remove(best)
            probability, parent, path, its, place = best
            number = len(tokens)
            tokens.append(path[-1])
            parents.append(parent)
            probabilities.append(probability)
            if len(path) < limits.k:
                open_nodes += self.children(path, probability, its, limits, place, number)
        return tuple(tokens), parents, probabilities

    def children(
        self,
        path: tuple[int, ...],
        before: float,
        alive: list[Any],
        limits: GuessLimits,
        place: int,
        number: int = CONTEXT_END,
    ) -> list[Any]:
        votes: dict[int, float] = {}
        followed: dict[int, list[Any]] = {}
        total = float(ESCAPE)
        for index, length, at in alive:
            its = index.text[at:] if index is not self else [*index.text[at:], *path]
            if len(its) <= len(path):
                continue
            token, vote = its[len(path)], float(length + len(path)) ** 3
            total += vote
            if 0 <= token < limits.num_tokens:
                votes[token] = votes.get(token, 0) + vote
                followed.setdefault(token, []).append((index, length, at))
        ranked = sorted(votes, key=lambda token: -votes[token])
        places: Sequence[int] = range(len(ranked)) if limits.shape is not None else range(1)
        if limits.shape is not None and not limits.shape.is_dynamic:
            places = limits.shape.children(place)
        found = [
            (before * votes[token] / total, number, (*path, token), followed[token], at)
            for token, at in zip(ranked, places, strict=False)
        ]
        return [one for one in found if one[0] >= limits.min_prob]


def limits(k: int = 6, tree: str | None = None, min_prob: float = 0.01, min_expected: float = 0.0) -> GuessLimits:
    shape = None if tree is None else TreeShape.parse(tree)
    return GuessLimits(k, k if shape is None else shape.num_nodes(k), shape, NUM_TOKENS, min_prob, min_expected)


@pytest.mark.parametrize("tree", [None, "3,2,1", "3,2+0+2", "dynamic:9"])
def test_the_index_does_as_a_slow_one(tree: str | None) -> None:
    """Texts that repeat themselves and each other, with few enough occurrences that all are looked at."""
    found = 0
    for seed in range(60):
        chance = random.Random(seed)
        phrases = [[chance.randrange(40) for _ in range(chance.randrange(2, 9))] for _ in range(5)]
        pairs = [(SuffixIndex(), SlowIndex()) for _ in range(2)]
        for _ in range(12):
            part = [*chance.choice(phrases), *([chance.choice([-1, 3, NUM_TOKENS])] * chance.randrange(2))]
            for one in chance.choice(pairs):
                one.extend(part)
        for _ in range(6):
            part = [token for token in chance.choice(phrases) if token >= 0]
            for one in pairs[0]:
                one.extend(part)
            if any(len(slow.occurrences(pairs[0][1].text)) > MOST for _, slow in pairs):
                continue
            asked = limits(chance.randrange(1, 7), tree, chance.choice([0.01, 0.2]), chance.choice([0.0, 1.0]))
            expected = pairs[0][1].propose(asked, pairs[1][1])
            assert pairs[0][0].propose(asked, pairs[1][0]) == expected
            found += len(expected) > 0
    assert found > 100


def test_what_was_dropped_is_forgotten_and_the_rest_is_found() -> None:
    chance = random.Random(1)
    index, slow, end = SuffixIndex(), SlowIndex(), SuffixIndex()
    parts = [[chance.randrange(30) for _ in range(97)] for _ in range(60)]
    for number, part in enumerate(parts):
        for one in (index, slow):
            one.extend(part)
            if number > 20:
                one.drop(97)
        for known in (parts[max(0, number - 20)], parts[number]):
            end = SuffixIndex()
            end.extend(known[40:60])
            asked = SlowIndex()
            asked.extend(known[40:60])
            assert end.propose(limits(), index) == asked.propose(limits(), slow) == Drafted.chain(known[60:66])
    index.drop(97 * 21)
    assert end.propose(limits(), index) == Drafted()
    assert index.num_bytes < 100_000


def load(**options: Any) -> Drafter:
    drafter = drafters.create("suffix", {"min_expected": 0.0, **options})
    drafter.load(Resources(stand_in(lambda _: None), None, NUM_TOKENS))
    return drafter


def row(
    handle: int, context: list[int], num_prompt: int, salt: str | None = None, seed: int | None = None, **changes: Any
) -> DraftRow:
    params = SamplingParams(temperature=0.0 if seed is None else 1.0, seed=seed or 0)
    return DraftRow(handle, context, num_prompt, 4, params, frozenset(), True, **{
        "shares_noise": False, "p_min": 0.0, "cache_salt": salt, **changes
    })  # fmt: skip


def guess(drafter: Drafter, *given: Any, **changes: Any) -> tuple[int, ...]:
    return drafter.propose([row(*given, **changes)])[0].drafted.tokens


TEXT = [11, 12, 13, 14, 15, 16, 17, 18]
PROMPT = [1, 2]


def decode(
    drafter: Drafter, handle: int, salt: str | None, seed: int | None = None, text: Sequence[int] = TEXT
) -> None:
    """A request that a draft is asked for once, that emits more afterwards, and ends."""
    context = [*PROMPT, *text[:2]]
    guess(drafter, handle, context, len(PROMPT), salt, seed)
    context += text[2:]
    drafter.release(handle)


ASKED = [5, *TEXT[:3]]


def test_what_a_text_repeats_is_continued() -> None:
    drafter = load()
    assert guess(drafter, 0, [6, 7, 8, 9, 10, 20, 21, 22, 6, 7, 8], 11) == (9, 10, 20, 21)
    assert guess(drafter, 1, [3, 4, 3, 4, 3, 4], 6) == (3, 4, 3, 4), "a loop goes on"
    assert guess(drafter, 2, [3, 4, 5], 3) == ()
    often = [1, 2, 30, 9, 1, 2, 31, 9, 1, 2, 30, 8, 1, 2]
    assert guess(drafter, 3, often, 2)[0] == 30, "the more frequent continuation"
    longer = [6, 5, 1, 2, 31, 9, 1, 2, 30, 8, 1, 2, 30, 8, 6, 5, 1, 2]
    assert guess(drafter, 4, longer, 2)[0] == 31, "the longer match"


def test_options_end_a_guess() -> None:
    text = [1, 2, 30, 9, 1, 2, 31, 9, 1, 2]
    assert guess(load(), 0, text, 2)
    assert guess(load(min_prob=0.6), 0, text, 2) == ()
    assert guess(load(min_expected=4), 0, text, 2) == ()
    assert guess(load(min_expected=1.5), 0, [*TEXT, 1, *TEXT[:6]], 2) == (17, 18, 1, 11)


@pytest.mark.parametrize("options", [{"min_prob": 0}, {"min_prob": 1.5}, {"min_expected": -1}, {"cache": -1}], ids=str)
def test_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        load(**options)


def sees_outputs_of_its_salt_alone(drafter: Callable[[], Drafter]) -> bool:
    """Whether a request sees those, their last tokens too, and no others."""
    one = drafter()
    decode(one, 0, "a")
    seen = [guess(one, handle, [*ASKED], 1, salt) for handle, salt in enumerate(("a", "b", None), 1)]
    other = drafter()
    decode(other, 0, None)
    seen += [guess(other, 1, [*ASKED], 1, "a")]
    return seen == [tuple(TEXT[3:7]), (), (), ()]


def forgets_what_is_cleared(drafter: Callable[[], Drafter]) -> bool:
    one = drafter()
    decode(one, 0, "a")
    one.clear()
    return guess(one, 1, [*ASKED], 1, "a") == ()


def starts_anew_after_a_release(drafter: Callable[[], Drafter]) -> bool:
    """Whether a handle's next sequence sees nothing of its last one, whose output nobody may share."""
    one = drafter()
    guess(one, 0, [*TEXT], 1)
    one.release(0)
    return guess(one, 0, [*[9] * len(TEXT), *TEXT[:3]], 1) == ()


def keeps_what_was_emitted_alone(drafter: Callable[[], Drafter]) -> bool:
    """Whether neither prompts nor refused guesses become outputs."""
    one = drafter()
    context = [*TEXT, 1, 2, *TEXT[:3]]
    assert guess(one, 0, context, len(context) - 3, "a") == tuple(TEXT[3:7])
    context += [40, 41, 42]
    one.release(0)
    seen = guess(one, 1, [*ASKED], 1, "a"), guess(one, 2, [5, *TEXT[3:6]], 1, "a")
    return seen == ((40, 41, 42), ())


def keeps_its_own_noise_away(drafter: Callable[[], Drafter]) -> bool:
    """Whether a sampled request sees outputs of other seeds, and those of its own where noise is shared anyway."""
    one = drafter()
    decode(one, 0, "a", seed=7)
    seen = [
        guess(one, 1, [*ASKED], 1, "a", 7),
        guess(one, 2, [*ASKED], 1, "a", 8),
        guess(one, 3, [*ASKED], 1, "a"),
        guess(one, 4, [*ASKED], 1, "a", 7, shares_noise=True),
    ]
    return seen == [(), *[tuple(TEXT[3:7])] * 3]


def stays_within_its_memory(drafter: Callable[[], Drafter]) -> bool:
    """Whether the oldest outputs make room, over all salts."""
    one = drafter()
    texts = [[20 + i, 30 + i, 40 + i, 10 + i] * 2 for i in range(8)]
    for i, text in enumerate(texts):
        decode(one, i, "ab"[i % 2], seed=i, text=text)
    known = [bool(guess(one, 10 + i, [5, *text[:3]], 1, "ab"[i % 2])) for i, text in enumerate(texts)]
    return known == [False] * 6 + [True] * 2


CHECKS = {
    "salts": sees_outputs_of_its_salt_alone,
    "clear": forgets_what_is_cleared,
    "release": starts_anew_after_a_release,
    "outputs": keeps_what_was_emitted_alone,
    "noise": keeps_its_own_noise_away,
    "memory": stays_within_its_memory,
}


@pytest.mark.parametrize("check", CHECKS)
def test_outputs_of_other_requests(check: str) -> None:
    assert CHECKS[check](functools.partial(load, cache=20 if check == "memory" else 1000))


class SaltIgnored(suffix._Outputs):
    def add(self, salt: str, output: list[int], noise: suffix.NoiseKey | None) -> None:
        super().add("", output, noise)

    def of(self, salt: str | None, noise: suffix.NoiseKey | None) -> SuffixIndex | None:
        return super().of("", noise)


class NoiseIgnored(suffix._Outputs):
    def of(self, salt: str | None, noise: suffix.NoiseKey | None) -> SuffixIndex | None:
        return super().of(salt, None)


class NothingForgotten(suffix._Outputs):
    def _forget_oldest(self) -> None:
        self._most += 100


def stale(drafter: Any, handle: int) -> None:
    """A release that keeps the text for the handle's next sequence."""


def with_prompt(drafter: Any, handle: int) -> None:
    text = drafter._texts.pop(handle, None)
    drafter._outputs.add(text.salt, text.context, text.noise)


def of_guesses(drafter: Any, handle: int) -> None:
    text = drafter._texts.pop(handle, None)
    drafter._outputs.add(text.salt, [*text.context[-4:-3], *TEXT[3:7]], text.noise)


@pytest.mark.parametrize(("check", "owner", "name", "fault"), [
    ("salts", suffix, "_Outputs", SaltIgnored),
    ("noise", suffix, "_Outputs", NoiseIgnored),
    ("memory", suffix, "_Outputs", NothingForgotten),
    ("clear", suffix.Drafter, "clear", lambda drafter: None),
    ("release", suffix._OwnText, "continues", lambda text, context: True),
    ("outputs", suffix.Drafter, "release", with_prompt),
    ("outputs", suffix.Drafter, "release", of_guesses),
])  # fmt: skip
def test_planted_faults(monkeypatch: pytest.MonkeyPatch, check: str, owner: Any, name: str, fault: Any) -> None:
    if check == "release":
        monkeypatch.setattr(suffix.Drafter, "release", stale)
    monkeypatch.setattr(owner, name, fault)
    assert not CHECKS[check](functools.partial(load, cache=20 if check == "memory" else 1000))


def test_a_context_that_does_not_go_on_is_read_anew() -> None:
    drafter = load()
    assert guess(drafter, 0, [*TEXT, 1, *TEXT[:3]], 1) == tuple(TEXT[3:7])
    assert guess(drafter, 0, [9, 9, 5, *TEXT[:3]], 1) == ()


def test_without_a_compiler_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    suffix_index._library.cache_clear()
    try:
        with pytest.raises(RunError, match="index of the draft `suffix` cannot be compiled: no C"):
            load()
    finally:
        suffix_index._library.cache_clear()

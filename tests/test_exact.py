"""The promise: greedy tokens through the engine are those of transformers' own generate, whatever drafts.

Every family that the README names, float32, alone and in a batch of ragged prompts, k = 0, 1, 4, 8, and with trees.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny_engine import PROMPTS, decode, ngram, tiny_lm, tokens, transformers_greedy
from tiny_models import FAMILIES, make_tiny

from specdec_cli.lm.load import load_lm
from specdec_cli.lm.transformers_lm import TransformersLM
from specdec_cli.sampling.params import SamplingParams

PARAMS = SamplingParams(max_new_tokens=24)
TREES = ("4,2,1", "2,2,2,1,1,1", "3,2+1,1", "dynamic:4", "dynamic:16", "dynamic:60")


@dataclass
class Family:
    """One family's target, loaded twice so that it can draft for itself, and its reference tokens."""

    folder: Path
    target: TransformersLM
    itself: TransformersLM
    plain: list[list[int]]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = make_tiny(request.param, tmp_path_factory.mktemp(request.param), seed=1)
    return Family(folder, load_lm(str(folder)), load_lm(str(folder)), transformers_greedy(folder, PROMPTS))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> TransformersLM:
    return tiny_lm(tmp_path_factory.mktemp("draft"), "llama", seed=9, num_hidden_layers=1)


def one_by_one(target, draft, k) -> list[list[int]]:
    return [tokens(decode(target, draft, k, [prompt], PARAMS))[0] for prompt in PROMPTS]


def counts(outputs) -> tuple[int, int]:
    """Tokens drafted and accepted."""
    every = [output.speculative for output in outputs]
    return sum(one.num_draft_tokens for one in every), sum(one.num_accepted_tokens for one in every)


def test_without_a_draft(family) -> None:
    assert any(len(set(text)) > 8 for text in family.plain), "the oracle's text repeats itself: it would hide faults"
    assert tokens(decode(family.target, None, 0, params=PARAMS)) == family.plain
    assert one_by_one(family.target, None, 0) == family.plain


def test_with_a_random_draft(family, stranger) -> None:
    for place, k in enumerate((0, 1, 4, 8)):
        outputs = decode(family.target, stranger, k, params=PARAMS)
        assert tokens(outputs) == family.plain
        drafted, accepted = counts(outputs)
        assert drafted >= 60 * k
        assert accepted <= 0.1 * drafted
        assert tokens(decode(family.target, stranger, k, [PROMPTS[place]], PARAMS)) == [family.plain[place]]


@pytest.mark.in_turn(2, every=7)
@pytest.mark.parametrize("family", [*FAMILIES], indirect=True)
def test_with_itself_as_draft(family) -> None:
    for k in (1, 4, 8):
        outputs = decode(family.target, family.itself, k, params=PARAMS)
        assert tokens(outputs) == family.plain
        assert [output.speculative.acceptance_rate for output in outputs] == [1.0] * len(PROMPTS)
        assert one_by_one(family.target, family.itself, k) == family.plain


def test_with_ngram(family) -> None:
    for k in (1, 4, 8):
        outputs = decode(family.target, ngram(), k, params=PARAMS)
        assert tokens(outputs) == family.plain
        assert counts(outputs)[0] > 0
        assert one_by_one(family.target, ngram(), k) == family.plain


def check_trees(family, draft, trees, num_tokens: int) -> None:
    """Trees of a depth of 6, in a batch and alone."""
    params = SamplingParams(max_new_tokens=num_tokens)
    expected = [text[:num_tokens] for text in family.plain]
    for place, tree in enumerate(trees):
        outputs = decode(family.target, draft, 6, params=params, tree=tree)
        assert tokens(outputs) == expected
        assert counts(outputs)[0] > 0
        alone = place % len(PROMPTS)
        assert tokens(decode(family.target, draft, 6, [PROMPTS[alone]], params, tree=tree)) == [expected[alone]]


@pytest.mark.in_turn(1, every=8)
@pytest.mark.parametrize("family", [*FAMILIES], indirect=True)
def test_with_trees(family, stranger) -> None:
    check_trees(family, stranger, ["2,2,2,1,1,1"], 8)
    check_trees(family, family.itself, ["3,2+1,1", "dynamic:60"], 16)
    check_trees(family, ngram(), ["4,2,1", "dynamic:4"], 16)


@pytest.mark.slow
def test_with_every_tree(family, stranger) -> None:
    for draft in (stranger, family.itself, ngram()):
        check_trees(family, draft, TREES, PARAMS.max_new_tokens)

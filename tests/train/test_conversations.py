"""Conversations: every answer counts, each as in a sample of its own that ends with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from training_cases import batch_of, method_of

from specdec_cli.errors import UsageError
from specdec_cli.lm.transformers_lm import TransformersLM
from specdec_cli.train.answers import usable
from specdec_cli.train.methods import pard
from specdec_cli.train.samples import Sample, padded
from specdec_cli.train.session import TrainingData
from specdec_cli.train.vocabulary import DraftVocabulary

MASK = 96
TOKENS = [(11 * i * i + 5 * i + 3) % 90 + 2 for i in range(24)]
ANSWERS = [(4, 9), (10, 12), (15, 22)]
"""A gap of one token, which a draft of two tokens could cross, an answer of two, and an end that does not count."""
METHODS = [("eagle3", {}), ("dflash", {"mask_token": MASK}), ("pard", {"mask_token": MASK}), ("medusa", {})]
METHODS += [("distill", {"num_layers": 2})]


def conversation() -> Sample:
    is_answer = [any(begin <= place < end for begin, end in ANSWERS) for place in range(len(TOKENS))]
    return Sample.masked(TOKENS, is_answer)


@pytest.mark.parametrize(("name", "more"), METHODS)
@pytest.mark.parametrize("depth", [1, 4])
def test_the_loss_is_that_of_one_sample_for_each_answer(
    lm: TransformersLM, name: str, more: dict[str, Any], depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pard, "_KEPT", 1.0)  # nothing is left to chance
    start = {"start_from": lm.name} if name == "pard" else {}
    settings = {} if name == "distill" else {"depth": depth}
    method = method_of(lm, name, **more, **start, **settings)
    method.prepare([conversation()])
    module = method.build()
    found = module(batch_of(lm, method, [conversation()]))
    each = [module(batch_of(lm, method, [Sample(TOKENS[:end], begin)])) for begin, end in ANSWERS]
    num = sum(one.num_counted for one in each)
    assert found.num_counted.tolist() == num.tolist()
    assert num[0] > 0
    matches = sum(one.matches * one.num_counted for one in each)
    torch.testing.assert_close(found.matches * found.num_counted, matches)
    if depth == 1 or name in ("dflash", "pard", "distill"):  # the others weigh the mean of each depth
        total = sum(one.value * one.num_counted.sum() for one in each)
        torch.testing.assert_close(found.value * num.sum(), total, rtol=1e-4, atol=1e-4)


def test_which_tokens_of_a_conversation_count() -> None:
    sample = conversation()
    assert (sample.num_prompt_tokens, sample.skipped) == (4, ((9, 10), (12, 15), (22, 24)))
    assert sample.num_counted == 5 + 2 + 7
    assert [place for place, one in enumerate(sample.is_counted) if one] == [*range(4, 9), 10, 11, *range(15, 22)]
    cut = sample.cut(11)
    assert (len(cut.tokens), cut.num_counted) == (11, 6)
    _, is_counted = padded([sample, Sample(TOKENS[:9], 4)], torch.device("cpu"))
    assert is_counted[0].tolist() == sample.is_counted
    assert is_counted[1].nonzero().flatten().tolist() == list(range(4, 9))
    assert Sample.masked([1, 2], [False, False]).num_counted == 0
    assert Sample.masked([1, 2], [False, True]) == Sample([1, 2], 1)


def test_tokens_between_answers_are_not_drafted() -> None:
    from specdec_cli.recipe.schema import Train

    sample = Sample.masked([7, 8, 7, 7, 9, 9, 9, 5], [False, True, False, False, True, True, True, False])
    assert DraftVocabulary.by_frequency([sample], 97, Train(draft_vocab_size=2)).ids.tolist() == [8, 9]


def test_a_long_conversation_is_learned_from_as_far_as_it_fits() -> None:
    prompts = [[1, 2], [1, 2, 3], list(range(20)), list(range(30))]
    given = [[Sample([*one, 5, 6], len(one))] for one in prompts[:2]]
    given += [[Sample.masked(list(range(24)), [4 <= place < 8 or place > 19 for place in range(24)])]]
    given += [[Sample.masked(list(range(33)), [place > 29 for place in range(33)])]]
    data = TrainingData.of(prompts, 12, 1, 1, given)
    assert [one.index for one in data.train] == [0, 2]
    assert [one.index for one in data.held_out] == [1], "a conversation whose last turn does not fit is none"
    assert data.notices == ["1 prompt left out: no room for an answer in the context"]
    assert [one.num_counted for one in usable(given[2], 12)] == [4]
    other = [[Sample.masked(its[0].tokens, [place > 1 for place in range(len(its[0].tokens))])] for its in given]
    assert TrainingData.of(prompts, 12, 1, 1, other).identity != data.identity
    with pytest.raises(UsageError, match="no prompt leaves room"):
        TrainingData.of(prompts[2:], 12, 1, 1, given[2:])

"""The table model keeps the door's contract."""

import numpy as np
import pytest
import torch
from typed import stand_in

from specdec_cli.drafted import Drafted
from specdec_cli.lm.door import LM, Row
from specdec_cli.measure.audit.table import TableLM


def test_logits_are_the_function_of_each_context() -> None:
    lm: LM = TableLM(lambda context: [sum(context), len(context), 0.0], 3)
    logits = lm.score([Row(0, [1, 2, 3], 2), Row(1, (4,), 1), Row(2, [1], 0)])
    assert logits.tolist() == [[3, 2, 0], [6, 3, 0], [4, 1, 0]]
    assert logits.dtype == torch.float32


def test_only_the_last_tokens_count_and_each_is_asked_once() -> None:
    asked = []

    def function(context):
        asked.append(context)
        return np.array([len(asked), 0.0])

    lm = TableLM(function, 2, order=2)
    first = lm.score([Row(0, [0, 1, 0, 1, 0, 1], 6)])
    assert asked == [(0,), (0, 1), (1, 0)]
    assert first[1].equal(first[3])
    lm.score([Row(1, [1, 1, 1, 0, 1], 1)])
    assert len(asked) == 3


def test_many_contexts_grow_the_table() -> None:
    lm = TableLM.random(5, order=3, seed=1)
    contexts = [[a, b, c] for a in range(5) for b in range(5) for c in range(5)]
    first = lm.score([Row(i, context, 1) for i, context in enumerate(contexts)])
    assert first.equal(lm.score([Row(i, context, 1) for i, context in enumerate(contexts)]))
    assert len({tuple(row) for row in first.tolist()}) == 125
    assert not first.equal(TableLM.random(5, order=3, seed=2).score([Row(0, context, 1) for context in contexts]))


def test_blocks_are_counted() -> None:
    lm = TableLM.random(4)
    lm.score([Row(0, [1] * 17, 1), Row(1, [1], 1)])
    assert lm.num_blocks - lm.num_free_blocks == 3
    lm.score([Row(0, [1] * 16, 1)])
    lm.check_integrity()
    lm.release(1)
    lm.release(7)
    assert lm.num_blocks - lm.num_free_blocks == 1
    lm.release(0)
    assert lm.num_free_blocks == lm.num_blocks


def test_too_long_a_context_is_a_fault() -> None:
    with pytest.raises(AssertionError, match="does not fit"):
        TableLM(lambda context: [0.0], 1, max_context=4).score([Row(0, [0] * 5, 1)])


@pytest.mark.parametrize("order", [None, 1, 3])
def test_a_node_of_a_drafted_tree_sees_the_context_and_its_own_path(order: int | None) -> None:
    lm = TableLM.random(7, order=2, seed=3)
    lm._order = order
    context, tree = [1, 2, 3], Drafted((4, 5, 6, 4, 2), (-1, -1, 0, 0, 2))
    texts = [context[:2], context, *([*context, *tree.tokens_to(node)] for node in range(len(tree)))]
    expected = lm.score([Row(i, text, 1) for i, text in enumerate(texts)])
    for num in range(len(texts) + 1):
        assert lm.score([Row(9, context, num, tree)]).equal(expected[len(texts) - num :])


def test_a_drafted_chain_is_text() -> None:
    lm = TableLM.random(7, order=stand_in(None), seed=3)
    assert lm.score([Row(0, [1, 2], 4, Drafted.chain([3, 4, 5]))]).equal(lm.score([Row(0, [1, 2, 3, 4, 5], 4)]))

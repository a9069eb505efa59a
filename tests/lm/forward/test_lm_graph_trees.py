"""Drafted trees in recorded graphs: the logits of the forward as it is, with masks on the device and by the kernels.

As in test_lm_graphs, on a CPU what would be recorded runs anew; Triton's kernels run in its interpreter.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from test_lm_graphs import GPU, Recorder
from test_lm_trees import check
from tiny_engine import PROMPTS, decode, tokens
from tiny_models import VOCAB, make_tiny
from typed import not_none

from specdec_cli.drafted import Drafted
from specdec_cli.lm import decoders
from specdec_cli.lm.cache.contexts import ForwardInput
from specdec_cli.lm.cache.layout import DraftedNodes
from specdec_cli.lm.cache.pending_tokens import PendingTokens
from specdec_cli.lm.door import Row, Tapped
from specdec_cli.lm.forward import graph_inputs, graphs
from specdec_cli.lm.load import load_lm
from specdec_cli.sampling.params import SamplingParams

TEXT = [(11 * i * i + 3 * i) % VOCAB for i in range(120)]
TREE = Drafted((5, 6, 7, 8, 9, 10, 11), (-1, -1, 0, 0, 2, 3, 1))
SIDE = Drafted((1, 2, 3, 4, 5), (-1, 0, 0, 0, 3))
# A chain of 62 beside a node: the last one's mask has its highest bit set.
LONGEST = Drafted((96, *range(63)), (-1, -1, *range(1, 63)))


@pytest.fixture(params=["cpu", GPU])
def device(request: pytest.FixtureRequest):
    return request.param


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, device):
    """Counts what is recorded; without a GPU it stands in for one."""
    recorder, real = Recorder(), graphs.record

    def counted(*given):
        recorder.num_recorded += 1
        return real(*given)

    monkeypatch.setattr(graphs, "record", recorder if device == "cpu" else counted)
    monkeypatch.setattr(decoders, "check_recordable", lambda *_: None)
    return recorder


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device, recorder):
    """Makes a model's forward twice: as it is, and in graphs that attend by masks or by the kernels."""

    def made(family="llama", attention="masks", seed=0, **shape):
        def kernels(_):
            if attention == "masks":
                return None
            from specdec_cli.lm.kernels import split_attention

            return split_attention

        monkeypatch.setattr(graphs, "kernels_for", kernels)
        folder = str(make_tiny(family, tmp_path / f"{family}{seed}", seed, **shape))
        how = {"device": device, "block_size": 4, "check": False}
        return [load_lm(folder, decoder=name, **how) for name in ("transformers", "graphs")]

    return made


def assert_close(plain, recorded, rows) -> None:
    expected, found = plain.score(rows), recorded.score(rows)
    assert torch.allclose(expected, found, atol=2e-4), (expected - found).abs().max()
    recorded.check_integrity()


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2"])
def test_trees_have_the_logits_of_the_forward_as_it_is(family, pair) -> None:
    """Rows that are trees, chains and text in one forward, behind windows too, then along accepted paths."""
    plain, recorded = pair(family)
    assert_close(plain, recorded, [Row(0, TEXT[:19], 1), Row(1, TEXT[30:37], 1), Row(2, TEXT[50:53], 1)])
    steps = [
        [Row(0, TEXT[:20], 8, TREE), Row(1, TEXT[30:38], 4, Drafted.chain([3, 1, 4])), Row(2, TEXT[50:57], 3)],
        [Row(0, [*TEXT[:20], 5, 8, 10, 40], 6, SIDE), Row(1, [*TEXT[30:38], 3, 50], 8, TREE)],
        [Row(1, [*TEXT[30:38], 3, 50, 6, 11, 60], 1), Row(0, [*TEXT[:20], 5, 8, 10, 40, 1, 4, 5, 3], 8, TREE)],
    ]
    for rows in steps:
        assert_close(plain, recorded, rows)


@pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton")
def test_the_kernels_attend_over_trees(pair, recorder) -> None:
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    plain, recorded = pair("gemma2", "kernels", **layers)
    assert_close(plain, recorded, [Row(0, TEXT[:19], 0), Row(1, TEXT[30:37], 0)])
    assert_close(plain, recorded, [Row(0, TEXT[:20], 6, SIDE), Row(1, TEXT[30:38], 4, Drafted.chain([3, 1, 4]))])
    assert recorder.num_recorded == 1


def test_nodes_are_scored_as_their_paths(pair) -> None:
    _, recorded = pair("mistral")
    for seed in range(2):
        check(recorded, seed)


def test_a_tree_may_have_as_many_nodes_as_a_mask_has_bits(pair) -> None:
    plain, recorded = pair()
    assert LONGEST.ancestors(63) >> 63 == 1
    assert_close(plain, recorded, [Row(0, TEXT[:9], 1)])
    assert_close(plain, recorded, [Row(0, TEXT[:10], 65, LONGEST)])


def test_a_tree_that_the_device_alone_knows_is_scored_as_one_that_the_host_knows(pair) -> None:
    """Two of them, then along accepted paths; a missing node changes nothing."""
    plain, recorded = pair("mistral")
    assert_close(plain, recorded, [Row(0, TEXT[:19], 1), Row(1, TEXT[30:37], 1)])
    trees = [TREE, Drafted((*SIDE.tokens, 7, 9), (*SIDE.parents, 4, 2))]
    paths = [[tree.ancestors(node) for node in range(7)] for tree in trees]
    paths[1][6] = 0
    unread = PendingTokens(torch.tensor([tree.tokens for tree in trees]), torch.tensor(paths))
    stars = [Drafted(tuple(unread.stand_ins(row, 7)), (-1,) * 7) for row in range(2)]
    texts = [TEXT[:20], TEXT[30:38]]
    expected = plain.score([Row(row, texts[row], 8, tree) for row, tree in enumerate(trees)])
    found = recorded.score([Row(row, texts[row], 8, star, unread) for row, star in enumerate(stars)])
    assert torch.allclose(expected[:15], found[:15], atol=2e-4)
    assert unread.known_nodes(stars[0]) == TREE
    assert [unread.num_found(star) for star in stars] == [7, 6]
    assert_close(plain, recorded, [Row(0, [*TEXT[:20], 5, 8, 10, 40], 1), Row(1, [*TEXT[30:38], 1, 4, 5, 7, 3], 1)])


def test_a_chain_and_a_tree_of_its_size_are_one_graph(pair, recorder) -> None:
    _, recorded = pair()
    recorded.score([Row(0, TEXT[:9], 1)])
    recorded.score([Row(0, TEXT[:10], 8, Drafted.chain(range(7)))])
    before = recorder.num_recorded
    recorded.score([Row(0, TEXT[:11], 8, TREE)])
    recorded.score([Row(0, [*TEXT[:11], 90], 8)])
    assert recorder.num_recorded == before


def test_hidden_states_of_nodes_are_those_without_graphs(pair) -> None:
    plain, recorded = pair()
    states = []
    for lm in (plain, recorded):
        lm.tap((0, "final"))
        tapped = Tapped()
        lm.score([Row(0, TEXT[:9], 8, TREE, tapped=tapped), Row(1, TEXT[20:24], 1)])
        assert tapped.first == 0
        states.append(not_none(tapped.states))
    assert states[0].shape[0] == 16
    assert torch.allclose(states[0], states[1], atol=2e-4)


@pytest.mark.in_turn(0)
@pytest.mark.parametrize("tree", ["3,2,1", "dynamic:12"])
def test_texts_with_trees_in_graphs_are_those_of_plain_decoding(tree: str, pair, recorder) -> None:
    (plain, target), (_, draft) = pair(), pair(seed=1)
    params = SamplingParams(max_new_tokens=16)
    before = recorder.num_recorded
    assert tokens(decode(target, draft, 3, PROMPTS, params, tree=tree)) == tokens(
        decode(plain, None, 0, PROMPTS, params)
    )
    assert recorder.num_recorded > before


true_among = DraftedNodes.among


def keys_at_their_places(cls, places, positions, *more):
    return true_among(places, places, *more)


FAULTS = {
    "an ancestor is not seen": (Drafted, "ancestors", lambda tree, node: sum(1 << i for i in tree.path(node)[1:])),
    "a sibling sees a sibling": (Drafted, "ancestors", lambda tree, node: (1 << node + 1) - 1),
    "position is the place": (ForwardInput, "positions", property(lambda feed: range(feed.keep, len(feed.context)))),
    "keys are where they lie": (DraftedNodes, "among", classmethod(keys_at_their_places)),
    "accepted keys are not moved": (graphs.Graphs, "move", lambda recorded, moves: None),
}


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault, pair, monkeypatch: pytest.MonkeyPatch) -> None:
    _, recorded = pair("mistral")  # its window sees positions, not places
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(AssertionError, match="place"):
        check(recorded)


def test_paths_that_the_target_does_not_read_are_noticed(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "stood_for", lambda tokens, unread: torch.zeros_like(tokens))
    with pytest.raises(AssertionError):
        test_a_tree_that_the_device_alone_knows_is_scored_as_one_that_the_host_knows(pair)


def test_a_mask_that_lost_its_highest_bit_is_caught(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_inputs, "_signed", lambda mask: mask & (1 << 63) - 1)
    with pytest.raises(AssertionError):
        test_a_tree_may_have_as_many_nodes_as_a_mask_has_bits(pair)

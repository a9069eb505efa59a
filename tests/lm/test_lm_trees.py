"""Drafted trees behind the LM's door: a node's logits are those of its path as a text, and the accepted path stays."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from invariance import holds
from tiny_models import EXTRA_FAMILIES, FAMILIES, VOCAB, make_tiny

from specdec_cli.drafted import Drafted
from specdec_cli.lm.cache.contexts import ForwardInput
from specdec_cli.lm.door import Row
from specdec_cli.lm.forward.eager import EagerForward
from specdec_cli.lm.llama.llama import LlamaDecoder
from specdec_cli.lm.load import load_lm

BITWISE = {
    "own float32": {},
    "own bfloat16": {"dtype": "bfloat16"},
    "own int8": {"quantize": "int8"},
    "own bfloat16 int8": {"dtype": "bfloat16", "quantize": "int8"},
    "transformers bfloat16": {"dtype": "bfloat16", "decoder": "transformers"},
}


def random_tree(draw: random.Random, num_nodes: int) -> Drafted:
    """Any shape, from a chain to a fan; tokens repeat, but not among siblings."""
    nodes: list[tuple[int, int]] = []
    reach = draw.choice((1, 3, num_nodes))  # how far back a parent lies
    while len(nodes) < num_nodes:
        node = draw.randint(max(-1, len(nodes) - 1 - reach), len(nodes) - 1), draw.randrange(VOCAB)
        if node not in nodes:
            nodes.append(node)
    return Drafted(tuple(token for _, token in nodes), tuple(parent for parent, _ in nodes))


def check(lm, seed=0, *, is_same=lambda a, b: torch.allclose(a, b, atol=1e-4), num_rows=3, num_steps=4) -> None:
    """Decode sequences together with random trees, of which random paths are accepted; each node beside its text."""
    draw = random.Random(seed)
    contexts = {row: [draw.randrange(VOCAB) for _ in range(draw.randint(2, 50))] for row in range(num_rows)}
    for _ in range(num_steps):
        trees = {row: random_tree(draw, draw.choice((1, 4, 16))) for row in contexts}
        rows = [Row(row, contexts[row], len(tree) + 1, tree) for row, tree in trees.items()]
        found = torch.split(lm.score(rows), [row.num_logits for row in rows])
        lm.check_integrity()
        for logits, (row, tree) in zip(found, trees.items(), strict=True):
            texts = [[*contexts[row], *tree.tokens_to(node)] for node in range(-1, len(tree))]
            for place, text in enumerate(texts):
                alone = lm.score([Row(100, text, 1)])
                lm.release(100)
                assert is_same(logits[place], alone[0]), f"place {place} of {tree}"
            contexts[row] = [*texts[draw.randrange(len(texts))], draw.randrange(VOCAB)]
    for row in contexts:
        lm.release(row)
    lm.check_integrity()
    assert lm.num_free_blocks == lm.num_blocks, "free and used blocks are all"


@pytest.mark.in_turn(5, every=8)
@pytest.mark.parametrize("family", [*FAMILIES, *EXTRA_FAMILIES])
def test_nodes_are_scored_as_their_paths(family, tmp_path: Path) -> None:
    check(load_lm(str(make_tiny(family, tmp_path)), decoder="transformers"))


@pytest.mark.in_turn(0, every=6)
@pytest.mark.parametrize("options", BITWISE.values(), ids=BITWISE)
@pytest.mark.parametrize("block_size", [4, 16])
def test_nodes_have_their_paths_bits(options, block_size: int, tmp_path: Path) -> None:
    if "decoder" in options and not holds(torch.bfloat16):
        pytest.skip("this machine's bfloat16 kernels are not row-invariant")
    lm = load_lm(str(make_tiny("llama", tmp_path)), block_size=block_size, **options)
    assert lm.decoder == options.get("decoder", "own")
    for seed in range(3):
        check(lm, seed, is_same=torch.equal)


def test_a_tree_is_cut_at_long_ropes_threshold(tmp_path: Path) -> None:
    lm = load_lm(str(make_tiny("phi3_long", tmp_path)))
    tree = Drafted((5, 6, 7, 8, 9, 10), (-1, -1, 0, 2, 1, 3))
    for length in (20, 21, 22, 23, 24, 25):
        text = [(7 * i) % VOCAB for i in range(length)]
        found = lm.score([Row(0, text, 7, tree)])
        for node in range(-1, 6):
            alone = lm.score([Row(1, [*text, *tree.tokens_to(node)], 1)])
            assert torch.allclose(found[node + 1], alone[0], atol=1e-4), (length, node)
            lm.release(1)
        lm.check_integrity()


def test_a_prefix_that_others_read_is_not_written(tmp_path: Path) -> None:
    """A published block stays as it is when the path of a tree is moved behind it."""
    lm = load_lm(str(make_tiny("llama", tmp_path)), block_size=4)
    text = [(5 * i) % VOCAB for i in range(14)]
    lm.adopt(0, text, "salt")
    tree = Drafted((1, 2, 3, 4, 5, 6), (-1, -1, 1, 2, 3, 4))
    lm.score([Row(0, text, 7, tree)])
    longer = [*text, 2, 3, 4, 5, 6, 7]
    mine = lm.score([Row(0, longer, 1)])
    assert lm.adopt(1, [*longer, 8], "salt") >= 16
    shared = lm.score([Row(1, [*longer, 8], 2)])
    lm.release(0)
    assert torch.equal(lm.score([Row(2, [*longer, 8], 2)]), shared)
    assert torch.equal(shared[0], mine[0])
    lm.check_integrity()


true_path = Drafted.path
FAULTS = {
    "position is the place": (ForwardInput, "positions", property(lambda feed: range(feed.keep, len(feed.context)))),
    "accepted keys are not moved": (EagerForward, "move", lambda forward, moves: None),
    "accepted keys are not moved by our own decoder": (LlamaDecoder, "move", lambda forward, moves: None),
    "a sibling sees a sibling": (Drafted, "path", lambda tree, node: tuple(range(node + 1))),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_own = "own" in fault or "sibling" in fault
    lm = load_lm(str(make_tiny("llama", tmp_path)), decoder="auto" if is_own else "transformers")
    if "sibling" in fault:  # positions stay right
        monkeypatch.setattr(Drafted, "depth", lambda tree, node: len(true_path(tree, node)))
    monkeypatch.setattr(*FAULTS[fault])
    lm.hold(lm.num_blocks)
    with pytest.raises(AssertionError, match="place"):
        check(lm)

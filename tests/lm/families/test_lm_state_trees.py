"""Drafted trees on models with a state: each node continues its parent's state, and the accepted path's states stay."""

import random
from pathlib import Path

import pytest
import torch
from invariance import holds
from test_lm_state_rollback import difference, states
from tiny_hybrids import EXPERTS, HYBRIDS, save_hybrid
from tiny_models import VOCAB

from specdec_cli.drafted import CONTEXT_END, Drafted
from specdec_cli.lm.cache.layout import Stretch
from specdec_cli.lm.cache.state_store import StateStore
from specdec_cli.lm.door import Row
from specdec_cli.lm.forward.eager import EagerForward
from specdec_cli.lm.load import load_lm
from specdec_cli.lm.transformers_lm import TransformersLM

DEFAULT = ["granitemoehybrid", "lfm2", "mamba", "qwen3_next"]
REST = [pytest.param(family, marks=pytest.mark.slow) for family in HYBRIDS if family not in {*DEFAULT, *EXPERTS}]
TEXT = [(11 * i * i + 3 * i) % VOCAB for i in range(60)]
NODES, FRESH = 9, 99
TREE = Drafted((5, 6, 7, 8, 9, 10, 11, 12, 13), (-1, -1, 0, 0, 2, 1, 4, 6, 6))


@pytest.fixture(scope="module", params=[*DEFAULT, *REST])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hybrid(request.param, tmp_path_factory.mktemp(request.param))


def load(folder: Path, dtype: str = "float32") -> TransformersLM:
    return load_lm(str(folder), dtype=dtype, num_blocks=60, block_size=4, extra_tokens=NODES, check=dtype == "float32")


def random_tree(chance: random.Random) -> Drafted:
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(chance.randrange(NODES + 1)):
        parent = chance.randrange(CONTEXT_END, node)
        known = {tokens[i] for i, one in enumerate(parents) if one == parent}
        tokens.append(next(token for token in iter(lambda: chance.randrange(VOCAB), None) if token not in known))
        parents.append(parent)
    return Drafted(tuple(tokens), parents)


def play(lm: TransformersLM, num_rounds: int, seed: int = 0, has_states: bool = True) -> float:
    """Random trees of several sequences, accepted along random paths; the largest difference from fresh forwards."""
    chance, worst = random.Random(seed), 0.0
    texts: dict[int, list[int]] = {}
    for handle in range(3):
        texts[handle] = [chance.randrange(VOCAB) for _ in range(chance.randrange(1, 20))]
        lm.adopt(handle, texts[handle], "")
    for _ in range(num_rounds):
        trees = {handle: random_tree(chance) for handle in texts if chance.random() < 0.8}
        rows = [Row(handle, list(texts[handle]), len(tree) + 1, tree) for handle, tree in trees.items()]
        logits = dict(zip(trees, torch.split(lm.score(rows), [row.num_logits for row in rows]), strict=True))
        lm.check_integrity()
        for handle, tree in trees.items():
            node = chance.randrange(CONTEXT_END, len(tree))
            path = tree.tokens_to(node)
            fresh = lm.score([Row(FRESH, [*texts[handle], *path], 1)])
            worst = max(worst, difference(logits[handle][node + 1], fresh[0]))
            lm.release(FRESH)
            texts[handle] += [*path, chance.randrange(VOCAB)]
            if has_states:
                lm.score([Row(handle, texts[handle], 1)])
                lm.score([Row(FRESH, texts[handle], 1)])
                pairs = zip(states(lm, handle), states(lm, FRESH), strict=True)
                worst = max([worst, *(difference(found, right) for found, right in pairs)])
                lm.release(FRESH)
            if len(texts[handle]) > 44:
                lm.release(handle)
                texts[handle] = texts[handle][: chance.randrange(1, 30)]
                lm.adopt(handle, texts[handle], "")
    for handle in texts:
        lm.release(handle)
    return worst


def test_nodes_and_accepted_paths_are_those_of_fresh_forwards(folder: Path) -> None:
    assert play(load(folder), 15) < 1e-3


@pytest.mark.in_turn(0)
@pytest.mark.parametrize("rows_together", [64, 4])
def test_in_bfloat16_a_node_has_the_bits_of_its_path(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rows_together: int
) -> None:
    """However the tree is cut into forwards, too."""
    if not holds(torch.bfloat16):
        pytest.skip("this machine's bfloat16 kernels are not row-invariant")
    lm = load(folder, "bfloat16")
    assert isinstance(lm._forward, EagerForward)
    object.__setattr__(lm._forward.layouts, "rows_together", rows_together)
    lm.score([Row(0, TEXT[:20], 0)])
    logits = lm.score([Row(0, TEXT[:21], len(TREE) + 1, TREE), Row(1, TEXT[5:9], 1)])
    for node in range(len(TREE)):
        lm.score([Row(FRESH, TEXT[:20], 0)])
        chain = lm.score([Row(FRESH, [*TEXT[:21], *TREE.tokens_to(node)], 1)])
        assert torch.equal(logits[node + 1], chain[0]), node
        lm.release(FRESH)
    text = [*TEXT[:21], *TREE.tokens_to(7), 3]
    lm.score([Row(FRESH, TEXT[:20], 0)])
    assert torch.equal(lm.score([Row(0, text, 1)]), lm.score([Row(FRESH, text, 1)]))
    found = zip(states(lm, 0), states(lm, FRESH), strict=True)
    assert all(torch.equal(*pair) for pair in found)


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("fault", ["a node continues the one before it", "the path's states are not moved"])
def test_a_planted_fault_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    lm = load(save_hybrid("granitemoehybrid", tmp_path))
    if fault == "a node continues the one before it":
        monkeypatch.setattr(Stretch, "before", lambda _, place: place - 1)
    else:
        monkeypatch.setattr(StateStore, "move", lambda *_: None)
    assert play(lm, 10) > 1e-2

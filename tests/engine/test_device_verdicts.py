"""Verdicts of the device's tensor programs are the host's, row by row, for chains and for trees that lack nodes."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from shortened import mostly_slow
from test_lm_graphs import GPU
from torch import Tensor

from specdec_cli.drafted import CONTEXT_END, Drafted
from specdec_cli.drafters.contract import Guesses
from specdec_cli.engine import device_verdicts
from specdec_cli.engine.device_verdicts import ChanceJudge, RoundForm, kind_of
from specdec_cli.engine.residual import Residuals
from specdec_cli.engine.verify import Verdict, VerifyRow, verify
from specdec_cli.lm.forward.device_judge import ScoredNodes, TreesOnDevice, last_place
from specdec_cli.sampling.chain import ChainRow, distribution
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.tree_shape import TreeShape
from specdec_cli.verification import GREEDY, RULES

NUM_TOKENS = 7
NUM_ROWS = 64
RATES = (0.7, 0.6, 0.5)


@dataclass
class Round:
    """A round of rows: what is drafted of each, and what the target says.

    Args:
        shape: of the drafts.
        params: of the rows.
        positions: lengths of the texts.
        logits: of the target, by static numbers of nodes [B, N + 1, V].
        nodes: tokens by static numbers [B, N].
        is_there: which are there [B, N].
        q: by static numbers [B, N, V].
    """

    shape: TreeShape
    params: list[SamplingParams]
    positions: list[int]
    logits: Tensor
    nodes: Tensor
    is_there: Tensor
    q: Tensor

    @classmethod
    def random(cls, shape: str, params: SamplingParams, seed: int) -> "Round":
        generator = np.random.default_rng(seed)
        tree = TreeShape.parse(shape)
        num = len(tree.parents)
        # q is often near p, and has few tokens.
        logits = generator.normal(size=(NUM_ROWS, num + 1, NUM_TOKENS)).astype(np.float32) * 2
        parents = np.array(tree.parents)
        q = np.exp(logits[:, parents + 1] + generator.normal(size=(NUM_ROWS, num, NUM_TOKENS)) * 0.5)
        lacks = generator.random((NUM_ROWS, num, NUM_TOKENS)) < generator.random((NUM_ROWS, 1, 1))
        for node, parent in enumerate(tree.parents):  # siblings share a distribution
            first = tree.parents.index(parent)
            q[:, node], lacks[:, node] = q[:, first], lacks[:, first]
        lacks &= q < q.max(-1, keepdims=True)
        q = np.where(lacks, 0, q)
        q /= q.sum(-1, keepdims=True)
        q = q.astype(np.float32)
        nodes, is_there = np.zeros((NUM_ROWS, num), dtype=np.int64), np.zeros((NUM_ROWS, num), dtype=bool)
        for row in range(NUM_ROWS):
            for node, parent in enumerate(tree.parents):
                left = q[row, node].copy()
                left[[nodes[row, other] for other in range(node) if tree.parents[other] == parent]] = 0
                has_parent = parent == CONTEXT_END or is_there[row, parent]
                is_there[row, node] = has_parent and left.sum() > 0
                if is_there[row, node]:
                    nodes[row, node] = generator.choice(NUM_TOKENS, p=left.astype(float) / left.sum(dtype=float))
        own = [
            replace(params, seed=seed, index=row, temperature=params.temperature * (row % 5 > 0))
            for row in range(NUM_ROWS)
        ]
        positions = [5 + row % 3 for row in range(NUM_ROWS)]
        return cls(tree, own, positions, *map(torch.from_numpy, (logits, nodes, is_there, q)))

    @property
    def order(self) -> Tensor:
        """The static number of each node, missing ones last [B, N]."""
        return self.is_there.logical_not().to(torch.uint8).sort(dim=1, stable=True).indices

    def drafted(self, row: int) -> Drafted:
        """The nodes of a row that are there."""
        drafted = Drafted(tuple(range(len(self.shape.parents))), self.shape.parents)
        kept = [node for node in range(len(drafted)) if self.is_there[row, node]]
        return drafted.keep(kept).with_tokens(self.nodes[row, kept].tolist())

    def host(self, rule: str) -> list[Verdict]:
        """The host's verdicts."""
        found = []
        for row, params in enumerate(self.params):
            drafted, order = self.drafted(row), self.order[row, : len(self.drafted(row))]
            own = RULES[rule] if params.temperature or RULES[rule].needs_rates else RULES[GREEDY]
            q = self.q[row, order] if own.needs_q else None
            logits = self.logits[row, [0, *(order + 1).tolist()]]
            context = [0] * self.positions[row]
            p = distribution(logits, [ChainRow(params, context, 1, drafted, frozenset())], NUM_TOKENS)
            found += verify(p, [VerifyRow(own, params, self.positions[row], Guesses(drafted, q), RATES)])
        return found

    def device(self, rule: str, device: str) -> list[Verdict]:
        """The device's, by numbers of nodes without the missing ones."""
        its, order, num = RULES[rule], self.order, len(self.shape.parents)
        kind = kind_of(self.params, its, NUM_TOKENS)
        judge = ChanceJudge(
            RoundForm(its, kind, self.shape.parents, self.shape.depth, True, its.needs_q, RATES, NUM_TOKENS),
            NUM_ROWS,
            torch.zeros(
                NUM_ROWS, self.shape.depth + 1, NUM_TOKENS * kind.has_noise, dtype=torch.float64, device=device
            ),
        )
        judge.take(self.params)
        judge.prepare([length - length % 2 for length in self.positions], torch.tensor(self.positions, device=device))
        masks = [
            [self.drafted(row).ancestors(node) for node in range(len(self.drafted(row)))] for row in range(NUM_ROWS)
        ]
        paths = torch.tensor([[*its, *[0] * (num - len(its))] for its in masks], device=device)
        places = torch.cat((torch.zeros_like(order[:, :1]), order + 1), 1)
        logits = torch.take_along_dim(self.logits, places[:, :, None], 1)
        largest, likeliest = logits.max(-1, keepdim=True)
        tokens, q = self.nodes.gather(1, order), torch.take_along_dim(self.q, order[:, :, None], 1)
        given = tokens, order, q, logits, likeliest[:, :, 0], largest
        tokens, order, *rest = (each.to(device) for each in given)
        scored = ScoredNodes(TreesOnDevice.chosen(paths), tokens, None if self.shape.is_chain else order, *rest)
        stands, own, is_right = judge.decide(scored)
        assert is_right.all()
        ends = (last_place(stands)[:, 0] - 1).tolist()
        verdicts = [
            Verdict(self.drafted(row).path(end), token)
            for row, (end, token) in enumerate(zip(ends, own.tolist(), strict=True))
        ]
        assert [len(verdict.path) for verdict in verdicts] == stands.sum(1).tolist()
        return verdicts


def check(rule: str, shape: str, params: SamplingParams, *seeds: int, device: str = "cpu") -> None:
    for seed in seeds:
        check_round(rule, shape, params, seed, device)


def check_round(rule: str, shape: str, params: SamplingParams, seed: int, device: str) -> None:
    its = Round.random(shape, params, seed)
    host = its.host(rule)
    assert its.device(rule, device) == host
    assert len({len(verdict.path) for verdict in host}) > 2


CHAINS = [(rule, "1,1,1") for rule in ("rejection", "block", "gumbel", "exact-match", "typical", "synthetic")]
TREES = [
    (rule, shape)
    for shape in ("2,2,1", "3,1,2")
    for rule in ("rejection", "traversal", "gumbel", "exact-match", "synthetic")
]


@pytest.mark.in_turn(3, every=4)
@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("seed", mostly_slow(range(40), range(1)))
@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=1.0), SamplingParams(temperature=0.7, top_k=4, top_p=0.8)]
)
@pytest.mark.parametrize(("rule", "shape"), [*CHAINS, *TREES])
def test_verdicts_are_the_hosts(rule: str, shape: str, params: SamplingParams, seed: int, device: str) -> None:
    check(rule, shape, params, seed, device=device)


def forgets_the_missing(residuals: Any, nodes: Any, new: Any, old: Any) -> Any:
    return new


def judged_alone(scored: ScoredNodes, judge: ChanceJudge) -> Any:
    """Traversal without what the tokens weigh together."""
    return device_verdicts._by_residuals(scored, judge, is_joint=False)


def shifted_by_one(judge: ChanceJudge, values: Tensor, scored: ScoredNodes) -> Tensor:
    return by_depth(judge, values.roll(1, 1), scored)


by_depth = ChanceJudge.by_depth


@pytest.mark.in_turn(1)
@pytest.mark.parametrize(("rule", "place", "name", "fault"), [
    ("traversal", Residuals, "_if_there", forgets_the_missing),
    ("rejection", TreesOnDevice, "whole_paths", lambda trees, stands: stands),
    ("traversal", device_verdicts, "traversal", judged_alone),
    ("exact-match", ChanceJudge, "by_depth", shifted_by_one),
    ("gumbel", ChanceJudge, "by_depth", shifted_by_one),
])  # fmt: skip
def test_planted_faults_are_caught(
    rule: str, place: Any, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    device_verdicts.decider_of.cache_clear()
    monkeypatch.setattr(place, name, fault)
    with pytest.raises(AssertionError):
        check(rule, "2,2,1", SamplingParams(temperature=1.0), *range(20))
    device_verdicts.decider_of.cache_clear()

"""Faults planted in trees, one at a time: each must be seen by the test that correct rules pass."""

from dataclasses import dataclass, replace

import pytest
import torch
from planted import keep_residuals_of_siblings
from table_loop import Table
from tree_loop import TREES, TreeLoop, measured_tree

from specdec_cli.drafted import CONTEXT_END, Drafted
from specdec_cli.engine.residual import Residuals
from specdec_cli.engine.verify import RowGroup
from specdec_cli.measure.audit.table import TableLM
from specdec_cli.sampling import chain as chain_module
from specdec_cli.sampling import noise
from specdec_cli.sampling.params import SamplingParams

TABLE = Table.random(num_tokens=4, seed=1, sharpness=2.0)
PLAIN = SamplingParams(temperature=1.0)
ALARM = 1e-6
JUDGES = ("traversal", "rejection")


def p_value(mode, name: str = "2,2", loop=TreeLoop, params=PLAIN, **settings):
    return measured_tree(loop(TABLE, params, mode, TREES[name], 5_000, **settings), params).p_value


class SeesSiblings(TableLM):
    """A wrong mask: each node sees all nodes before it, as if the tree were a chain."""

    def _seen(self, row):
        return super()._seen(replace(row, drafted=Drafted.chain(row.drafted.tokens)))


class DrawsWithReplacement(TreeLoop):
    """A sibling that comes a second time makes room for the likeliest other token."""

    parent = None

    def choose(self, weights, uniforms):
        if weights is not self.parent:
            self.parent, self.q = weights, weights.clone()
        chosen = super().choose(self.q, uniforms)
        is_taken = weights.gather(1, chosen[:, None])[:, 0] == 0
        return torch.where(is_taken, weights.argmax(dim=-1), chosen)


@dataclass
class Flat:
    """A tree whose places count for positions."""

    drafted: Drafted

    def __len__(self):
        return len(self.drafted)

    def tokens_to(self, node):
        return self.drafted.tokens[: node + 1]


@pytest.mark.in_turn(1, every=4)
@pytest.mark.parametrize("mode", [*JUDGES, "exact-match", "gumbel"])
def test_a_sibling_seen_by_a_sibling(mode) -> None:
    assert p_value(mode) > ALARM
    assert p_value(mode, kind=SeesSiblings) < ALARM


def first_of_three(loop):
    """The first token where three follow the context: with one level both rules are one."""
    table = Table.random(num_tokens=5, seed=1, sharpness=1.0, disagreement=1.5)
    return measured_tree(loop(table, PLAIN, "traversal", (-1, -1, -1), 30_000), PLAIN, length=1).p_value


@pytest.mark.slow
def test_siblings_drawn_with_replacement_but_judged_without() -> None:
    assert first_of_three(TreeLoop) > ALARM
    assert first_of_three(DrawsWithReplacement) < ALARM


def test_siblings_drawn_without_replacement_but_judged_with(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = Residuals._refuse_drawn

    def forgets(residuals, nodes):
        correct(residuals, nodes)
        residuals.rest[:] = 1.0

    monkeypatch.setattr(Residuals, "_refuse_drawn", forgets)
    assert first_of_three(TreeLoop) < ALARM


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("mode", [*JUDGES])
def test_a_residual_that_is_not_updated_after_a_refused_sibling(mode, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_residuals_of_siblings(monkeypatch)
    assert p_value(mode, "3,1,1") < ALARM


def test_a_mass_that_traversal_does_not_update(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = Residuals._lower

    def keeps(residuals, above, num, _, *nodes):
        correct(residuals, above, num, residuals.mass[above], *nodes)  # a / (a + 1 - a) = a

    monkeypatch.setattr(Residuals, "_lower", keeps)
    assert p_value("traversal") < ALARM


@pytest.mark.in_turn(0, every=3)
@pytest.mark.parametrize("mode", [*JUDGES, "exact-match"])
def test_penalties_that_take_a_place_for_a_position(mode, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=1.0, frequency_penalty=1.5)
    assert p_value(mode, params=params) > ALARM
    correct = chain_module._penalise

    def flat(scores, rows, starts) -> None:
        correct(scores, [replace(row, drafted=Flat(row.drafted)) for row in rows], starts)

    monkeypatch.setattr(chain_module, "_penalise", flat)
    assert p_value(mode, params=params) < ALARM


def test_noise_that_takes_a_place_for_a_position(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_place(group):
        keys = [
            (row.params.seed, row.params.index, row.position + node + 1)
            for row, drafted in zip(group.rows, group.drafted, strict=True)
            for node in range(CONTEXT_END, len(drafted))
        ]
        return noise.gumbel_argmax(group.probs(group.all_places()), *zip(*keys, strict=True)).tolist()

    plain = TreeLoop(TABLE, PLAIN, "gumbel", (), 300).run(6)
    assert all(TreeLoop(TABLE, PLAIN, "gumbel", tree, 300).run(6) == plain for tree in TREES.values())
    monkeypatch.setattr(RowGroup, "gumbel_tokens", by_place)
    assert TreeLoop(TABLE, PLAIN, "gumbel", TREES["2,2"], 300).run(6) != plain

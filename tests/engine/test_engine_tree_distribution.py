"""Sampled trees through the whole engine: `auto` picks traversal, and the text follows the target's distribution.

The short form draws a few thousand times with all sampling parameters at once; `slow` has them one by one, with more
power. Each planted fault must be seen by the same test that the engine passes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planted import forget_residuals, keep_residuals_of_siblings
from table_loop import PROMPT, Table
from test_engine_grammar import REGEX, allowed_after
from tiny_grammar import letter_tokens
from tree_loop import ALL, LENGTH, drawn, masked_probs, table_lm

from specdec_cli.drafted import Drafted
from specdec_cli.drafters.contract import Resources
from specdec_cli.drafters.model import Drafter
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.options import EngineOptions
from specdec_cli.lm.door import Row
from specdec_cli.measure.audit.chisquare import chi_square, enumerate_joint
from specdec_cli.measure.audit.table import TableLM
from specdec_cli.sampling.grammar import compile_grammar
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.verification import RULES

TABLE = Table.random(num_tokens=4, seed=1, sharpness=2.0)
ALARM = 1e-6
ONE_BY_ONE = {
    "temperature": SamplingParams(temperature=0.7),
    "top-k": SamplingParams(temperature=1.0, top_k=2),
    "top-p": SamplingParams(temperature=1.2, top_p=0.8),
    "min-p": SamplingParams(temperature=1.2, min_p=0.1),
    "penalties": SamplingParams(temperature=1.0, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.6),
    "bias": SamplingParams(temperature=1.0, logit_bias={1: 1.0, 3: -1.0}),
    "all": ALL,
}


def engine(tree: str = "2,2", verify: str = "auto") -> Engine:
    drafter = Drafter("table")
    drafter.load(Resources(lambda _: table_lm(TABLE.q), None, TABLE.num_tokens))
    options = EngineOptions(num_speculative_tokens=len(tree.split(",")), tree=tree, verify=verify, max_num_seqs=256)
    return Engine(table_lm(TABLE.p), drafter, options=options)


def p_value(params: SamplingParams, num: int, with_grammar: bool = False, **given: Any) -> float:
    one = engine(**given)
    assert one.planner.plan(params.temperature).rule is RULES[given.get("verify", "traversal")]
    grammar = {"grammar": compile_grammar("regex", REGEX, letter_tokens())} if with_grammar else {}
    counts, length = drawn(one, params, num, **grammar)
    assert 1.2 < length < 3.9, "drafted tokens are accepted and refused"
    allowed = allowed_after if with_grammar else None
    joint = enumerate_joint(lambda text: masked_probs(TABLE, params, text, allowed), PROMPT, LENGTH)
    return chi_square(counts, joint).p_value


@pytest.mark.in_turn(0)
@pytest.mark.parametrize("with_grammar", [False, True])
def test_auto_samples_trees_from_the_targets_distribution(with_grammar: bool) -> None:
    assert p_value(ALL, 1_200, with_grammar) > ALARM


@pytest.mark.slow
@pytest.mark.parametrize("with_grammar", [False, True])
@pytest.mark.parametrize("name", ONE_BY_ONE)
@pytest.mark.parametrize("tree", ["3,2,1"])
def test_auto_samples_trees_with_every_parameter(name: str, tree: str, with_grammar: bool) -> None:
    assert p_value(ONE_BY_ONE[name], 6_000, with_grammar, tree=tree) > ALARM


@pytest.mark.slow
@pytest.mark.parametrize("verify", ["rejection", "exact-match", "gumbel"])
@pytest.mark.parametrize("with_grammar", [False, True])
def test_the_other_rules_sample_trees_as_well(verify: str, with_grammar: bool) -> None:
    assert p_value(ALL, 6_000, with_grammar, verify=verify) > ALARM


def shows_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target scores a node as if all nodes before it were its path."""
    correct = TableLM._seen

    def flat(lm: TableLM, row: Row) -> Any:
        return correct(lm, row if row.drafted.is_chain else replace(row, drafted=Drafted.chain(row.drafted.tokens)))

    monkeypatch.setattr(TableLM, "_seen", flat)


@pytest.mark.in_turn(2, every=3)
@pytest.mark.parametrize("fault", [forget_residuals, keep_residuals_of_siblings, shows_siblings])
def test_planted_faults_are_seen(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    assert p_value(ALL, 1_200) < ALARM

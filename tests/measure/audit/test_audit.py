"""The audit finds what was planted, calls it by its name, and passes a clean pair."""

import json
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from planted import forget_residuals
from typed import not_none, stand_in

from specdec_cli.drafters.contract import Resources
from specdec_cli.drafters.model import Drafter
from specdec_cli.engine import stepper
from specdec_cli.engine.decoding import Request
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.options import EngineOptions
from specdec_cli.engine.prompts import PromptRow
from specdec_cli.engine.verify import Verdict
from specdec_cli.errors import ExitCode, GateError, RunError
from specdec_cli.lm.door import Row
from specdec_cli.measure.audit import draws as draws_module
from specdec_cli.measure.audit import toy
from specdec_cli.measure.audit.audit import DRAWN_MODES, Audit, AuditedPair, AuditPlan
from specdec_cli.measure.audit.divergence import DivergenceJudge, tolerance_of
from specdec_cli.measure.audit.draws import Draws, ask_pair, check, full_power_draws
from specdec_cli.measure.audit.equality import variant
from specdec_cli.measure.audit.table import TableLM
from specdec_cli.measure.documents.audit import audit_body
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.verification import RULES

V = 12


class Noisy:
    """An LM whose answer depends on how many positions are scored together, in the last bits."""

    def __init__(self, lm, size) -> None:
        self.lm, self.size = lm, size

    def __getattr__(self, name):
        return getattr(self.lm, name)

    def score(self, rows):
        logits = self.lm.score(rows).clone()
        if len(logits) > 1:
            logits[:, 1::2] += self.size
        return logits


def pair(target=None, draft=None, dtype: str = "float32", load_float32=None):
    target = target or TableLM.random(V, seed=1)
    draft = draft or TableLM(lambda c: target._function(c) + 1.2 * np.sin(np.arange(V)), V, order=2)
    drafter = Drafter("table")
    drafter.load(Resources(lambda _: draft, None, V))
    return AuditedPair(Engine(target, drafter, options=EngineOptions()), "table", dtype, load_float32)


def requests(num=3, length=12, **params):
    one = SamplingParams(max_new_tokens=length, **params)
    return [Request(PromptRow(i, f"prompt {i}"), [i, i + 1, 2], replace(one, index=i)) for i in range(num)]


def run(what, modes, asked=None, **plan) -> Audit:
    seconds = 0.5 if "sampled" in modes else 60.0  # draws take what they are given
    asked_plan = {"modes": modes, "ks": (1, 4), "batch_sizes": (1, 2), "time_limit_seconds": seconds} | plan
    made = Audit(what, requests() if asked is None else asked, AuditPlan(**asked_plan), lambda *_: None)
    made.run()
    return made


@pytest.mark.slow
def test_a_clean_pair_passes_in_every_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws_module, "MIN_DRAWS", 60)
    result = run(pair(), ("greedy", "sampled", "gumbel"), time_limit_seconds=8.0)
    result.gate()
    document = json.loads(json.dumps(audit_body(result), allow_nan=False))
    assert document["verdict"] == "pass"
    assert document["mismatches"] == []
    assert document["checked"]["num_accepted_tokens"] > 0
    assert document["lossless"]["mismatches"] == 0
    assert [one["p_value"] > 1e-6 for one in document["distribution"]] == [True] * 16
    assert {one["vocab"] for one in document["distribution"]} == {4}
    assert all(0 < one["detectable_shift"] < 1 for one in document["distribution"])


def test_every_configuration_is_compared() -> None:
    result = run(pair(), ("greedy", "gumbel"))
    assert result.passed
    assert result.notices == []
    assert result.compared["greedy"].configurations == 4
    # the draft: 2 k × 2 batches; prompt lookup: 2 k in the larger batch; none: the larger batch
    assert result.compared["gumbel"].configurations == 7
    assert {one.prompts for one in result.compared.values()} == {3}


def test_accepting_one_token_too_many_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    right = stepper.verify

    def wrong(p, rows, starts=()):
        return [
            Verdict(tuple(range(min(len(v.path) + 1, len(row.guesses.drafted)))), v.own)
            for v, row in zip(right(p, rows, starts), rows, strict=True)
        ]

    monkeypatch.setattr(stepper, "verify", wrong)
    result = run(pair(), ("greedy",))
    assert not result.passed
    assert {one.kind for one in result.mismatches} == {"bug"}
    first = result.mismatches[0]
    assert first.expected != first.got
    assert not_none(first.top2_gap) > 0
    with pytest.raises(GateError) as raised:
        result.gate()
    assert raised.value.exit_code == ExitCode.GATE
    assert "0 near-ties" in raised.value.message


def tied_table(gap):
    """Tokens 4 and 5 lead everywhere, with a gap between them."""

    def function(context):
        logits = np.zeros(V)
        logits[4], logits[5] = 8.0 + gap, 8.0
        return logits

    return function


def test_rounding_is_a_near_tie_and_still_a_difference() -> None:
    target = Noisy(TableLM(tied_table(2e-6), V, order=2), 4e-6)
    result = run(pair(target, TableLM(tied_table(0.0), V, order=2)), ("greedy",), batch_sizes=(1,))
    assert {one.kind for one in result.mismatches} == {"near-tie"}
    assert {(one.expected, one.got) for one in result.mismatches} == {(4, 5)}
    assert result.mismatches[0].position == 1  # the first token has no draft
    assert 0 < not_none(result.mismatches[0].top2_gap) <= not_none(result.mismatches[0].tolerance)
    with pytest.raises(GateError, match="near-ties"):
        result.gate()


def test_more_than_rounding_is_a_bug() -> None:
    target = Noisy(TableLM(tied_table(0.1), V, order=2), 0.2)
    result = run(pair(target, TableLM(tied_table(0.0), V, order=2)), ("greedy",), batch_sizes=(1,))
    assert {one.kind for one in result.mismatches} == {"bug"}


def test_sixteen_bits_are_checked_again_in_float32() -> None:
    loaded = []

    def load():
        loaded.append(TableLM(tied_table(-0.01), V, order=2))
        return loaded[-1]

    target = Noisy(TableLM(tied_table(0.01), V, order=2), 0.02)
    result = run(pair(target, TableLM(tied_table(0.0), V, order=2), "bfloat16", load), ("greedy",), batch_sizes=(1,))
    assert {one.kind for one in result.mismatches} == {"near-tie"}
    assert {not_none(one.recheck).prefers for one in result.mismatches} == {5}
    assert len(loaded) == 1


def test_a_float32_copy_that_does_not_load_is_said_once() -> None:
    def load() -> None:
        raise RunError("model `x` does not fit into memory")

    target = Noisy(TableLM(tied_table(0.01), V, order=2), 0.02)
    result = run(pair(target, TableLM(tied_table(0.0), V, order=2), "bfloat16", load), ("greedy",), batch_sizes=(1,))
    assert all(one.recheck is None for one in result.mismatches)
    assert [notice for notice in result.notices if "re-check" in notice] == [
        "no float32 re-check: model `x` does not fit into memory"
    ]


def test_an_output_that_ends_early_is_a_bug() -> None:
    judge = DivergenceJudge(pair().engine, "float32")
    found = judge.judge(0, "here", [1, 2], SamplingParams(), [3, 4, 5], [3, 4], gumbel=False)
    assert (not_none(found).position, not_none(found).expected, not_none(found).got, not_none(found).kind) == (
        2,
        5,
        None,
        "bug",
    )
    assert judge.judge(0, "here", [1, 2], SamplingParams(), [3], [3], gumbel=False) is None


def test_the_tolerance_follows_the_dtype() -> None:
    logits = torch.tensor([-20.0, 10.0, float("-inf")])
    assert tolerance_of("float32", logits) == pytest.approx(64 * 2**-23 * 20)
    assert tolerance_of("bfloat16", logits) == pytest.approx(4 * 2**-7 * 20)


def test_gumbel_noise_that_depends_on_the_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = RULES["gumbel"]
    by_step = replace(right, judge=RULES["exact-match"].judge)
    monkeypatch.setitem(RULES, "gumbel", by_step)
    broken = run(pair(), ("gumbel",))
    assert not broken.passed
    monkeypatch.setitem(RULES, "gumbel", right)
    assert run(pair(), ("gumbel",)).passed


@pytest.mark.in_turn(0)
@pytest.mark.parametrize("mode", ["rejection", "block"])
def test_a_missing_residual_is_found(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    engine = toy.engine(mode, toy.NUM_SPECULATIVE_TOKENS, 256)

    def checked():
        draws = Draws(engine, list(toy.PROMPT), toy.PARAMS)
        draws.run(4000, lambda _: None, lambda: False)
        return check("table", draws, toy.joint(3), toy.NUM_TOKENS)

    assert checked().is_fine
    forget_residuals(monkeypatch)
    assert not checked().is_fine


def test_a_cache_that_lags_behind_fails_on_the_pair_itself() -> None:
    """What the engine decodes with is not what the target says alone."""

    class Stale(Noisy):
        def score(self, rows):
            if len(rows) == 1 and rows[0].handle < 0:
                return self.lm.score(rows)
            return self.lm.score([Row(r.handle, [*(text := r.as_chain())[:-1], text[-2]], r.num_logits) for r in rows])

    result = run(
        pair(Stale(TableLM.random(V, seed=1), 0)), ("sampled",), drawn_modes=("block",), time_limit_seconds=5.0
    )
    fine = {one.configuration: one.is_fine for one in result.distribution}
    assert fine == {
        "table model, block, k=1": True,
        "table model, block, k=3": True,
        "draft table, block, k=1": False,
        "draft table, block, k=4": False,
    }
    with pytest.raises(GateError, match="distribution of `draft table, block, k=1`"):
        result.gate()


def test_what_is_drawn_from_a_pair_can_be_enumerated() -> None:
    engine = pair().engine
    question = ask_pair(engine, [1, 2, 3], SamplingParams(temperature=0.0, top_p=0.9, stop_token_ids=(3,)))
    assert question.params.temperature == 1.0
    assert question.params.stop_token_ids == ()
    assert sum(question.joint.values()) == pytest.approx(1.0)
    assert len({token for cell in question.joint for token in cell}) <= 4
    assert ask_pair(engine, [1, 2, 3], SamplingParams(top_k=6)).num_choices == 6
    assert ask_pair(engine, [1, 2, 3], SamplingParams(top_k=50)).num_choices == 4


def test_draws_end_at_the_limit_but_finish_what_they_began(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws_module, "MIN_DRAWS", 40)
    engine = toy.engine("block", 3, 16)
    seen: list[Any] = []
    draws = Draws(engine, list(toy.PROMPT), toy.PARAMS)
    draws.run(10_000, seen.append, lambda: True)
    assert draws.num == 40
    assert seen == sorted(seen)
    assert not engine.has_work
    assert engine.target.num_free_blocks == engine.target.num_blocks
    assert {len(cell) for cell in draws.counts} == {3}


def test_full_power_is_what_the_contract_says() -> None:
    assert full_power_draws(4**2) == pytest.approx(220_000, rel=0.03)
    assert full_power_draws(8**2) == pytest.approx(320_000, rel=0.03)
    assert full_power_draws(12**2) == pytest.approx(420_000, rel=0.03)


def test_a_time_limit_leaves_runs_out_and_says_so() -> None:
    result = run(pair(), ("greedy",), requests(5), time_limit_seconds=0.0)
    compared = result.compared["greedy"]
    assert (compared.prompts, compared.configurations, compared.runs) == (2, 1, 1)
    assert result.notices == [
        "greedy: the time limit left 11 of 12 runs out (one configuration over a few prompts each)"
    ]
    checked = audit_body(result)["checked"]
    assert (checked["configurations"], checked["runs"], checked["planned_runs"]) == (1, 1, 12)


def test_a_time_limit_leaves_tests_of_distributions_out_and_says_so() -> None:
    result = run(pair(), ("sampled",), time_limit_seconds=0.0)
    assert [one.configuration for one in result.distribution] == [
        "table model, rejection, k=1",
        "draft table, rejection, k=1",
    ]
    at_one, *modes = "; ".join(f"{mode}, k=1" for mode in DRAWN_MODES[1:]), *DRAWN_MODES
    assert result.notices == [
        f"sampled, {stage}: the time limit left 7 of 8 tests of distributions out: {at_one}; "
        + "; ".join(f"{mode}, k={k}" for mode in modes)
        for stage, k in (("table", 3), ("pair", 4))
    ]
    checked = audit_body(result)["checked"]
    assert (checked["runs"], checked["planned_runs"]) == (2, 16)
    assert result.passed


def test_the_time_limit_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = time.perf_counter()
    result = run(pair(), ("greedy", "sampled", "gumbel"), time_limit_seconds=2.0)
    assert time.perf_counter() - begin < 20, "one run of each kind at most beyond the limit"
    assert result.seconds < 20


def test_every_ordered_pair_of_choices_is_in_the_prompt() -> None:
    for num in (2, 3, 4, 7, 8):
        prompt = draws_module._every_pair(list(range(num)))
        assert set(pairwise(prompt)) == {(i, j) for i in range(num) for j in range(num) if i != j}


def test_a_draft_that_proposes_nothing_is_said() -> None:
    from specdec_cli.drafters.ngram import Drafter as Ngram

    ngram = Ngram(max=4, min=4)
    ngram.load(Resources(stand_in(lambda _: None), None, V))
    what = AuditedPair(Engine(TableLM.random(V, seed=1), ngram), "ngram")
    result = run(what, ("greedy",), requests(2, length=3), time_limit_seconds=9)
    assert result.notices == ["greedy: nothing was drafted, so equality says little"]


def test_the_table_alone_needs_no_pair() -> None:
    result = run(None, ("sampled",), [], drawn_modes=("rejection",), time_limit_seconds=3.0)
    assert [one.configuration for one in result.distribution] == [
        "table model, rejection, k=1",
        "table model, rejection, k=3",
    ]
    assert audit_body(result)["lossless"]["checked_tokens"] is None


def test_leaving_out_the_batch_size_limit_is_said() -> None:
    what = pair()
    limited = Engine(what.engine.target, what.engine.drafter, options=EngineOptions(disable_by_batch_size=1))
    result = run(AuditedPair(limited, "table"), ("greedy",), requests(2, length=3), time_limit_seconds=9)
    assert "disable_by_batch_size is left out" in result.notices[0]
    adaptive = EngineOptions(depth_policy="adaptive", k_by_batch=((1, 2),))
    result = run(
        AuditedPair(variant(what.engine, what.engine.drafter, adaptive), "table"), ("greedy",), requests(2, length=3)
    )
    assert "depth_policy, k_by_batch is left out" in result.notices[0]
    assert result.compared["greedy"].num_draft_tokens > 0


def test_the_table_model_drafts_trees_beside_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec_cli.measure.audit.audit.full_power_draws", lambda _: 60)
    result = run(None, ("sampled",), drawn_modes=("block",), tree=toy.TREE, time_limit_seconds=60.0)
    assert result.num_planned_tests == 2 + 8
    result = run(
        None,
        ("sampled",),
        drawn_modes=(),
        tree=toy.TREE,
        tree_modes=("traversal", "rejection"),
        time_limit_seconds=60.0,
    )
    names = [f"table model, {mode}, tree {tree}" for tree in ("2", toy.TREE) for mode in ("traversal", "rejection")]
    assert [one.configuration for one in result.distribution] == names
    assert result.passed
    assert audit_body(result)["lossless"]["verify"] == "traversal,rejection"


def test_a_dynamic_tree_is_tested_at_both_depths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec_cli.measure.audit.audit.full_power_draws", lambda _: 60)
    result = run(
        None, ("sampled",), drawn_modes=(), tree="dynamic:5", tree_modes=("exact-match",), time_limit_seconds=60.0
    )
    assert [one.configuration for one in result.distribution] == [
        f"table model, exact-match, k={k}, tree dynamic:5" for k in (1, toy.NUM_SPECULATIVE_TOKENS)
    ]
    assert result.passed


def test_a_pair_that_drafts_trees_is_tested_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec_cli.measure.audit.audit.full_power_draws", lambda _: 60)
    clean = pair()
    clean.engine.options = replace(clean.engine.options, tree="2,1")
    result = run(clean, ("greedy", "sampled"), drawn_modes=("block",), tree="2,1", time_limit_seconds=60.0)
    assert result.passed
    assert {one.configuration for one in result.distribution if one.configuration.startswith("draft")} == {
        f"draft table, {mode}, tree {tree}"
        for mode in ("rejection", "traversal", "exact-match", "gumbel")
        for tree in ("2", "2,1")
    }
    assert result.compared["greedy"].num_accepted_tokens > 0


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("mode", ["rejection", "traversal"])
def test_a_fault_in_judging_trees_is_found(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    def checked():
        draws = Draws(toy.engine(mode, 3, 256, toy.TREE), list(toy.PROMPT), toy.PARAMS)
        draws.run(1500, lambda _: None, lambda: False)
        return check("table", draws, toy.joint(3), toy.NUM_TOKENS)

    assert checked().is_fine
    forget_residuals(monkeypatch)
    assert not checked().is_fine

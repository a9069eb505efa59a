"""One table of verification rules: what a rule asks of a draft and promises of the output follows from its entry."""

from dataclasses import replace
from typing import Any, get_args

import pytest
from tiny_engine import PROMPTS, decode, ngram, tokens
from typed import not_none, stand_in

from specdec_cli.engine import verify
from specdec_cli.engine.promise import Promise
from specdec_cli.measure.audit.audit import DRAWN_MODES
from specdec_cli.recipe.schema import Recipe, Sampling, Speculation
from specdec_cli.recipe.values import Verify
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.verification import AUTO, RULES, Rule, rule_of

SAMPLED = SamplingParams(max_new_tokens=16, temperature=0.9, seed=5)


def watched(monkeypatch: pytest.MonkeyPatch, rule: Rule, seen: list[Any]) -> Rule:
    """The same rule, which notes what it is handed."""
    judge_of = verify.judge_of

    def judge(group):
        seen.extend(row.guesses for row in group.rows if row.guesses.drafted)
        return judge_of(rule.judge)(group)

    monkeypatch.setattr(verify, "judge_of", lambda path: judge if path == "watched" else judge_of(path))
    return replace(rule, judge="watched")


@pytest.mark.parametrize("model", ["stranger", "itself"])
def test_a_new_rule_that_needs_q_gets_it_from_every_drafter(
    target, draft_of, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """It is an entry in the table and known nowhere else."""
    seen: list[Any] = []
    monkeypatch.setitem(RULES, "planted", watched(monkeypatch, RULES["rejection"], seen))
    for draft in (draft_of(model), ngram()):
        expected = tokens(decode(target, draft, 4, params=SAMPLED, verify="rejection"))
        seen.clear()
        assert tokens(decode(target, draft, 4, params=SAMPLED, verify="planted")) == expected
        is_by_chance = draft is not None and not hasattr(draft, "max")  # n-gram guesses the same for every seed
        assert len(seen) > len(PROMPTS)
        assert {guesses.q is not None for guesses in seen} == {is_by_chance}


def test_a_rule_that_does_not_ask_for_q_gets_none(target, itself, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setitem(RULES, "planted", watched(monkeypatch, RULES["exact-match"], seen))
    decode(target, itself, 4, params=SAMPLED, verify="planted")
    assert {guesses.q for guesses in seen} == {None}


def test_a_draft_shares_the_noise_of_a_new_rule_that_says_so(target, itself, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "planted", replace(RULES["gumbel"]))
    outputs = decode(target, itself, 4, params=SAMPLED, verify="planted")
    assert all(output.speculative.acceptance_rate == 1.0 for output in outputs)
    monkeypatch.setitem(RULES, "planted", replace(RULES["gumbel"], shares_noise=False))
    apart = decode(target, itself, 4, params=SAMPLED, verify="planted")
    assert tokens(apart) == tokens(outputs), "noise by position alone gives the same text with any draft"
    assert all(not_none(output.speculative.acceptance_rate) < 0.9 for output in apart)


KNOWN = {  # lossless, same tokens as without a draft
    **dict.fromkeys((AUTO, "rejection", "block", "traversal", "exact-match"), (True, False)),
    "gumbel": (True, True),
    **dict.fromkeys(("typical", "synthetic"), (False, False)),
}
PROMISES = [  # mode, temperature, lossless, same tokens as without a draft
    *((mode, 0.0, True, True) for mode in (AUTO, *RULES) if mode != "synthetic"),
    ("synthetic", 0.0, False, False),
    *((mode, 0.9, *promise) for mode, promise in KNOWN.items()),
    *((mode, 0.9, rule.is_lossless, rule.keeps_tokens)
      for mode, rule in RULES.items() if rule.samples and mode not in KNOWN),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "temperature", "is_lossless", "keeps_tokens"), PROMISES)
def test_tokens_are_promised_exactly_where_decoding_keeps_them(
    target, stranger, itself, mode, temperature, is_lossless, keeps_tokens
) -> None:
    rule = rule_of(mode, temperature)
    assert (rule.is_lossless, rule.keeps_tokens) == (is_lossless, keeps_tokens)
    recipe = Recipe(speculation=Speculation(verify=mode), sampling=Sampling(temperature=temperature))
    assert (Promise.of(recipe).is_lossless, Promise.of(recipe).keeps_tokens) == (is_lossless, keeps_tokens)
    params = SamplingParams(max_new_tokens=24, temperature=temperature, seed=5)
    rates = {"synthetic_acceptance_rates": (0.9, 0.8, 0.7, 0.6)} if rule.needs_rates else {}
    plain = tokens(decode(target, None, 0, params=params, verify=mode, **stand_in(rates)))
    both = [decode(target, draft, 4, params=params, verify=mode, **stand_in(rates)) for draft in (stranger, itself)]
    assert all(tokens(drafted) == plain for drafted in both) == keeps_tokens
    assert {output.lossless for drafted in both for output in drafted} == {is_lossless}


def test_the_choices_of_recipe_and_audit_are_those_of_the_table() -> None:
    assert set(get_args(Verify)) == {AUTO, *RULES}
    sampled = {name for name, rule in RULES.items() if rule.is_lossless and rule.samples}
    assert set(DRAWN_MODES) == sampled - {"traversal"}, "on the audit's chains traversal is block verification"


@pytest.mark.parametrize("mode", [AUTO, *RULES])
def test_at_temperature_zero_every_rule_that_asks_the_target_is_greedy(mode) -> None:
    rule = rule_of(mode, 0.0)
    assert (rule is RULES["greedy"]) == (mode != "synthetic")

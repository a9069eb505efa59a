"""What it costs to find out about a draft, in runs as short as eight texts of 96 tokens, on clocks that are made up."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from specdec_cli.engine.depth.adaptive import Adaptive
from specdec_cli.engine.depth.depth import DecodingRow

K, PROMPT, DECIDING = 4, 20, 0.15  # the last in plain steps, which are the unit of all seconds here


@dataclass
class Draft:
    """What a draft costs beside a plain step, and gives.

    Args:
        any_token: seconds of a step that drafts at all.
        token: of each drafted token.
        acceptance: of a token, if those before it stand.
        finds: in which part of the steps it drafts anything.
        first: seconds that its first forward takes longer.
        reads: of a token that it did not draft.
    """

    any_token: float
    token: float
    acceptance: float
    finds: float = 1.0
    first: float = 1.5
    reads: float = 0.02

    def best(self) -> float:
        """Speed-up by the best k."""
        gives = [1 + self.finds * sum(self.acceptance**j for j in range(1, k + 1)) for k in range(K + 1)]
        return max(
            given / (1 + (k > 0) * self.any_token + k * self.finds * self.token) for k, given in enumerate(gives)
        )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time the policy reads; a decision takes some."""
    now, decide = [0.0], Adaptive._decide

    def slowly(policy):
        now[0] += DECIDING
        return decide(policy)

    monkeypatch.setattr(Adaptive, "_decide", slowly)
    return now


def speed_up(draft: Draft, clock: list[float], num_texts: int = 8, seed: int = 0, num_tokens: int = 96) -> float:
    """Plain decoding's time over that of a policy that knows nothing yet; see `run`."""
    took, num, _ = run(draft, clock, num_texts, seed, num_tokens)
    return num / took


def run(
    draft: Draft, clock: list[float], num_texts: int, seed: int = 0, num_tokens: int = 96, slow_step: int = -1
) -> tuple[float, int, int]:
    """Seconds, tokens and steps with drafts of some texts, behind eight tokens that are not counted.

    Of 200 steps one takes ten times as long, and so does the `slow_step`-th with drafts; neither is counted so.
    """
    chance, policy, took, num, drafting, first = random.Random(seed), Adaptive(), 0.0, 0, 0, draft.first
    for text, length in enumerate([8, *[num_tokens] * num_texts]):
        at, read, end = PROMPT, 0, PROMPT + length
        while at < end:
            before = clock[0]
            k = policy.choose([DecodingRow(text, "model", min(K, end - at - 1), at, end - at)], True)[0]
            found, accepted, drafts = k * (chance.random() < draft.finds), 0, 0.0
            if k:
                drafts = draft.any_token + draft.token * found + draft.reads * max(at - read - 1, 0) + first
                drafting, first, read = drafting + 1, 0.0, at
            while accepted < found and chance.random() < draft.acceptance:
                accepted += 1
            is_slow = chance.random() < 0.005 or (k > 0 and drafting == slow_step)
            at, usual = at + 1 + accepted, 1.0 + clock[0] - before + drafts
            seconds = usual * chance.lognormvariate(0, 0.05) * (10 if is_slow else 1)
            policy.observe(seconds, {text: (found, accepted)} if at < end else {}, seconds * drafts / usual)
            took, num = (took + usual, num + 1 + accepted) if text else (took, num)
        policy.forget(text)
    return took, num, drafting


DRAFTS = [
    Draft(any_token, token, acceptance)
    for any_token in (0.03, 0.3, 1.0)
    for token in (0.02, 0.1, 0.3, 0.6, 1.2, 3.0, 8.0)
    for acceptance in (0.0, 0.3, 0.6)
]


@pytest.mark.in_turn(6, every=7)
@pytest.mark.parametrize("draft", [draft for draft in DRAFTS if draft.best() <= 1.0])
def test_a_draft_that_does_not_pay_costs_no_more_than_3_percent(draft: Draft, clock: list[float]) -> None:
    assert min(speed_up(draft, clock, seed=seed) for seed in range(3)) >= 0.97
    assert speed_up(draft, clock, num_texts=40) >= 0.98


@pytest.mark.parametrize("finds", [0.02, 0.1])
def test_a_draft_that_seldom_finds_something_costs_no_more_than_3_percent(finds: float, clock: list[float]) -> None:
    draft = Draft(0.03, 0.02, 0.3, finds, first=0.0, reads=0.001)
    assert min(speed_up(draft, clock, seed=seed) for seed in range(6)) >= 0.97


@pytest.mark.parametrize(
    ("draft", "least"),
    [
        (Draft(0.3, 0.1, 0.9), 1.8),
        (Draft(0.03, 0.1, 0.8), 1.7),
        (Draft(0.6, 0.25, 1.0), 1.4),
        (Draft(1.0, 0.03, 0.95), 1.2),
    ],
)
def test_a_draft_that_pays_is_found_in_the_same_time(draft: Draft, least: float, clock: list[float]) -> None:
    found = [speed_up(draft, clock, seed=seed) for seed in range(8)]
    assert sum(found) / len(found) >= least
    assert min(found) >= 0.97


def test_a_draft_whose_steps_take_many_plain_ones_is_looked_at_for_two_until_more_time_was_seen(clock) -> None:
    draft = Draft(0.3, 8.0, 0.0)
    assert run(draft, clock, num_texts=8)[2] == 2
    took, num, drafting = run(draft, clock, num_texts=80)
    assert drafting > 2, "it may have been the machine"
    assert took <= 1.02 * num


def test_a_slow_step_ends_no_first_look(clock: list[float]) -> None:
    draft = Draft(0.5, 0.15, 0.95)
    for slow in (1, 2):
        assert run(draft, clock, num_texts=8, slow_step=slow)[2] > 100

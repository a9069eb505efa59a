"""Replay: what a trace says about decoding with k drafted tokens, for every k and every rule, without decoding.

`starts` says what a step accepts at every place of the text and how often it begins there; here that becomes the
counts and rates that the engine would report, in expectation, for each prompt. Steps near the end draft fewer tokens,
and what is drafted behind the text's end is drafted and not accepted, as the engine counts it.

Letters: B prompts, n the longest output, k drafted tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from specdec_cli.document import Interval
from specdec_cli.draft_shape import DraftShape
from specdec_cli.errors import UsageError
from specdec_cli.measure.predict.starts import REPLAYABLE, IntArray, Starts, Steps, check_knowable
from specdec_cli.measure.predict.trace import Trace
from specdec_cli.measure.stats import FloatArray, ratio_of_totals

__all__ = [
    "REPLAYABLE",
    "Replay",
    "by_position",
    "by_task",
    "check_knowable",
    "replay",
    "replay_table",
    "replay_unsure",
    "tally",
]

_NUM_BINS = 8
_NUM_SIMULATIONS = 8
_PREFILL_CHUNK = 512  # prompt tokens fed in one step


@dataclass(slots=True, eq=False)
class Replay:
    """Expected counts of decoding each prompt with one k; the letters of SpeculativeCounts, with a row per prompt.

    Args:
        k: most tokens drafted in a step.
        rule: of verification.
        tasks: each prompt's kind.
        num_steps: [B] verifications.
        num_emitted: [B] tokens that steps gave.
        drafted_at_least: [B, k] steps that verified at least 1…k drafted tokens.
        accepted_at_least: [B, k] steps that accepted at least 1…k.
        reached: [B, k] steps that verified at least i and accepted at least i - 1.
        steps_by_drafted: [B, k+1] steps by how many tokens were drafted.
        steps_by_asked: [B, k+1] steps by how many tokens the draft was asked for.
        histogram: [B, k+1] steps that accepted exactly 0…k, of those that drafted.
        mean_context: [B] tokens of context when a step begins, averaged over steps.
        drafts_by_position: [B, n] steps that drafted, by the output position at which they began.
        accepted_by_position: [B, n] tokens that those accepted.
        first: [B, 2] over all positions alike: sum of the acceptance of one drafted token, and how many positions.
        steps_by_batch: of a table of k: steps by how many sequences ran together.
    """

    k: int
    rule: str
    tasks: tuple[str | None, ...]
    num_steps: FloatArray
    num_emitted: FloatArray
    drafted_at_least: FloatArray
    accepted_at_least: FloatArray
    reached: FloatArray
    steps_by_drafted: FloatArray
    steps_by_asked: FloatArray
    histogram: FloatArray
    mean_context: FloatArray
    drafts_by_position: FloatArray
    accepted_by_position: FloatArray
    first: FloatArray
    steps_by_batch: dict[int, float] = field(default_factory=dict)

    @property
    def num_drafts(self) -> FloatArray:
        """Steps [B] that drafted at least one token."""
        return self.drafted_at_least[:, 0]

    @property
    def num_draft_tokens(self) -> FloatArray:
        """Drafted tokens [B]."""
        return np.asarray(self.drafted_at_least.sum(axis=1))

    @property
    def num_accepted_tokens(self) -> FloatArray:
        """Accepted tokens [B]."""
        return np.asarray(self.accepted_at_least.sum(axis=1))

    def acceptance_length(self, task: str | None = None) -> Interval:
        """1 + accepted tokens per drafting step, of all prompts or one task's."""
        at = self.of_task(task)
        by_prompt = np.stack((self.num_drafts + self.num_accepted_tokens, self.num_drafts), axis=1)
        return ratio_of_totals(by_prompt[at, 0], by_prompt[at, 1])

    def acceptance_rate(self, task: str | None = None) -> Interval:
        """Accepted over drafted tokens, of all prompts or one task's."""
        at = self.of_task(task)
        return ratio_of_totals(self.num_accepted_tokens[at], self.num_draft_tokens[at])

    def tokens_per_step(self) -> Interval:
        """Emitted tokens per step, steps without a draft and cut ones included."""
        return ratio_of_totals(self.num_emitted, self.num_steps)

    def marginal_rates(self) -> list[Interval]:
        """P(accepted ≥ i | drafted ≥ i) for i = 1…k."""
        return [ratio_of_totals(self.accepted_at_least[:, i], self.drafted_at_least[:, i]) for i in range(self.k)]

    def conditional_rates(self) -> list[Interval]:
        """P(accepted ≥ i | accepted ≥ i-1, drafted ≥ i) for i = 1…k."""
        return [ratio_of_totals(self.accepted_at_least[:, i], self.reached[:, i]) for i in range(self.k)]

    def length_between(self, begin: int, end: int) -> Interval:
        """Acceptance length of steps that began at output positions begin…end-1."""
        drafts, accepted = (by[:, begin:end].sum(axis=1) for by in (self.drafts_by_position, self.accepted_by_position))
        return ratio_of_totals(drafts + accepted, drafts)

    def of_task(self, task: str | None) -> IntArray:
        """Places of a task's prompts; of all without one."""
        return np.array([i for i, own_task in enumerate(self.tasks) if task in (None, own_task)], dtype=np.int64)


def replay(trace: Trace, draft: str, rule: str = "auto", k_max: int = 8) -> list[Replay]:
    """Expected counts for k = 1…k_max.

    Args:
        trace: a target's text with this draft.
        draft: its name in the trace.
        rule: one of REPLAYABLE, or auto: greedy at temperature 0, block above it.
        k_max: largest k.

    Raises:
        UsageError: a rule that a trace cannot replay, a draft that is not in it or was asked for fewer tokens.
    """
    starts = Starts(trace, draft, rule, k_max)
    replays = []
    for k in range(1, k_max + 1):
        steps = starts.steps(k)
        replays.append(tally(starts, k, [(steps, starts.visits(steps))]))
    return replays


def replay_unsure(trace: Trace, draft: str, rule: str, k_max: int, p_mins: Sequence[float]) -> dict[DraftShape, Replay]:
    """Expected counts for k = 1…k_max with each p-min; nothing of a draft whose trace has no confidences.

    Steps by asked tokens then count the draft's passes: one more than it drafted, where it ended unsure.

    Args:
        trace: a target's text with this draft.
        draft: its name in the trace.
        rule: one of REPLAYABLE, or auto.
        k_max: largest k.
        p_mins: above 0.
    """
    if getattr(trace.draft(draft), "confidence", None) is None:
        return {}
    starts, replays = Starts(trace, draft, rule, k_max), {}
    for shape in (DraftShape(k, p_min=p_min) for p_min in p_mins for k in range(1, k_max + 1)):
        steps = starts.steps(shape.k, p_min=shape.p_min)
        replays[shape] = tally(starts, shape.k, [(steps, starts.visits(steps))])
    return replays


def by_task(replays: Sequence[Replay]) -> dict[str, list[dict[str, Any]]]:
    """Acceptance length and rate of every task, for every replayed k."""
    names = dict.fromkeys(task for task in replays[0].tasks if task is not None)
    return {
        name: [
            {
                "k": at_k.k,
                "acceptance_length": at_k.acceptance_length(name),
                "acceptance_rate": at_k.acceptance_rate(name),
            }
            for at_k in replays
        ]
        for name in names
    }


def by_position(replays: Sequence[Replay]) -> list[dict[str, Any]]:
    """Acceptance length along the text, in bins of output positions (the ends belong to them), for every replayed k."""
    ends = np.unique(np.linspace(1, replays[0].drafts_by_position.shape[1], _NUM_BINS + 1).astype(int)).tolist()
    return [
        {
            "from": begin,
            "to": end - 1,
            "by_k": [{"k": at_k.k, "acceptance_length": at_k.length_between(begin, end)} for at_k in replays],
        }
        for begin, end in pairwise(ends)
    ]


def replay_table(trace: Trace, draft: str, rule: str, k_by_batch: Mapping[int, int], max_num_seqs: int) -> Replay:
    """Expected counts when k depends on how many sequences run together.

    Who runs with whom depends on what was accepted before, so the scheduler is simulated, several times for rules
    of chance and once for others; a visited start still counts with its expected acceptance.

    Args:
        trace: a target's text with this draft.
        draft: its name in the trace.
        rule: one of REPLAYABLE, or auto.
        k_by_batch: number of running sequences to k; an entry holds up to the next larger one.
        max_num_seqs: most sequences that run together; prompts are admitted in their order.
    """
    if min(k_by_batch, default=0) != 1 or min(k_by_batch.values()) < 0:
        raise UsageError(f"the table of k `{dict(k_by_batch)}` has no entry for 1 sequence, or a negative k")
    k_max = max(max(k_by_batch.values()), 1)
    starts = Starts(trace, draft, rule, k_max)
    depths = {k: starts.steps(k) for k in sorted({*k_by_batch.values()})}
    visits = {k: np.zeros(steps.drafted.shape) for k, steps in depths.items()}
    batches: dict[int, float] = {}
    is_certain = all(np.isin(steps.survival, (0, 1)).all() for steps in depths.values())
    num_simulations = 1 if is_certain else _NUM_SIMULATIONS
    generator = np.random.default_rng(0)
    for _ in range(num_simulations):
        waiting = list(range(len(trace.prompts)))[::-1]
        running: dict[int, int] = {}
        while waiting or running:
            while waiting and len(running) < max_num_seqs:
                place = waiting.pop()
                running[place] = 1 - -(-len(trace.prompts[place].token_ids) // _PREFILL_CHUNK)
            num = len(running)
            batches[num] = batches.get(num, 0.0) + 1 / num_simulations
            k = k_by_batch[max(size for size in k_by_batch if size <= num)]
            for place, start in list(running.items()):
                if start >= 1:
                    visits[k][place, start] += 1 / num_simulations
                    start += starts.draw(depths[k], place, start, generator)
                running[place] = start + 1
                if running[place] >= starts.num_emitted[place]:
                    del running[place]
    made = tally(starts, k_max, [(depths[k], weight) for k, weight in visits.items()])
    made.steps_by_batch = dict(sorted(batches.items()))
    return made


def tally(starts: Starts, k: int, taken: Sequence[tuple[Steps, FloatArray]]) -> Replay:
    """Expected counts of steps.

    Args:
        starts: the trace, laid out.
        k: most tokens drafted in a step.
        taken: outcomes of steps at every start, each with the probability [B, n] that such a step begins there.
    """
    num, n = starts.contexts.shape
    at_least = {name: np.zeros((num, k + 2)) for name in ("asked", "drafted", "accepted", "reached")}
    drafts_at, accepted_at = np.zeros((num, n)), np.zeros((num, n))
    histogram = np.zeros((num, k + 1))
    num_steps, context = np.zeros(num), np.zeros(num)
    for steps, weight in taken:
        depth = steps.survival.shape[2] - 1
        drafting = weight * (steps.drafted > 0)
        expected = steps.survival[..., 1:].sum(axis=2)
        num_steps += weight.sum(axis=1)
        context += (weight * starts.contexts).sum(axis=1)
        drafts_at += drafting
        accepted_at += drafting * expected
        histogram[:, : depth + 1] += np.einsum("bs,bsi->bi", drafting, -np.diff(steps.survival, axis=2, append=0.0))
        for i in range(depth + 1):
            at_least["asked"][:, i] += (weight * (steps.asked >= i)).sum(axis=1)
            at_least["drafted"][:, i] += (weight * (steps.drafted >= i)).sum(axis=1)
            at_least["accepted"][:, i] += (weight * steps.survival[..., i]).sum(axis=1)
            if i:
                before = steps.survival[..., i - 1] * (steps.drafted >= i)
                at_least["reached"][:, i] += (weight * before).sum(axis=1)
    return Replay(
        k=k,
        rule=starts.rule,
        tasks=tuple(prompt.task for prompt in starts.trace.prompts),
        num_steps=num_steps,
        num_emitted=np.maximum(starts.num_emitted - 1, 0).astype(np.float64),
        drafted_at_least=at_least["drafted"][:, 1:-1],
        accepted_at_least=at_least["accepted"][:, 1:-1],
        reached=at_least["reached"][:, 1:-1],
        steps_by_drafted=-np.diff(at_least["drafted"], axis=1),
        steps_by_asked=-np.diff(at_least["asked"], axis=1),
        histogram=histogram,
        mean_context=np.divide(context, num_steps, out=np.zeros(num), where=num_steps > 0),
        drafts_by_position=drafts_at,
        accepted_by_position=accepted_at,
        first=starts.first,
    )

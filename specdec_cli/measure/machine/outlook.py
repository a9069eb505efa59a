"""The best possible speed-up of a pair by its sizes alone. Nothing is loaded or measured.

Decoding one sequence at a short context is bound by memory: a forward costs the weights that it reads, for k+1 rows as
for one. A draft's token then costs c plain steps, c the draft's bytes over the target's, and the speed-up is
S(k) = E / (1 + c k) with E tokens a step; a draft that gives all k in one pass has E / (1 + c). On a machine it is
less: rows, attention and the engine cost time too. So a claimed speed-up says at least how much must be accepted, under
one chance α for every drafted token (E = 1 + α + … + α^k; Leviathan, Kalman, Matias 2022).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec_cli.document import Count
from specdec_cli.engine.synthetic import iid_length, solve_alpha, synthetic_rates
from specdec_cli.recipe.gate import parse_gate

if TYPE_CHECKING:
    from specdec_cli.lm.facts import ModelFacts
    from specdec_cli.recipe.schema import Recipe

ACCEPTANCES = (0.6, 0.7, 0.8, 0.9)
_CLAIMED = ("speedup.decode", "speedup.latency")


@dataclass(frozen=True, slots=True)
class Implied:
    """The acceptance that a speed-up requires.

    Args:
        speedup: the speed-up.
        acceptance_length: tokens a step that it takes.
        acceptance: α that gives them; None where even accepting everything would not.
    """

    speedup: float
    acceptance_length: float
    acceptance: float | None


@dataclass(frozen=True, slots=True)
class Outlook:
    """A pair at one k.

    Args:
        k: drafted tokens of a step.
        target_bytes: weights that a forward of the target reads.
        draft_bytes: weights that a forward of the draft reads.
        cost_ratio: c, the draft's over the target's.
        num_passes: passes of the draft in a step.
        break_even: what a speed-up of 1 takes.
        ceiling: speed-up if everything were accepted.
        speedup_by_acceptance: by α.
        claims: what the recipe's gates `speedup.decode < X` take.
        synthetic: the recipe's synthetic acceptance length and the speed-up that it gives; None without one.
    """

    k: Count
    target_bytes: Count
    draft_bytes: Count
    cost_ratio: float
    num_passes: Count
    break_even: Implied
    ceiling: float
    speedup_by_acceptance: dict[float, float]
    claims: tuple[Implied, ...]
    synthetic: Implied | None


def outlook(target: ModelFacts, draft: ModelFacts, recipe: Recipe, *, one_pass: bool = False) -> Outlook | None:
    """The outlook of a described pair; None where nothing is drafted. With `one_pass` the draft gives k in one pass."""
    k = recipe.speculation.num_speculative_tokens
    if k == 0:
        return None
    ratio = draft.read_bytes / target.read_bytes
    num_passes = 1 if one_pass else k
    step = 1 + ratio * num_passes
    gates = [gate for gate in map(parse_gate, recipe.gates.fail_if) if gate is not None]
    claimed = [gate.number for gate in gates if gate.path in _CLAIMED and gate.operator in ("<", "<=")]
    rates = synthetic_rates(recipe.speculation)
    return Outlook(
        k=k,
        target_bytes=target.read_bytes,
        draft_bytes=draft.read_bytes,
        cost_ratio=ratio,
        num_passes=num_passes,
        break_even=_implied(1.0, step, k),
        ceiling=(k + 1) / step,
        speedup_by_acceptance={alpha: iid_length(alpha, k) / step for alpha in ACCEPTANCES},
        claims=tuple(_implied(speedup, step, k) for speedup in claimed),
        synthetic=None if rates is None else _implied((1 + sum(rates)) / step, step, k),
    )


def _implied(speedup: float, step: float, k: int) -> Implied:
    """The acceptance for a speed-up if a step costs `step` plain ones."""
    length = speedup * step
    return Implied(speedup, length, solve_alpha(length, k) if length <= k + 1 else None)

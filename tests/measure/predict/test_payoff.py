"""Whether a trained draft pays: its speed-up at its best k, from acceptance by depth and made-up costs."""

import numpy as np
import pytest

from specdec_cli.measure.predict.cost import Costs, Payoff, ProfileLoad


def costs(draft: float, row: float = 0.1) -> Costs:
    """A plain step takes a second; a drafted token `draft`, a further row `row`."""
    return Costs(
        k_max=3,
        context_lengths=(64,),
        target_seconds=np.array([[1 + row * k for k in range(4)]]),
        draft_seconds=np.array([[draft * k for k in range(4)]]),
        overhead_seconds=np.zeros(4),
        batch_size=1,
        num_repeats=3,
        seconds=1.0,
        load=ProfileLoad(0.0, 0.0, 2),
    )


def test_49_25_acceptance_of_1_32_after_forty_steps_does_not_pay_with_a_costly_draft() -> None:
    found = Payoff.of(costs(draft=0.4), [0.27, 0.04, 0.01])
    assert (found.k, found.tokens_per_step, found.plain_steps) == (1, pytest.approx(1.27), pytest.approx(1.5))
    assert found.words().startswith("the draft does not pay yet: at its best k = 1 a step gives 1.27 tokens and costs")
    assert found.words().endswith("0.85 times as fast as without it; 1.50 tokens a step would break even")


def test_a_good_draft_pays_at_a_larger_k() -> None:
    found = Payoff.of(costs(draft=0.05), [0.8, 0.6, 0.5])
    assert (found.k, found.speedup) == (3, pytest.approx(2.9 / 1.45))
    assert found.words().startswith("the draft pays: at its best k = 3")


def test_what_held_out_prompts_cannot_tell_apart_breaks_even() -> None:
    assert Payoff.of(costs(draft=0.1), [0.2, 0, 0]).words().startswith("the draft breaks about even: ")

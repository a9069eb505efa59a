"""How often a step in graphs waits for the GPU, counted on a CPU that stands in for one."""

from typing import Any

import pytest
import torch
from host_waits import HostWaits
from test_lm_head_graphs import both, device, recorder  # noqa: F401  # fixtures
from tiny_engine import tiny_engine

from specdec_cli.lm.forward import graphs
from specdec_cli.sampling.params import SamplingParams

NUM_STEPS = 6


def waits_of(target, drafter, k: int, params: SamplingParams, **options: Any) -> HostWaits:
    """What some steps of one sequence waited for, after the first ones."""
    engine, waits = tiny_engine(target, drafter, k, **options), HostWaits()
    record = graphs.record

    def unseen(run, *place):
        def quietly():
            before, waits.paused = waits.paused, True
            try:
                return run()
            finally:
                waits.paused = before

        replay, outputs = record(quietly, *place)

        def replayed():
            waits.paused = True
            try:
                replay()
            finally:
                waits.paused = False

        return replayed, outputs

    graphs.record = unseen
    try:
        engine.add(list(range(5, 16)), params)
        for _ in range(4):
            engine.step()
        with waits:
            for _ in range(NUM_STEPS):
                assert engine.has_work
                engine.step()
        assert not any(engine.drafters.num_failures.values())
    finally:
        graphs.record = record
        engine.close()
    return waits


FORCED: dict[str, Any] = {"verify": "synthetic", "synthetic_acceptance_rates": (0.8, 0.7, 0.6)}
ARMS: dict[str, tuple[str, int, float, dict[str, Any], float]] = {
    # Of each the head, k, the temperature, options of the engine, and the waits of a step.
    "plain": ("official", 0, 0, {}, 1),
    "chain": ("official", 3, 0, FORCED, 1),
    "tree": ("official", 3, 0, {"tree": "3,2,1", **FORCED}, 1),
    "block": ("dflash", 3, 0, FORCED, 1),
    "tree of a block": ("dflash", 3, 0, {"tree": "3,2,1", **FORCED}, 1),
    "masks": ("p-eagle", 3, 0, FORCED, 1),
    "dynamic tree": ("official", 3, 0, {"tree": "dynamic:6"}, 14),
    "sampled, plain": ("official", 0, 1, {}, 2),
    "sampled, chain": ("official", 3, 1, {"verify": "block"}, 4),
    "sampled, tree": ("official", 3, 1, {"tree": "3,2,1", "verify": "traversal"}, 29),
    "sampled, gumbel": ("official", 3, 1, {"verify": "gumbel"}, 2),
}


def moved_with_a_wait(recorded, moves) -> None:
    recorded._cache.move(*torch.tensor(moves, device=recorded._device).t())


def test_a_planted_wait_is_counted(both, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(graphs.Graphs, "move", moved_with_a_wait)
    with pytest.raises(AssertionError, match="moved_with_a_wait"):
        test_a_step_waits_as_often_as_the_documentation_says("tree", both)


@pytest.mark.parametrize("arm", ARMS)
def test_a_step_waits_as_often_as_the_documentation_says(arm: str, both) -> None:  # noqa: F811
    head, k, temperature, options, num = ARMS[arm]
    _, (target, drafter) = both(head)
    params = SamplingParams(max_new_tokens=60, ignore_eos=True, temperature=temperature, seed=3)
    waits = waits_of(target, drafter, k, params, **options)
    assert waits.num == num * NUM_STEPS, waits.lines

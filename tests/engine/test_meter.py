"""The meter counts decode steps only, and its rate is tokens over the steps' seconds."""

import pytest

from specdec_cli.engine.meter import Meter
from specdec_cli.events import Emitted, Finished, Noticed, Stepped


def step(*emitted: Emitted, draft: float = 0.0, verify: float = 0.0, overhead: float = 0.0) -> Stepped:
    return Stepped(emitted, len(emitted), 3, 0, draft, verify, overhead, 1, 10)


def emitted(num_tokens: int, drafted: int, accepted: int, from_prefill: bool = False) -> Emitted:
    return Emitted(0, tuple(range(num_tokens)), "", drafted, accepted, from_prefill)


def test_prefill_belongs_to_no_step() -> None:
    meter = Meter()
    meter.observe(step(emitted(1, 0, 0, from_prefill=True), verify=5.0))
    assert (meter.num_tokens, meter.counts.num_emitted_tokens, meter.decode_seconds) == (1, 0, 0.0)
    assert meter.tokens_per_second is None
    assert meter.shares is None


def test_rate_and_shares_follow_from_decode_steps() -> None:
    meter = Meter()
    meter.observe(step(emitted(1, 0, 0, from_prefill=True), verify=5.0))
    meter.observe(step(emitted(3, 4, 2), emitted(1, 4, 0), draft=0.2, verify=0.7, overhead=0.1))
    meter.observe(Noticed(None, "nothing to count"))
    meter.observe(Finished(0, "length", None))
    assert meter.tokens_per_second == pytest.approx(4.0)
    assert meter.num_tokens == 5
    assert (meter.num_running, meter.num_waiting, meter.num_finished) == (2, 3, 1)
    assert meter.counts.per_position_acceptance_rates == [0.5, 0.5, 0.0, 0.0]
    shares = meter.shares
    assert shares is not None
    assert abs(shares.draft - 0.2) < 1e-9
    assert abs(shares.draft + shares.verify + shares.overhead - 1) < 1e-9


def test_seconds_of_a_step_count_once_for_all_its_sequences() -> None:
    meter = Meter()
    meter.observe(step(emitted(2, 1, 1), emitted(2, 1, 1), emitted(2, 1, 1), verify=1.0))
    assert meter.decode_seconds == 1.0

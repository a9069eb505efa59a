"""What steps cost, read off measurements of others."""

import pytest

from specdec_cli.engine.costs import Company, Costs
from specdec_cli.engine.depth import Wish


@pytest.mark.parametrize(("rows", "expected_seconds"), [(1, 0.8 * 0.010 + 0.2 * 0.026), (2, 0.0120), (64, 0.0108)])
def test_what_a_drafter_that_seldom_finds_something_costs(rows, expected_seconds):
    """One row has all or nothing, and many have about as much as they are expected to."""
    wishes, costs = [Wish(i, "ngram", 4, 9) for i in range(rows)], Costs()
    company = Company.of(wishes)
    for drafted, seconds in ((0.0, 0.010), (1.0, 0.011), (4.0, 0.026)):
        costs.add(company, 4, [(drafted, seconds, 100.0)] * 3, range(1, 4))
    costs.add(company, 0, [(0.0, 0.009, 100.0)] * 3, range(4, 7))
    plain, *_, deepest = costs.seconds(company, [0.2] * 4, 100.0)
    assert plain == pytest.approx(0.009)
    assert deepest == pytest.approx(expected_seconds, rel=0.01)

"""What steps cost, read off measurements of others."""

import pytest

from specdec_cli.engine.depth.costs import Company, StepCosts
from specdec_cli.engine.depth.depth import DecodingRow


@pytest.mark.parametrize(("rows", "expected_seconds"), [(1, 0.8 * 0.010 + 0.2 * 0.026), (2, 0.0120), (64, 0.0108)])
def test_what_a_drafter_that_seldom_finds_something_costs(rows: int, expected_seconds: float) -> None:
    """One row has all or nothing, and many have about as much as they are expected to."""
    wishes, costs = [DecodingRow(i, "ngram", 4, 9) for i in range(rows)], StepCosts()
    company = Company.of(wishes)
    for drafted, seconds in ((0.0, 0.010), (1.0, 0.011), (4.0, 0.026)):
        costs.add(company, 4, [(drafted, seconds, 100.0)] * 3, range(1, 4))
    costs.add(company, 0, [(0.0, 0.009, 100.0)] * 3, range(4, 7))
    plain, *_, deepest = costs.seconds(company, [0.2] * 4, 100.0)
    assert plain == pytest.approx(0.009)
    assert deepest == pytest.approx(expected_seconds, rel=0.01)


def test_a_plain_step_takes_no_longer_than_one_of_more_rows_that_is_known_better() -> None:
    """As where a server's streams end one by one: 15 of them for a step or two, which is slow."""
    costs, of = (
        StepCosts(),
        {rows: Company.of([DecodingRow(i, "model", 4, 9) for i in range(rows)]) for rows in (15, 16)},
    )
    costs.add(of[16], 0, [(0.0, 0.0024, 100.0)] * 30, range(1, 31))
    costs.add(of[15], 0, [(0.0, 0.0045, 100.0)] * 3, range(31, 34))
    costs.add(of[15], 4, [(4.0, 0.0060, 100.0)] * 3, range(34, 37))
    assert costs.plain_seconds(of[15], 100.0) == costs.plain_seconds(of[16], 100.0)
    assert costs.seconds(of[15], [1.0] * 4, 100.0)[0] == costs.plain_seconds(of[16], 100.0)
    costs.add(of[15], 0, [(0.0, 0.0045, 100.0)] * 40, range(37, 77))
    assert costs.plain_seconds(of[15], 100.0) > 1.2 * costs.plain_seconds(of[16], 100.0)

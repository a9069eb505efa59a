import math

import numpy as np
import pytest
import scipy.stats

from specdec_cli.measure.audit.chisquare import chi_square, detectable_shift, enumerate_joint, tail_probability


def test_enumeration_is_the_product_along_the_path_and_sums_to_one() -> None:
    def probs(context):
        return np.roll(np.array([0.5, 0.3, 0.2, 0.0]), sum(context))

    joint = enumerate_joint(probs, (1, 2), 3)
    assert sum(joint.values()) == pytest.approx(1.0)
    assert all(probability > 0 for probability in joint.values())
    expected = probs((1, 2))[3] * probs((1, 2, 3))[2] * probs((1, 2, 3, 2))[1]
    assert joint[(3, 2, 1)] == pytest.approx(expected)


@pytest.mark.parametrize(("statistic", "dof"), [(0.5, 1), (3.8, 1), (80.0, 63), (300.0, 63), (1200.0, 1000)])
def test_tail_agrees_with_scipy(statistic: float, dof: int) -> None:
    assert tail_probability(statistic, dof) == pytest.approx(scipy.stats.chi2.sf(statistic, dof), rel=1e-7)


def test_statistic_agrees_with_scipy() -> None:
    counts = {0: 210, 1: 390, 2: 400}
    result = chi_square(counts, {0: 0.2, 1: 0.4, 2: 0.4})
    expected = scipy.stats.chisquare([210, 390, 400], [200, 400, 400])
    assert (result.statistic, result.dof) == (pytest.approx(expected.statistic), 2)
    assert result.p_value == pytest.approx(expected.pvalue)


def test_small_cells_are_pooled_and_all_draws_stay_counted() -> None:
    probabilities = dict.fromkeys(range(100), 0.001) | {100: 0.9}
    result = chi_square({0: 8, 1: 2, 100: 90}, probabilities)
    assert result.statistic == pytest.approx(0.0)
    assert result.dof == 1


def test_a_count_where_none_can_be_is_a_failure() -> None:
    result = chi_square({0: 99, 1: 1}, {0: 1.0})
    assert math.isinf(result.statistic)
    assert result.p_value == 0


def test_uniform_p_values_when_all_is_well_and_a_shift_is_found() -> None:
    rng = np.random.default_rng(0)
    probabilities = np.array([0.4, 0.3, 0.2, 0.1])
    fair = [
        chi_square(dict(enumerate(rng.multinomial(2000, probabilities).tolist())), dict(enumerate(probabilities)))
        for _ in range(300)
    ]
    assert scipy.stats.kstest([one.p_value for one in fair], "uniform").pvalue > 1e-4
    shifted = rng.multinomial(20000, probabilities + np.array([0.05, -0.05, 0.0, 0.0]))
    assert chi_square(dict(enumerate(shifted.tolist())), dict(enumerate(probabilities))).p_value < 1e-6


@pytest.mark.parametrize(("num_draws", "num_outcomes"), [(220_000, 4), (320_000, 8), (420_000, 12)])
def test_detectable_shift_is_what_the_contract_states(num_draws: int, num_outcomes: int) -> None:
    dof = num_outcomes**2 - 1
    shift = detectable_shift(num_draws, dof)
    assert 0.0095 < shift < 0.0105
    power = scipy.stats.ncx2.sf(scipy.stats.chi2.isf(1e-6, dof), dof, num_draws * (2 * shift) ** 2)
    assert 0.98 < power < 0.999

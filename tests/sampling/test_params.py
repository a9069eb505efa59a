"""What sampling parameters refuse."""

from dataclasses import replace

import pytest

from specdec_cli.errors import UsageError
from specdec_cli.sampling.params import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", "end"),
        ("stop", ("",)),
        ("temperature", "1"),
        ("temperature", None),
        ("temperature", float("nan")),
        ("top_k", 1.5),
        ("top_k", 0),
        ("logprobs", 2.5),
        ("max_new_tokens", 2.0),
        ("seed", 2**63),
        ("seed", 1.5),
        ("logit_bias", {1: float("inf")}),
    ],
)
def test_wrong_values_are_refused_by_name(name: str, value) -> None:
    with pytest.raises(UsageError, match="stop string" if value == ("",) else name):
        SamplingParams(**{name: value})


def test_more_tokens_at_least_than_at_most_are_refused() -> None:
    with pytest.raises(UsageError, match="min_tokens is `30`"):
        SamplingParams(max_new_tokens=3, min_tokens=30)


def test_a_bias_beyond_float32_is_refused() -> None:
    with pytest.raises(UsageError, match="logit_bias"):
        SamplingParams(logit_bias={5: 1e39})


@pytest.mark.parametrize("seed", [-1, -7, -(2**63)])
def test_a_negative_seed_draws_one_as_on_the_command_line(seed: int) -> None:
    one, other = SamplingParams(seed=seed), SamplingParams(seed=seed)
    assert one.seed >= 0
    assert other.seed >= 0
    assert one.seed != other.seed
    assert replace(one, index=3).seed == one.seed, "the drawn seed stays, so that a run can be repeated"

"""What sampling parameters refuse."""

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
        ("seed", -1),
        ("logit_bias", {1: float("inf")}),
    ],
)
def test_wrong_values_are_refused_by_name(name, value):
    with pytest.raises(UsageError, match="stop string" if value == ("",) else name):
        SamplingParams(**{name: value})

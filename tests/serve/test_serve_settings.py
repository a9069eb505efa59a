"""Who may reach the server, and with which keys."""

import pytest
from toy_engine import toy_engine

from specdec_cli.errors import UsageError
from specdec_cli.recipe.schema import Serve
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.serve.models import _longest_context
from specdec_cli.serve.settings import Settings, is_loopback, read_keys


@pytest.mark.parametrize(("host", "expected"), [
    ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("LOCALHOST", True),
    ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("example.org", False),
])  # fmt: skip
def test_loopback(host: str, expected: bool):
    assert is_loopback(host) is expected


def test_beyond_loopback_needs_a_key_or_a_word():
    with pytest.raises(UsageError) as refused:
        Settings(Serve(host="0.0.0.0")).check_exposure(False)
    assert "--insecure-no-auth" in refused.value.hint
    Settings(Serve(host="0.0.0.0")).check_exposure(True)
    Settings(Serve(host="0.0.0.0"), ("key",)).check_exposure(False)
    Settings(Serve()).check_exposure(False)


def test_keys_are_split_and_checked():
    assert read_keys(["d,e"], "a, b,, c,") == ("d,e", "a", "b", "c")
    with pytest.raises(UsageError):
        read_keys(("schlüssel",))


def test_limits_follow_the_recipe():
    limits = Settings(Serve(max_body_bytes=5000, max_choices=3, max_logprobs=2)).limits
    assert (limits.max_body_bytes, limits.max_choices, limits.max_logprobs) == (5000, 3, 2)


def test_a_small_cache_bounds_what_a_request_may_ask_for():
    engine = toy_engine()
    assert _longest_context(engine, 4) == engine.target.max_context
    engine.target.num_blocks = 4
    longest = _longest_context(engine, 9)
    for k in (None, 9):
        engine.add([1] * (longest - 5), SamplingParams(max_new_tokens=5), k)
    assert 0 < longest < engine.target.max_context

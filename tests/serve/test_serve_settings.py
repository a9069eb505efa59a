"""Who may reach the server, and with which keys."""

import json
from typing import Any

import pytest
from toy_engine import toy_engine
from toy_server import toy_client
from typed import not_none, stand_in

from specdec_cli.errors import UsageError
from specdec_cli.recipe.schema import Serve
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.serve.models import _longest_context
from specdec_cli.serve.settings import Settings, is_loopback, read_keys


@pytest.mark.parametrize(("host", "expected"), [
    ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("LOCALHOST", True),
    ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("example.org", False),
])  # fmt: skip
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_beyond_loopback_needs_a_key_or_a_word() -> None:
    with pytest.raises(UsageError) as refused:
        Settings(Serve(host="0.0.0.0")).check_exposure(False)
    assert "--insecure-no-auth" in not_none(refused.value.hint)
    Settings(Serve(host="0.0.0.0")).check_exposure(True)
    Settings(Serve(host="0.0.0.0"), ("key",)).check_exposure(False)
    Settings(Serve()).check_exposure(False)


def test_keys_are_split_and_checked() -> None:
    assert read_keys(["d,e"], "a, b,, c,") == ("d,e", "a", "b", "c")
    with pytest.raises(UsageError):
        read_keys(("schlüssel",))


_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_PART = {"type": "text", "text": "a"}
_USER = {"role": "user", "content": "a"}
_TOOLS = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(3)]


@pytest.mark.parametrize(("limit", "path", "fields", "param"), [
    ({"max_stop": 2}, _COMPLETIONS, {"stop": ["x", "y", "z"]}, "stop"),
    ({"max_stop": 2}, _COMPLETIONS, {"stop_token_ids": [1, 2, 3]}, "stop_token_ids"),
    ({"max_stop_chars": 3}, _COMPLETIONS, {"stop": ["abcd"]}, "stop[0]"),
    ({"max_logit_bias": 1}, _COMPLETIONS, {"logit_bias": {"1": 1, "2": 1}}, "logit_bias"),
    ({"max_messages": 2}, _CHAT, {"messages": [_USER] * 3}, "messages"),
    ({"max_message_parts": 3}, _CHAT, {"messages": [{"role": "user", "content": [_PART] * 2}] * 2},
     "messages[1].content"),
    ({"max_tools": 2}, _CHAT, {"messages": [_USER], "tools": _TOOLS, "tool_choice": "none"}, "tools"),
    ({"max_grammar_bytes": 10}, _COMPLETIONS, {"structured_outputs": {"regex": "[a-c]{1,20}"}},
     "structured_outputs.regex"),
    ({"max_json_depth": 8}, _COMPLETIONS, {"metadata": {"a": [[[[[[[[1]]]]]]]]}}, "metadata"),
    ({"max_speculative_tokens": 2}, _COMPLETIONS, {"speculative": {"num_speculative_tokens": 3}},
     "speculative.num_speculative_tokens"),
])  # fmt: skip
def test_every_limit_of_a_request_can_be_set(
    limit: dict[str, Any], path: str, fields: dict[str, Any], param: str
) -> None:
    """Refused by the lower limit by name; taken where the limit is not in the way."""
    body = {"max_tokens": 2, **({"prompt": "abc"} if path == _COMPLETIONS else {}), **fields}
    with toy_client(**limit) as client:
        refused = client.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    raised = {"max_json_depth": 200} if "max_json_depth" in limit else {}
    with toy_client(**stand_in(raised)) as client:
        assert client.post(path, json=body).status_code == 200 or param in (
            "tools",
            "speculative.num_speculative_tokens",
        )


def test_the_highest_depth_of_json_is_read() -> None:
    deep = json.loads("[" * 198 + "]" * 198)
    with toy_client(max_json_depth=200) as client:
        assert (
            client.post(_COMPLETIONS, json={"prompt": "abc", "max_tokens": 2, "metadata": {"a": deep}}).status_code
            == 200
        )


def test_a_small_cache_bounds_what_a_request_may_ask_for() -> None:
    engine = toy_engine()
    assert _longest_context(engine, 4) == engine.target.max_context
    engine.target.num_blocks = 4
    longest = _longest_context(engine, 9)
    for k in (None, 9):
        engine.add([1] * (longest - 5), SamplingParams(max_new_tokens=5), k)
    assert 0 < longest < engine.target.max_context

"""The body of a request: what the benchmark says itself, what may be added, and the field that holds the length."""

import json

import pytest
from typed import not_none

from specdec_cli.cli.options import OPTIONS
from specdec_cli.engine.prompts import PromptRow, rows_of
from specdec_cli.errors import UsageError
from specdec_cli.measure.endpoint.request_fields import (
    check_max_tokens_field,
    parse_extra_body,
    request_body,
    sampling_fields,
    warm_up_row,
)
from specdec_cli.recipe.schema import Sampling


def test_only_what_is_set_is_sent() -> None:
    assert sampling_fields(Sampling()) == {"max_tokens": 128, "temperature": 0.0}
    given = Sampling(
        temperature=1.0, top_p=0.9, top_k=5, stop=("x",), logit_bias={7: -1.0}, ignore_eos=True, min_tokens=2
    )
    assert sampling_fields(given) == {
        "max_tokens": 128, "temperature": 1.0, "seed": 0, "top_p": 0.9, "top_k": 5, "ignore_eos": True,
        "min_tokens": 2, "logit_bias": {"7": -1.0}, "stop": ["x"],
    }  # fmt: skip


def test_a_row_has_its_own_length_and_seed() -> None:
    row = PromptRow(0, "hi", max_new_tokens=3, seed=9)
    body = request_body(row, "m", False, sampling_fields(Sampling(seed=4)))
    assert body == {
        "model": "m", "prompt": "hi", "max_tokens": 3, "temperature": 0.0, "seed": 9,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert request_body(row, "m", True, {})["messages"] == [{"role": "user", "content": "hi"}]


def test_rows_without_a_seed_share_no_random_numbers() -> None:
    fields = sampling_fields(Sampling(temperature=1.0, seed=4))
    rows = [PromptRow(-1, "warm up"), PromptRow(0, "a"), PromptRow(1, "b"), PromptRow(2, "c", seed=4)]
    assert [request_body(row, "m", False, fields)["seed"] for row in rows] == [4, 4, 5, 4]
    drawn = sampling_fields(Sampling(temperature=1.0, seed=-1))
    assert request_body(rows[2], "m", False, drawn)["seed"] == -1
    assert "seed" not in request_body(rows[2], "m", False, sampling_fields(Sampling()))


def test_a_warm_up_shares_no_prefix_with_a_row() -> None:
    usual = warm_up_row(rows_of(["a", "b"])).prompt
    for rows in (rows_of([usual]), rows_of([f"{usual} more"]), rows_of([usual[:4], f"{len(usual)} {usual}"])):
        found = warm_up_row(rows).prompt
        assert not any(row.prompt.startswith(found) or found.startswith(row.prompt) for row in rows)


def test_15_extra_fields_are_in_every_body_and_its_own_stay() -> None:
    extra = parse_extra_body('{"chat_template_kwargs": {"enable_thinking": false}, "user": "ü"}')
    body = request_body(PromptRow(0, "hi"), "m", True, sampling_fields(Sampling()), extra)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert body["user"] == "ü"
    assert (body["stream"], body["max_tokens"], body["model"]) == (True, 128, "m")
    assert parse_extra_body(None) == parse_extra_body("{}") == {}


@pytest.mark.parametrize(
    "name",
    [
        *("model", "prompt", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens"),
        *("n", "echo"),
        *("best_of", "n_predict", "temperature", "seed", "top_p", "top_k", "min_p", "stop", "stop_token_ids"),
        *("logit_bias", "ignore_eos", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    ],
)
def test_15_extra_fields_that_the_benchmark_owns_are_refused_by_name(name) -> None:
    with pytest.raises(UsageError, match=f"must not hold `{name}`") as caught:
        parse_extra_body(json.dumps({"user": "x", name: None}))
    flags = {flag for option in OPTIONS for text in option.names for flag in text.split("/")}
    named = [word.strip(",;") for word in not_none(caught.value.hint).split() if word.startswith("--")]
    own = {"--dataset", "--endpoint-model", "--max-tokens-field", "--chat", "--set"}
    assert all(flag in flags | own for flag in named), "the hint names options that there are"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"), ("{", "not JSON"), ("{'a': 1}", "not JSON"), ("[1]", "must be a JSON object"),
        ("null", "must be a JSON object"), ('"a"', "must be a JSON object"), ('{"a": NaN}', "JSON cannot say"),
        ('{"a": 1e999}', "JSON cannot say"), ('{"a": "\\ud800"}', "JSON cannot say"), ("[" * 100000, "JSON cannot say"),
    ],
)  # fmt: skip
def test_15_what_is_no_extra_body(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_extra_body(text)


def test_15_the_field_of_the_length_is_chosen_and_its_number_never_changes() -> None:
    fields = sampling_fields(Sampling(max_new_tokens=7), "max_completion_tokens")
    assert fields == {"max_completion_tokens": 7, "temperature": 0.0}
    body = request_body(PromptRow(0, "hi", max_new_tokens=3), "m", True, fields, {}, "max_completion_tokens")
    assert body["max_completion_tokens"] == 3
    assert "max_tokens" not in body
    check_max_tokens_field("max_completion_tokens", chat=True)
    with pytest.raises(UsageError, match="field of /v1/chat/completions alone"):
        check_max_tokens_field("max_completion_tokens", chat=False)

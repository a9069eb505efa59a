"""A stop string that a special token spells ends every kind of answer, whether the text shows that token or not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from toy_engine import END, LETTERS
from toy_server import ToyClient, toy_client

A = LETTERS.index("a")
WHOLE = "aaaaaaaaa</s>aa"
KINDS = ("completion", "chat")


@pytest.fixture(scope="module")
def client() -> Iterator[ToyClient]:
    with toy_client() as made:
        yield made


def answered(client: ToyClient, kind: str, streams: bool, **given: Any) -> tuple[str, str, Any, int]:
    """Text, finish reason, stop reason and number of tokens of an answer, which is `aaaaaaaaa</s>aa` by its biases."""
    body = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "logit_bias": {str(END): 60, str(A): 57}}
    body |= {"frequency_penalty": 2.0} | given
    asked = {"prompt": "abc"} if kind == "completion" else {"messages": [{"role": "user", "content": "abc"}]}
    path = "/v1/completions" if kind == "completion" else "/v1/chat/completions"
    if streams:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    answer = client.post(path, json=body | asked)
    assert answer.status_code == 200, answer.text
    if not streams:
        document = answer.json()
        choice = document["choices"][0]
        text = choice["text"] if kind == "completion" else choice["message"]["content"]
        return text or "", choice["finish_reason"], choice["stop_reason"], document["usage"]["completion_tokens"]
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    texts = [one["text"] if kind == "completion" else one["delta"].get("content") or "" for one in choices]
    last = choices[-1]
    return "".join(texts), last["finish_reason"], last["stop_reason"], chunks[-1]["usage"]["completion_tokens"]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_49_7_a_special_token_in_a_stop_string_ends_the_answer(client: ToyClient, kind: str, streams: bool) -> None:
    assert answered(client, kind, streams, skip_special_tokens=False) == (WHOLE, "length", None, 12)
    assert answered(client, kind, streams) == (WHOLE.replace("</s>", ""), "length", None, 12)
    for skip in (True, False):
        for stop, num_tokens in (("</s>", 10), ("aa</s>", 10), ("</s>a", 11), ("a</s>aa", 12)):
            text = WHOLE[: WHOLE.find(stop)]
            given = {"stop": ["never", stop], "skip_special_tokens": skip}
            assert answered(client, kind, streams, **given) == (text, "stop", stop, num_tokens)
            given["include_stop_str_in_output"] = True
            assert answered(client, kind, streams, **given) == (text + stop, "stop", stop, num_tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_min_tokens_and_parts_of_a_special_token_do_not_stop(client: ToyClient, kind: str) -> None:
    plain = WHOLE.replace("</s>", "")
    assert answered(client, kind, False, stop="</s>", min_tokens=10)[1] == "stop"
    assert answered(client, kind, False, stop="</s>", min_tokens=11) == (plain, "length", None, 12)
    assert answered(client, kind, True, stop=[">", "a</"]) == (plain, "length", None, 12)
    assert answered(client, kind, True, stop=[">", "a</"], skip_special_tokens=False)[2] == "a</"


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_token_completes_a_stop_string(client: ToyClient, kind: str) -> None:
    ends = {"ignore_eos": False}
    assert answered(client, kind, True, **ends) == ("a" * 9, "stop", END, 10)
    assert answered(client, kind, True, **ends, stop="</s>") == ("a" * 9, "stop", "</s>", 10)
    assert answered(client, kind, True, **ends, stop="aa</s>") == ("a" * 7, "stop", "aa</s>", 10)

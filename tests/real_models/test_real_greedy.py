"""Greedy text of a real GGUF file is the same with and without each kind of draft, bit for bit on native kernels."""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from real_files import GEMMA, QWEN, SMOLLM, real_file
from typed import not_none

from specdec_cli import Engine, SamplingParams
from specdec_cli.engine.driver import Driver
from specdec_cli.engine.outputs import Output, Outputs
from specdec_cli.sampling.grammar import compile_grammar

pytestmark = pytest.mark.slow
Draft = str | dict[str, Any]
DRAFTS: dict[str, Callable[[], Draft]] = {
    "ngram": lambda: "ngram",
    "suffix": lambda: "suffix",
    "self-exit": lambda: "self-exit:8",
    "smollm by text": lambda: {"method": "universal", "model": real_file(SMOLLM), "match": "text"},
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
SOURCE = inspect.getsource(textwrap)[:9000]


@dataclass(frozen=True)
class Case:
    """A request.

    Args:
        prompt: a user's message, or code that goes on.
        num_tokens: most new tokens.
        tools: functions that the model may call.
        schema: of the JSON that the answer must be.
        stop: a string that ends the answer.
        is_chat: whether the prompt is a message.
    """

    prompt: str
    num_tokens: int = 48
    tools: tuple[dict[str, Any], ...] = ()
    schema: dict[str, Any] | None = None
    stop: tuple[str, ...] = ()
    is_chat: bool = True


CASES = {
    "function": Case("Write a Python function that reverses a linked list."),
    "completion": Case("def fibonacci(n: int) -> int:\n    ", is_chat=False),
    "edit": Case(f"Rename `text` to `content` in this module and repeat it:\n```python\n{SOURCE[:1500]}\n```", 96),
    "sql": Case("SQL: the ten customers with the most orders, from tables customers and orders."),
    "chat": Case("What is the difference between a list and a tuple?"),
    "german": Case("Erkläre in zwei Sätzen, was ein Compiler ist."),
    "chinese": Case("用一句话解释什么是递归。😀"),
    "json": Case('Repeat as JSON with sorted keys: {"b": [1, 2, 3], "a": {"d": null, "c": true}}'),
    "grammar": Case("Make JSON of: Ada Lovelace, 36, lives in London.", schema=PERSON),
    "tool": Case("How is the weather in Paris?", tools=(WEATHER,)),
    "two tools": Case("Compare the weather of Rome and of Oslo.", tools=(WEATHER,)),
    "stop": Case("Count from 1 to 30, separated by commas.", stop=("12",)),
    "long": Case(f"{SOURCE}\n\ndef dedent(text):\n", is_chat=False),
}


def answers(
    draft: Draft | None, at_a_time: int, name: str = QWEN, cases: Mapping[str, Case] = CASES, tree: str | None = None
) -> dict[str, Output]:
    """Every case's output, so many decoded in each step."""
    with Engine.load(real_file(name), draft, max_model_len=4096, max_num_seqs=at_a_time, tree=tree) as engine:
        assert engine.target.decoder == "own, native"
        outputs, tokenizer = Outputs(), not_none(engine.tokenizer)
        with Driver(engine) as driver:
            for case in cases.values():
                message = [{"role": "user", "content": case.prompt}]
                tokens = (
                    tokenizer.chat(message, tools=case.tools or None) if case.is_chat else engine.encode(case.prompt)
                )
                params = SamplingParams(max_new_tokens=case.num_tokens, temperature=0, stop=case.stop)
                grammar = case.schema and compile_grammar("json_schema", json.dumps(case.schema), tokenizer)
                outputs.add(driver, tokens, None, params, grammar=grammar or None)
            for events in driver.steps():
                for event in events:
                    outputs.observe(event)
        return dict(zip(cases, outputs.finished(), strict=True))


@pytest.fixture(scope="module")
def plain() -> dict[str, Output]:
    return answers(None, 1)


def test_cases_are_what_they_are_called(plain: dict[str, Output]) -> None:
    assert list(json.loads(plain["grammar"].text)) == PERSON["required"]
    assert (plain["stop"].stop_reason, plain["stop"].text.count(",")) == ("12", 11)
    assert '"get_weather"' in plain["tool"].text
    assert len(plain["long"].prompt_token_ids) > 2000
    assert sum(len(output.token_ids) for output in plain.values()) > 400


@pytest.mark.parametrize("draft", DRAFTS)
def test_greedy_text_is_that_of_plain_decoding(plain: dict[str, Output], draft: str) -> None:
    """Four at a time with the draft, one at a time without."""
    assert_equal(answers(DRAFTS[draft](), 4), plain)


@pytest.mark.parametrize("name", [SMOLLM, GEMMA])
def test_trees_behind_long_prompts_keep_greedy_text(name: str) -> None:
    """More tokens than the window of Gemma's local layers."""
    cases = {key: case for key, case in CASES.items() if not case.is_chat}
    plain = answers(None, 1, name, cases)
    assert len(plain["long"].prompt_token_ids) > 2000
    assert_equal(answers("ngram", 4, name, cases, "dynamic:9"), plain)


def assert_equal(drafted: Mapping[str, Output], plain: Mapping[str, Output]) -> None:
    for name, output in plain.items():
        assert (name, drafted[name].token_ids, drafted[name].text) == (name, output.token_ids, output.text)
        assert drafted[name].stop_reason == output.stop_reason
    assert sum(output.speculative.num_accepted_tokens for output in drafted.values()) > 0

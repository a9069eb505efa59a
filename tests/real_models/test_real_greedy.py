"""Greedy text of a real GGUF file is the same with and without each kind of draft, bit for bit on native kernels."""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from real_files import GEMMA, QWEN, SMOLLM, real_file
from typed import not_none

from specdec_cli import Engine, SamplingParams
from specdec_cli.engine.driver import Driver
from specdec_cli.engine.outputs import Output, Outputs
from specdec_cli.sampling.grammar import Grammar, compile_grammar
from specdec_cli.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow
FILE = json.loads(Path(__file__).with_name("prompts.json").read_text(encoding="utf-8"))
SOURCE = inspect.getsource(textwrap)
Draft = str | dict[str, Any] | None
BY_TEXT = {"method": "universal", "match": "text"}
DRAFTS: dict[str, tuple[Draft, int, str | None]] = {
    "none": (None, 8, None),
    "ngram": ("ngram", 4, None),
    "suffix": ("suffix", 8, None),
    "ngram trees": ("ngram", 8, "dynamic:9"),
    "suffix trees": ("suffix", 4, "dynamic:9"),
    "self-exit": ("self-exit:8", 4, None),
    "smollm by text": (BY_TEXT, 4, None),
}
"""Drafts of Qwen: the draft, how many requests it decodes at a time, and the shape of its trees."""


@dataclass(frozen=True)
class Case:
    """A request.

    Args:
        prompt: a user's message, or code that goes on; `%s` stands for a module's source.
        num_tokens: most new tokens.
        source: length of the source.
        system: message before the user's.
        tools: names of functions that the model may call.
        schema: name of the JSON schema of the answer.
        stop: strings that end the answer.
        is_chat: whether the prompt is a message.
    """

    prompt: str
    num_tokens: int = 24
    source: int = 0
    system: str | None = None
    tools: Sequence[str] = ()
    schema: str | None = None
    stop: Sequence[str] = ()
    is_chat: bool = True

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        text = self.prompt.replace("%s", SOURCE[: self.source])
        if not self.is_chat:
            return tokenizer.encode(text)
        messages = [{"role": "system", "content": self.system}] if self.system else []
        tools = [FILE["tools"][name] for name in self.tools]
        return tokenizer.chat([*messages, {"role": "user", "content": text}], tools=tools or None)

    def grammar(self, tokenizer: Tokenizer) -> Grammar | None:
        if self.schema is None:
            return None
        return compile_grammar("json_schema", json.dumps(FILE["schemas"][self.schema]), tokenizer)


CASES = {name: Case(**fields) for name, fields in FILE["cases"].items()}
SHORT_CASES = {name: case for name, case in list(CASES.items())[::4] if not case.source}


def answers(
    draft: Draft,
    at_a_time: int,
    name: str = QWEN,
    cases: Mapping[str, Case] = CASES,
    tree: str | None = None,
    compute: str = "native",
) -> dict[str, Output]:
    """Every case's output, so many decoded in each step; dequantized weights are in float32."""
    dtype = "auto" if compute == "native" else "float32"
    options: dict[str, Any] = {
        "max_model_len": 5120,
        "max_num_seqs": at_a_time,
        "tree": tree,
        "compute": compute,
        "dtype": dtype,
    }
    with Engine.load(real_file(name), draft, **options) as engine:
        assert engine.target.decoder == ("own, native" if compute == "native" else "own")
        outputs, tokenizer = Outputs(), not_none(engine.tokenizer)
        with Driver(engine) as driver:
            for case in cases.values():
                params = SamplingParams(max_new_tokens=case.num_tokens, temperature=0, stop=tuple(case.stop))
                outputs.add(driver, case.encode(tokenizer), None, params, grammar=case.grammar(tokenizer))
            for events in driver.steps():
                for event in events:
                    outputs.observe(event)
        return dict(zip(cases, outputs.finished(), strict=True))


@pytest.fixture(scope="module")
def plain() -> dict[str, Output]:
    return answers(None, 1)


def test_cases_are_what_they_are_called(plain: dict[str, Output]) -> None:
    assert len(plain) == 50
    assert list(json.loads(plain["grammar"].text)) == FILE["schemas"]["person"]["required"]
    assert (plain["stop"].stop_reason, plain["stop"].text.count(",")) == ("12", 11)
    assert '"get_weather"' in plain["tool"].text
    assert len(plain["long"].prompt_token_ids) > 4000
    assert sum(len(output.token_ids) for output in plain.values()) > 1000


@pytest.mark.parametrize("name", DRAFTS)
def test_greedy_text_is_that_of_plain_decoding(plain: dict[str, Output], name: str) -> None:
    """Four or eight at a time with the draft, one at a time without."""
    draft, at_a_time, tree = DRAFTS[name]
    if draft is BY_TEXT:
        draft = BY_TEXT | {"model": real_file(SMOLLM)}
    drafted = answers(draft, at_a_time, tree=tree)
    assert_equal(drafted, plain)
    assert (num_accepted(drafted) > 0) == (draft is not None)


@pytest.fixture(scope="module")
def plain_dequantized() -> dict[str, Output]:
    return answers(None, 1, cases=SHORT_CASES, compute="dequantized")


@pytest.mark.parametrize("draft", ["self-int4", "self-int8"])
def test_copies_in_fewer_bits_keep_greedy_text(plain_dequantized: dict[str, Output], draft: str) -> None:
    """Of dequantized weights: there is no copy of blocks."""
    drafted = answers(draft, 4, cases=SHORT_CASES, compute="dequantized")
    assert_equal(drafted, plain_dequantized)
    assert num_accepted(drafted) > 0


@pytest.mark.parametrize("name", [SMOLLM, GEMMA])
def test_trees_behind_long_prompts_keep_greedy_text(name: str) -> None:
    """More tokens than the window of Gemma's local layers."""
    cases = {key: case for key, case in CASES.items() if not case.is_chat}
    plain = answers(None, 1, name, cases)
    assert len(plain["long"].prompt_token_ids) > 4000
    drafted = answers("ngram", 4, name, cases, "dynamic:9")
    assert_equal(drafted, plain)
    assert num_accepted(drafted) > 0


def assert_equal(drafted: Mapping[str, Output], plain: Mapping[str, Output]) -> None:
    for name, output in plain.items():
        assert (name, drafted[name].token_ids, drafted[name].text) == (name, output.token_ids, output.text)
        assert drafted[name].stop_reason == output.stop_reason


def num_accepted(drafted: Mapping[str, Output]) -> int:
    return sum(output.speculative.num_accepted_tokens for output in drafted.values())

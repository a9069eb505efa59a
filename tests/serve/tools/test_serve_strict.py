"""Issue point 11: `strict` on a tool holds where the model itself chooses to call it, in every format."""

import json
from typing import Any

import numpy as np
import pytest
from requests_for_tests import TOOL, chat, facts, tokenizer
from test_serve_tool_formats import written
from tool_templates import TEMPLATES
from typed import not_none

from specdec_cli.serve.errors import ApiError
from specdec_cli.text.tokenizer import Tokenizer

pytest.importorskip("llguidance", reason="needs the extra `structured`")

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "mode": {"enum": ["a", "b"]},
        "deep": {"$ref": "#/$defs/d"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["text", "count", "mode", "deep"],
    "additionalProperties": False,
    "$defs": {"d": {"type": "object", "properties": {"x": {"type": "boolean"}}, "additionalProperties": False}},
}
STRICT = {"type": "function", "function": {"name": "get", "parameters": SCHEMA, "strict": True}}
LOOSE = {"type": "function", "function": {"name": "ping"}}
RIGHT: dict[str, Any] = {"text": 'it is "x"\n<b>', "count": 3, "mode": "a", "deep": {"x": True}}
WRONG: list[dict[str, Any]] = [
    RIGHT | {"count": "x"},
    RIGHT | {"mode": "c"},
    RIGHT | {"deep": {"x": 1}},
    RIGHT | {"more": 1},
    {"text": "a", "mode": "a", "deep": {}},
]
NAMES = [name for name in TEMPLATES if "instructions" not in name and name != "Kimi-K2-Thinking"]


def turn(name: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    text = written(name, calls)
    text = text[text.rindex("hi") + 2 :].split("<|assistant|>")[-1].removeprefix("[/INST]").strip()
    for end in ("<|end|>", "</s>", "<|eot_id|>", ', "id": "123456789"'):
        text = text.replace(end, "")
    return text.rstrip("\n")


def takes(over, tools: list[dict[str, Any]], text: str, **fields) -> bool:
    """Whether the request's grammar lets the model say a text and end there."""
    grammar = chat(over=over, tools=tools, **fields).jobs[0].grammar
    matcher = not_none(grammar).start(over.num_tokens, {0})
    for token in over.tokenizer.encode(text, add_special_tokens=False):
        if matcher.is_finished or not matcher.allowed[token]:
            return False
        matcher.accept([token])
    return matcher.is_finished or bool(matcher.allowed[0])


@pytest.mark.in_turn(0, every=3)
@pytest.mark.parametrize("name", NAMES)
def test_11_a_strict_tools_call_follows_its_schema(name: str) -> None:
    over = facts(TEMPLATES[name][1])
    right = [("get", RIGHT)]
    if name != "Llama 3.1":
        right += [("ping", {}), ("ping", {"q": 1})]
    assert takes(over, [STRICT, LOOSE], turn(name, right))
    for wrong in WRONG:
        assert not takes(over, [STRICT, LOOSE], turn(name, [("get", wrong)])), wrong
    assert not takes(over, [STRICT, LOOSE], turn(name, [("unknown", {})]))


@pytest.mark.parametrize("name", NAMES)
def test_11_text_beside_strict_tools_is_free(name: str) -> None:
    over = facts(TEMPLATES[name][1])
    assert takes(over, [STRICT, LOOSE], "")
    assert takes(over, [STRICT, LOOSE], "I see: 1 < 2, {x} and [y].\n\n<b>Bold</b> `f(x=1)`")
    if name not in ("Llama 3.1", "Llama 4 pythonic"):
        assert takes(over, [STRICT, LOOSE], "I look.\n" + turn(name, [("get", RIGHT)]))
        assert not takes(over, [STRICT, LOOSE], "I look.\n" + turn(name, [("get", WRONG[0])]))


@pytest.mark.parametrize("name", NAMES)
def test_11_one_call_is_the_most_where_that_was_asked(name: str) -> None:
    over = facts(TEMPLATES[name][1])
    assert takes(over, [STRICT, LOOSE], turn(name, [("get", RIGHT)]), parallel_tool_calls=False)
    if name != "Llama 3.1":
        two = turn(name, [("ping", {}), ("ping", {})])
        assert not takes(over, [STRICT, LOOSE], two, parallel_tool_calls=False)


@pytest.mark.in_turn(1, every=4)
@pytest.mark.parametrize("name", NAMES)
def test_11_a_call_of_random_tokens_is_read_and_valid(name: str) -> None:
    """After a call's head everything is drawn from the grammar's masks, short texts preferred."""
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema")
    over, num_whole = facts(TEMPLATES[name][1]), 0
    schema: dict[str, Any] = {"type": "object", "properties": {"n": {"type": "boolean"}, "mode": {"enum": ["a", "b"]}}}
    schema |= {"required": ["n", "mode"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "get", "parameters": schema, "strict": True}}
    said = turn(name, [("get", {"n": True, "mode": "a"})])
    head = not_none(over.tokenizer).encode(said[: said.index("get") + 3], add_special_tokens=False)
    prepared = chat(over=over, tools=[tool], parallel_tool_calls=False)
    for seed in range(20):
        draw, tokens = np.random.default_rng(seed), list(head)
        matcher = not_none(prepared.jobs[0].grammar).start(over.num_tokens, {0})
        assert matcher.accept(head) == len(head)
        while not matcher.is_finished and not matcher.allowed[0] and len(tokens) < 200:
            tokens.append(int(draw.choice(np.flatnonzero(matcher.allowed))))
            matcher.accept(tokens[-1:])
        parser = not_none(prepared.plan.tools).parser()
        deltas = parser.feed(not_none(over.tokenizer).decode(tokens, skip_special_tokens=False)) + parser.finish()
        if len(tokens) < 200:
            num_whole += 1
            assert parser.num_calls == 1, tokens
            jsonschema.validate(json.loads("".join(one.arguments for one in deltas)), schema)
    assert num_whole > 10


def test_11_marks_that_are_tokens_of_their_own_and_marks_in_letters_both_begin_calls() -> None:
    over = facts(TEMPLATES["Qwen2.5"][1])
    hf = not_none(over.tokenizer).hf
    copied = type(hf)(tokenizer_object=hf.backend_tokenizer.__class__.from_str(hf.backend_tokenizer.to_str()))
    copied.chat_template = hf.chat_template
    copied.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    text = Tokenizer(copied)
    with_tokens = facts(TEMPLATES["Qwen2.5"][1], num_tokens=text.num_tokens)
    with_tokens = type(with_tokens)(
        **{name: getattr(with_tokens, name) for name in with_tokens.__slots__} | {"tokenizer": text}
    )
    right, wrong = turn("Qwen2.5", [("get", RIGHT)]), turn("Qwen2.5", [("get", WRONG[0])])
    mark = text.vocabulary["<tool_call>"]
    assert mark in text.encode(right)
    for before in ("", "<think>hm</think>\n", "Sure. "):
        assert takes(with_tokens, [STRICT], before + right)
        assert not takes(with_tokens, [STRICT], before + wrong)
    letters = tokenizer().encode(wrong, add_special_tokens=False)
    matcher = not_none(chat(over=with_tokens, tools=[STRICT]).jobs[0].grammar).start(text.num_tokens, {0})
    assert mark not in letters
    assert not all(_step(matcher, token) for token in letters)


def _step(matcher, token: int) -> bool:
    if not matcher.allowed[token]:
        return False
    matcher.accept([token])
    return True


def test_11_without_a_strict_tool_calls_are_not_constrained() -> None:
    assert chat(over=facts(TEMPLATES["Qwen2.5"][1]), tools=[TOOL, LOOSE]).jobs[0].grammar is None


def test_11_special_tokens_stay_in_the_text_of_strict_calls() -> None:
    prepared = chat(over=facts(TEMPLATES["Qwen2.5"][1]), tools=[STRICT])
    assert (prepared.plan.skip_special, not_none(prepared.plan.tools).form) == (False, "hermes")


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("Qwen3-Coder", {"properties": {"x": {"type": "string", "pattern": "a+"}}}),
        ("GLM-4.6", {"properties": {"x": {"type": ["string", "integer"]}}}),
        ("Llama 4 pythonic", {"properties": {}, "anyOf": [{"required": ["a"]}]}),
        ("Qwen2.5", {"not": {}}),
        ("Qwen3-Coder", {"properties": {"a>b": {"type": "string"}}}),
        ("GLM-4.6", {"properties": {"": {"type": "string"}}}),
        ("Olmo 3", {"properties": {"a-b": {"type": "string"}}}),
    ],
)
def test_11_what_a_format_cannot_follow_is_a_400(name: str, schema: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    with pytest.raises(ApiError) as refused:
        chat(over=facts(TEMPLATES[name][1]), tools=[LOOSE, tool])
    assert (refused.value.status, refused.value.param) == (400, "tools[1].function.strict")


def test_11_strict_calls_do_not_go_with_another_constraint() -> None:
    with pytest.raises(ApiError) as refused:
        chat(over=facts(TEMPLATES["Qwen2.5"][1]), tools=[STRICT], response_format={"type": "json_object"})
    assert (refused.value.status, refused.value.param) == (400, "response_format")

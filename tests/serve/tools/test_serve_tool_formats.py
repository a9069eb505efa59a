"""Issue point 9: the format of a model's tool calls is what its template writes; every one is read back as written."""

import json
import random
import re
from typing import Any, get_args

import pytest
from requests_for_tests import TOOL, USER, chat, facts, tokenizer
from tool_templates import TEMPLATES, UNKNOWN, each, template
from typed import not_none, stand_in

from specdec_cli.recipe.schema import Serve
from specdec_cli.recipe.values import ToolCallParser
from specdec_cli.serve.errors import ApiError
from specdec_cli.serve.tools.calls import ToolDelta
from specdec_cli.serve.tools.formats import FORMATS, PARSERS, find_format
from specdec_cli.serve.tools.json_calls import MarkedObjects
from specdec_cli.serve.tools.parser import ToolPlan

NAMES = list(TEMPLATES)
MARKS_INSIDE = (
    'a "quoted" \\ text,\nwith (brackets] }, = and <b>; </tool_call> <tool_call> <function=g> '
    "</parameter> x </arg_value>."
)
SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "code": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "deep": {"$ref": "#/$defs/deep"},
        "items": {"type": "array"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "is_on": {"type": "boolean"},
    },
    "$defs": {"deep": {"type": "object"}},
}
CALLS = [
    (
        "get_weather",
        {"text": MARKS_INSIDE, "count": 3, "ratio": -0.5, "deep": {"a": [1, {"b": "}]"}]}, "items": [[], "x"]},
    ),
    ("ping", {}),
    ("get_weather", {"text": "12", "code": "  if x:\n    y = 'z'", "maybe": None, "is_on": True}),
]


def folded(deltas: list[ToolDelta]) -> tuple[str, list[tuple[str, str]]]:
    content, names, arguments = "", [], []
    for one in deltas:
        content += one.content
        if one.name is not None:
            assert one.index == len(names)
            names.append(one.name)
            arguments.append("")
        if one.arguments:
            arguments[one.index] += one.arguments
    return content, list(zip(names, arguments, strict=True))


def read(form: Any, text: str, cuts: int | None = None, **plan) -> tuple[str, list[tuple[str, str]]]:
    """What is read of a text at once, or of random pieces of it."""
    schemas = {"get_weather": SCHEMA, "ping": {}, "f": SCHEMA}
    parser = ToolPlan(form, schemas, **plan).parser()
    pieces, draw = [text], random.Random(cuts)
    if cuts is not None:
        places = sorted(draw.randrange(len(text) + 1) for _ in range(cuts))
        pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    return folded([delta for piece in pieces for delta in parser.feed(piece)] + parser.finish())


def written(name: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """The calls as the template writes them in the assistant's turn."""
    hf = tokenizer(TEMPLATES[name][1])
    listed = [
        {"id": "123456789", "type": "function", "function": {"name": call, "arguments": arguments}}
        for call, arguments in calls
    ]
    for given in (listed, [one | {"function": _as_text(stand_in(one["function"]))} for one in listed]):
        try:
            turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": given}]
            return hf.render_chat(stand_in(turns), add_generation_prompt=False)
        except Exception:
            continue
    raise AssertionError(name)


def _as_text(function: dict[str, Any]) -> dict[str, Any]:
    return function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}


@pytest.mark.parametrize("name", NAMES)
def test_9_a_templates_format_is_the_one_that_it_writes(name: str) -> None:
    form, source = TEMPLATES[name]
    assert find_format(tokenizer(source), source) == form


@pytest.mark.parametrize("name", [name for name in NAMES if "instructions" not in name and name != "Kimi-K2-Thinking"])
@pytest.mark.parametrize("cuts", [None, 3, 40, 10_000])
def test_9_calls_are_read_as_the_template_writes_them(name: str, cuts: int | None) -> None:
    calls = CALLS[:1] if name == "Llama 3.1" else CALLS
    text = written(name, stand_in(calls))
    begin = text.rindex("hi") + 2
    _, found = read(TEMPLATES[name][0], text[begin:].split("<|assistant|>")[-1].lstrip(), cuts)
    assert [(call, json.loads(arguments)) for call, arguments in found] == calls


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        # GLM-4.7 writes no lines
        (
            "glm45",
            "Sure.<tool_call>f<arg_key>count</arg_key><arg_value>3</arg_value><arg_key>text</arg_key>"
            "<arg_value> 3 </arg_value></tool_call>",
            ("Sure.", [("f", '{"count": 3, "text": " 3 "}')]),
        ),
        ("glm45", "<tool_call>f\n</tool_call><tool_call>ping</tool_call>", ("", [("f", "{}"), ("ping", "{}")])),
        ("glm45", "Say <tool_call>, then the name.", ("Say <tool_call>, then the name.", [])),
        # Qwen3-Coder leaves out the outer tag now and then, and puts several functions into one
        (
            "qwen3_coder",
            "I look.\n\n<function=f>\n<parameter=text>\nline 1\n\nline 2\n</parameter>\n</function>\n</tool_call>",
            ("I look.", [("f", '{"text": "line 1\\n\\nline 2"}')]),
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=count>\n1\n</parameter>\n</function>\n<function=ping>\n</function>\n"
            "</tool_call> done",
            (" done", [("f", '{"count": 1}'), ("ping", "{}")]),
        ),
        ("qwen3_coder", "Use <function=none_of_ours> here", ("Use <function=none_of_ours> here", [])),
        (
            "qwen3_coder",
            "<tool_call><function=f><parameter=text>a</parameter>b</parameter></function></tool_call>",
            ("", [("f", '{"text": "a</parameter>b"}')]),
        ),
        # DeepSeek-R1 leaves out the outer token
        (
            "deepseek",
            '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": "```"}\n```<｜tool▁call▁end｜>\n'
            "<｜tool▁call▁begin｜>ping<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            ("", [("f", '{"a": "```"}'), ("ping", "{}")]),
        ),
        ("pythonic", "[f(text='it\\'s', count=-3, items=[1, (2,)], is_on=true), ping()]", None),
        ("pythonic", "[1, 2] and [f(x)]", ("[1, 2] and [f(x)]", [])),
        ("pythonic", "[unknown(x=1)]", ("[unknown(x=1)]", [])),
        ("pythonic", '<|python_start|>[other(a="b)")]<|python_end|>', ("", [("other", '{"a": "b)"}')])),
        ("pythonic", "[f(text='''a\n'b' \"c\"''')]", ("", [("f", json.dumps({"text": "a\n'b' \"c\""}))])),
        ("pythonic", '[f("first", count="3", text2=2)]', ("", [("f", '{"text": "first", "count": 3, "text2": 2}')])),
        (
            "olmo3",
            "<function_calls>\nf(count=1)\nping()\n</function_calls>",
            ("", [("f", '{"count": 1}'), ("ping", "{}")]),
        ),
        ("llama3_json", '[{"name": "f", "arguments": {"a": 1}}]', ("", [("f", '{"a": 1}')])),
        ("llama3_json", "[1, 2]", ("[1, 2]", [])),
        ("llama3_json", "[]", ("[]", [])),
        ("hermes", '<tool_call>{"name": "f"}</tool> and so on', ("</tool> and so on", [("f", "{}")])),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_calls_section_end|>",
            ("", [("f", "{}")]),
        ),
    ],
)
def test_9_what_models_write_beside_their_template(form: str, text: str, expected: tuple[Any, ...] | None) -> None:
    whole = read(form, text)
    assert whole == read(form, text, 10_000) == read(form, text, 3)
    expected = expected or (
        "",
        [("f", '{"text": "it\'s", "count": -3, "items": [1, [2]], "is_on": true}'), ("ping", "{}")],
    )
    assert whole == expected


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, "007", '"007"'),
        ({"type": "string"}, "null", '"null"'),
        ({"type": "string"}, '{"a": 1}', '"{\\"a\\": 1}"'),
        ({"type": "integer"}, "5.0", "5"),
        ({"type": "integer"}, "five", '"five"'),
        ({"type": "number"}, "1e3", "1e3"),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "number"}, "3", "3"),
        ({"type": "boolean"}, "True", "true"),
        ({"type": "object"}, "{'a': None, 'b': (1, True)}", '{"a": null, "b": [1, true]}'),
        ({"type": "array"}, "[1, 2", '"[1, 2"'),
        ({"type": ["integer", "null"]}, "null", "null"),
        ({"type": ["string", "null"]}, "5", '"5"'),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", "null"),
        ({"enum": ["1", "2"]}, "1", '"1"'),
        ({"const": 1}, "1", "1"),
        ({"$ref": "#/$defs/n"}, "1", "1"),
        ({"$ref": "#/$defs/loop"}, "1", "1"),
        ({}, "1", "1"),
        ({}, "one", '"one"'),
        ({"type": "array"}, "[" * 5000, json.dumps("[" * 5000)),
        ({"type": "integer"}, "9" * 5000, json.dumps("9" * 5000)),
        ({"type": "number"}, "-" * 5000 + "1", json.dumps("-" * 5000 + "1")),
    ],
    ids=range(23),
)
@pytest.mark.parametrize("form", ["qwen3_coder", "glm45"])
def test_9_text_between_tags_has_the_schemas_type(form: Any, schema: dict[str, Any], text: str, expected: str) -> None:
    parameters = {"properties": {"x": schema}, "$defs": {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}}
    call = {
        "qwen3_coder": f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>",
        "glm45": f"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
    }
    parser = ToolPlan(form, {"f": parameters}).parser()
    _, [(_, arguments)] = folded(parser.feed(call[form]) + parser.finish())
    assert arguments == f'{{"x": {expected}}}'
    json.loads(arguments)


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=count>\n1\n</parameter>\n<parameter=text>\nab",
            '{"count": 1, "text": "ab',
        ),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<par", ""),
        ("glm45", '<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>a"b', '{"text": "a\\"b'),
        ("glm45", "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>a</arg_value>", '{"text": "a"'),
        ("pythonic", "[f(count=1, text='ab", '{"count": 1, "text": "ab'),
        ("pythonic", "[f(count=1", ""),
        ("deepseek", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "b', '{"a": "b'),
    ],
)
def test_9_a_call_that_the_end_of_the_output_cuts_has_what_was_there(form: str, text: str, expected: str) -> None:
    assert read(form, text) == read(form, text, 10_000) == ("", [("f", expected)])


def test_9_arguments_between_tags_stream_one_by_one() -> None:
    parser = ToolPlan("qwen3_coder", {"f": SCHEMA}).parser()
    assert parser.feed("<tool_call>\n<function=f>\n") == [ToolDelta(name="f")]
    assert parser.feed("<parameter=count>\n5\n</parameter>\n<parameter=") == [ToolDelta(arguments='{"count": 5')]


@pytest.mark.parametrize("form", sorted(set(PARSERS.values())))
def test_9_text_without_calls_stays_as_it_is(form: str) -> None:
    text = "1 < 2, [a] and {b}: <tool_ [TOOL f(x=1)\n\n<b>bold</b> functool \n"
    assert read(form, text) == read(form, text, 10_000) == (text, [])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "choice", [None, "auto", "none", "required", {"type": "function", "function": {"name": "weather"}}]
)
def test_9_every_tool_choice_has_its_form(name: str, choice: Any) -> None:
    pytest.importorskip("llguidance", reason="needs the extra `structured`")
    given = {} if choice is None else {"tool_choice": choice}
    prepared = chat(over=facts(TEMPLATES[name][1]), tools=[TOOL], **given)
    own = TEMPLATES[name][0]
    form = {"none": None, "required": "required"}.get(choice, own) if not isinstance(choice, dict) else "named"
    assert (prepared.plan.tools and prepared.plan.tools.form) == form
    assert (prepared.jobs[0].grammar is not None) == (form in ("named", "required"))
    if form is not None:
        call_id = not_none(prepared.plan.tools).call_id(1, "weather")
        pattern = {"mistral": "[a-f0-9]{9}", "kimi_k2": r"functions\.weather:1"}.get(own, "call_[a-f0-9]{32}")
        assert re.fullmatch(pattern, call_id)


@pytest.mark.parametrize("name", list(UNKNOWN))
def test_9_an_unknown_format_is_a_400_for_tools(name: str) -> None:
    with pytest.raises(ApiError, match="--tool-call-parser") as refused:
        chat(over=facts(UNKNOWN[name]), tools=[TOOL])
    assert (refused.value.status, refused.value.param) == (400, "tools")
    assert chat(over=facts(UNKNOWN[name]), tools=[TOOL], tool_choice="none").plan.tools is None
    named = chat(over=facts(UNKNOWN[name], serve=Serve(tool_call_parser="glm47")), tools=[TOOL])
    assert not_none(named.plan.tools).form == "glm45"


def test_9_a_template_that_reads_no_tools_is_a_400_for_them() -> None:
    with pytest.raises(ApiError) as refused:
        chat(over=facts("{# tools #}{% for m in messages %}{{ m.content }} tools{% endfor %}"), tools=[TOOL])
    assert (refused.value.status, refused.value.param) == (400, "tools")


def test_9_every_parser_of_the_command_line_has_a_format() -> None:
    assert set(PARSERS) == set(get_args(ToolCallParser))
    assert {form for form, _ in TEMPLATES.values()} <= set(PARSERS.values())


def test_9_a_template_of_its_own_for_tools_is_the_one_that_counts() -> None:
    hf = tokenizer(template(""))
    hf.hf.chat_template = {"default": "{{ messages[0].content }}", "tool_use": TEMPLATES["GLM-4.6"][1]}
    try:
        assert find_format(hf, "both") == "glm45"
        assert "tools" in hf.template_reads(has_tools=True).variables
        assert "tools" not in hf.template_reads().variables
    finally:
        hf.hf.chat_template = template("")


def test_9_numbered_ids_count_the_calls_of_earlier_turns() -> None:
    over = facts(TEMPLATES["Kimi-K2-Thinking"][1])
    call = {"id": "functions.weather:0", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    answer = {"role": "tool", "tool_call_id": call["id"], "content": "1"}
    prepared = chat(over=over, tools=[TOOL], messages=[*USER, {"role": "assistant", "tool_calls": [call]}, answer])
    assert not_none(prepared.plan.tools).call_id(0, "weather") == "functions.weather:1"
    text = not_none(over.tokenizer).decode(prepared.jobs[0].token_ids, skip_special_tokens=False)
    assert "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>" in text


def test_a_new_format_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found in a template, read, written and enforced."""
    pytest.importorskip("llguidance", reason="needs the extra `structured`")
    row = MarkedObjects("<planted>", "</planted>", written=r'<planted>\s*\[\s*\{[^{}]*"name"[^{}]*NAME')
    monkeypatch.setitem(stand_in(FORMATS), "planted", row)
    source = template(each('<planted>[{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}]</planted>'))
    assert find_format(tokenizer(source), source) == "planted"
    text = row.write([("f", '{"count": 1}', {"count": 1})])
    assert read("planted", f"Hi{text}", 3) == ("Hi", [("f", '{"count": 1}')])
    strict = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
    prepared = chat(over=facts(source), tools=[strict])
    assert not_none(prepared.plan.tools).form == "planted"
    matcher = not_none(prepared.jobs[0].grammar).start(facts().num_tokens, {0})
    tokens = not_none(facts().tokenizer).encode(text, add_special_tokens=False)
    assert matcher.accept(tokens) == len(tokens)

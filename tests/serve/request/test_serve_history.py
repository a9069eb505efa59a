"""Issue point 10: earlier tool calls, however cut or malformed, reach the template and refuse no later turn."""

import json
from typing import Any

import pytest
from requests_for_tests import USER, chat, facts, tokenizer
from tool_templates import TEMPLATES, UNKNOWN, template
from typed import not_none, stand_in

from specdec_cli.recipe.schema import Serve
from specdec_cli.serve.errors import ApiError
from specdec_cli.serve.tools.formats import FORMATS, PARSERS
from specdec_cli.serve.tools.parser import ToolPlan
from specdec_cli.text.call_history import call_writers

CUT = '{"city": "Rom'
MALFORMED = [
    CUT,
    "",
    None,
    " ",
    "nope",
    "[1, 2]",
    '"{\\"city\\": 1}"',
    "null",
    "5",
    "{" * 2000,
    '{"city": NaN}',
    '{"a": 1}}',
    '{"city": "\\ud83d"}',
    '{"\\udc00": [{"city": "a\\ud800b"}]}',
    '{"city": "\\ud83d", "a": "b',
    {"city": "Rome"},
    [1],
]
WRITES_CALLS = [name for name in TEMPLATES if "instructions" not in name and name != "Kimi-K2-Thinking"]


def turns(*arguments: Any, call_id: str | None = "call_12-abc") -> list[dict[str, Any]]:
    calls = [
        {"type": "function", "function": {"name": "weather"} | ({} if given is None else {"arguments": given})}
        | ({} if call_id is None else {"id": f"{call_id}{i}"})
        for i, given in enumerate(arguments)
    ]
    answers = [{"role": "tool", "tool_call_id": f"{call_id or ''}{i}", "content": "21"} for i in range(len(calls))]
    return [*USER, {"role": "assistant", "content": None, "tool_calls": calls}, *answers, *USER]


def prompt(source: str, messages: list[dict[str, Any]]) -> str:
    over = facts(source, max_context=100_000)
    job = chat(over=over, messages=messages).jobs[0]
    return not_none(over.tokenizer).decode(job.token_ids, skip_special_tokens=False)


@pytest.mark.in_turn(2, every=4)
@pytest.mark.parametrize("name", WRITES_CALLS)
@pytest.mark.parametrize("arguments", MALFORMED, ids=range(len(MALFORMED)))
def test_10_no_arguments_refuse_a_later_turn(name: str, arguments: Any) -> None:
    assert "weather" in prompt(TEMPLATES[name][1], turns(arguments))


@pytest.mark.parametrize("name", WRITES_CALLS)
def test_10_what_was_cut_is_in_the_prompt(name: str) -> None:
    text = prompt(TEMPLATES[name][1], turns(CUT))
    assert CUT in text or json.dumps(CUT) in text or "Rom" in text.replace("Rome", "")


def test_10_a_template_that_takes_text_gets_it_as_it_is() -> None:
    assert f"<｜tool▁sep｜>{CUT}<｜tool▁call▁end｜>" in prompt(TEMPLATES["DeepSeek-V3.1"][1], turns(CUT))
    assert '<｜tool▁sep｜>{"b":1}<｜tool▁call▁end｜>' in prompt(TEMPLATES["DeepSeek-V3.1"][1], turns('{"b":1}'))
    assert f'"arguments": {CUT}}}' in prompt(TEMPLATES["Qwen3, arguments as they are"][1], turns(CUT))
    assert f'"arguments": {json.dumps(CUT)}}}' in prompt(TEMPLATES["Qwen2.5"][1], turns(CUT))


def test_10_a_template_that_takes_objects_alone_gets_what_can_be_read() -> None:
    assert "<parameter=city>\nRom\n</parameter>" in prompt(TEMPLATES["Qwen3-Coder"][1], turns(CUT))
    assert "<arg_value>nope</arg_value>" in prompt(TEMPLATES["GLM-4.6"][1], turns("nope"))
    # this one would write a text's characters one by one, without an error
    by_key = template(
        "{% for c in m.tool_calls %}{% set given = c.function.arguments %}"
        "{% for p in given %}{{ p }}={{ given[p] }};{% endfor %}{% endfor %}"
    )
    assert "city=Rom;" in prompt(by_key, turns(CUT))


@pytest.mark.parametrize("name", WRITES_CALLS)
@pytest.mark.parametrize("call_id", [None, "call_0123456789abcdef", "x"])
def test_10_no_id_and_no_number_of_calls_refuses_a_later_turn(name: str, call_id: str | None) -> None:
    text = prompt(TEMPLATES[name][1], turns('{"city": "Rome"}', CUT, call_id=call_id))
    assert text.count("weather") == 2


@pytest.mark.in_turn(3, every=5)
@pytest.mark.parametrize("name", [*WRITES_CALLS])
def test_10_a_call_that_this_server_cut_goes_back_in(name: str) -> None:
    form, source = TEMPLATES[name]
    call: list[dict[str, Any]] = [
        {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": {"city": "Rome", "n": 5}}}
    ]
    if "DeepSeek" in name:
        call[0]["function"]["arguments"] = json.dumps(call[0]["function"]["arguments"])
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": call},
    ]
    text = tokenizer(source).render_chat(messages, add_generation_prompt=False)
    text = text[text.rindex("?") + 1 :].split("<|assistant|>")[-1].removeprefix("[/INST]").lstrip()
    for end in range(1, len(text)):
        parser = ToolPlan(stand_in(form), {"f": {}}).parser()
        deltas = parser.feed(text[:end]) + parser.finish()
        if parser.num_calls:
            prompt(source, turns("".join(one.arguments for one in deltas)))


def test_10_a_call_without_a_name_passes() -> None:
    messages = turns(CUT)
    del messages[1]["tool_calls"][0]["function"]["name"]
    assert "Rom" in prompt(TEMPLATES["Qwen2.5"][1], messages)


def test_10_a_template_that_refuses_the_roles_still_says_why() -> None:
    source = template("{{ raise_exception('no calls here') }}")
    with pytest.raises(ApiError, match="no calls here") as refused:
        prompt(source, turns(CUT))
    assert (refused.value.status, refused.value.param) == (400, "messages")
    assert len(call_writers(tokenizer(source), source, None)) <= 8


@pytest.mark.parametrize("form", sorted(set(PARSERS.values())))
def test_10_calls_of_a_template_that_reads_none_are_written_in_its_format(form: Any) -> None:
    """What is written is what the parser of the format reads."""
    given = {"city": 'Rome "x"', "n": 3, "deep": {"a": [1]}}
    said = [("weather", json.dumps(given), given), ("ping", "", {})]
    schema = {"properties": {"city": {"type": "string"}}}
    parser = ToolPlan(stand_in(form), {"weather": schema, "ping": {}}).parser()
    deltas = parser.feed(FORMATS[form].write(said)) + parser.finish()
    assert not "".join(one.content for one in deltas).strip()
    assert [one.name for one in deltas if one.name] == ["weather", "ping"]
    for place, arguments in enumerate((given, {})):
        assert json.loads("".join(one.arguments for one in deltas if one.index == place)) == arguments


def test_10_a_template_that_shows_the_format_alone_refuses_no_later_turn() -> None:
    form, source = TEMPLATES["instructions only"]
    text = prompt(source, turns(CUT))
    assert form == "qwen3_coder"
    assert "<function=weather>\n<parameter=city>\nRom\n</parameter>" in text
    over = facts(UNKNOWN["the word alone"], serve=Serve(tool_call_parser="hermes"), max_context=9_999)
    job = chat(over=over, messages=turns(CUT)).jobs[0]
    assert f'"arguments": {CUT}}}\n</tool_call>' in not_none(over.tokenizer).decode(
        job.token_ids, skip_special_tokens=False
    )
    with pytest.raises(ApiError) as refused:
        chat(over=facts("{% for m in messages %}{{ m.content }}{% endfor %}"), messages=turns(CUT))
    assert (refused.value.status, refused.value.param) == (400, "messages[1].tool_calls")

"""Issue point 11: a constraint under any server's name is enforced or a 400, never left out without a word."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from requests_for_tests import TOOL, TOOL_TEMPLATE, chat, completion, facts
from tiny_grammar import byte_tokenizer
from typed import not_none

from specdec_cli.sampling.grammar import compile_grammar
from specdec_cli.sampling.grammar_sandbox import Cancellation
from specdec_cli.serve.errors import ApiError
from specdec_cli.serve.protocol import ChatCompletionRequest
from specdec_cli.serve.request.constraint_fields import find_constraint

pytest.importorskip("llguidance", reason="needs the extra `structured`")

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
TEXT = json.dumps(SCHEMA)
GBNF = 'root ::= "yes" | no\nno ::= "no"'
LARK = 'start: "yes" | "no"'
FITS = {"json_schema": ('{"n":1}', "{}"), "json_object": ('{"a":1}', "1"), "regex": ("ab", "c"), "choice": ("yes", "x")}
FITS |= {"grammar": ("no", "x")}

ENFORCED = [
    # OpenAI
    ("json_object", {"response_format": {"type": "json_object"}}),
    ("json_schema", {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}),
    ("json_schema", {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}}),
    ("json_object", {"text": {"format": {"type": "json_object"}, "verbosity": "medium"}}),
    # llama.cpp, llama-cpp-python, TGI and others inside `response_format`
    ("json_schema", {"response_format": {"type": "json_object", "schema": SCHEMA}}),
    ("json_schema", {"response_format": {"type": "json_object", "schema": TEXT}}),
    ("json_schema", {"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}}),
    ("json_schema", {"response_format": {"type": "json_schema", "schema": SCHEMA}}),
    ("json_schema", {"response_format": {"type": "json", "value": SCHEMA}}),
    ("json_schema", {"response_format": {"type": "json_object", "value": SCHEMA}}),
    ("json_schema", {"response_format": {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}}),
    ("json_object", {"response_format": {"type": "json"}}),
    ("regex", {"response_format": {"type": "regex", "value": "a[bx]"}}),
    ("regex", {"response_format": {"type": "regex", "regex": "a[bx]"}}),
    ("regex", {"response_format": {"type": "regex", "regex": {"regex": "a[bx]"}}}),
    ("regex", {"response_format": {"type": "regex_schema", "regex_schema": "a[bx]"}}),
    ("grammar", {"response_format": {"type": "grammar", "grammar": GBNF}}),
    ("grammar", {"response_format": {"type": "ebnf", "ebnf": GBNF}}),
    # vLLM
    ("json_schema", {"guided_json": SCHEMA}),
    ("json_schema", {"guided_json": TEXT, "guided_decoding_backend": "xgrammar"}),
    ("json_object", {"guided_json_object": True}),
    ("regex", {"guided_regex": "a[bx]"}),
    ("choice", {"guided_choice": ["yes", "no"]}),
    ("grammar", {"guided_grammar": LARK}),
    ("grammar", {"guided_grammar": GBNF}),
    ("json_schema", {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}),
    ("json_object", {"structured_outputs": {"json_object": True}}),
    ("regex", {"structured_outputs": {"regex": "a[bx]"}}),
    ("choice", {"structured_outputs": {"choice": ["yes", "no"]}}),
    ("grammar", {"structured_outputs": {"grammar": GBNF}}),
    # llama-server
    ("json_schema", {"json_schema": SCHEMA}),
    ("grammar", {"grammar": GBNF, "grammar_lazy": False, "grammar_triggers": []}),
    ("grammar", {"grammar": LARK}),
    # SGLang
    ("json_schema", {"json_schema": TEXT}),
    ("regex", {"regex": "a[bx]"}),
    ("grammar", {"ebnf": GBNF}),
    # TGI
    ("json_schema", {"grammar": {"type": "json", "value": SCHEMA}}),
    ("regex", {"grammar": {"type": "regex", "value": "a[bx]"}}),
    # llama-cpp-python, TabbyAPI, text-generation-webui
    ("json_schema", {"schema": SCHEMA}),
    ("regex", {"regex_pattern": "a[bx]"}),
    ("grammar", {"grammar_string": GBNF}),
    # Ollama
    ("json_object", {"format": "json"}),
    ("json_schema", {"format": SCHEMA}),
]


@pytest.mark.parametrize(("kind", "fields"), ENFORCED, ids=[json.dumps(fields)[:60] for _, fields in ENFORCED])
@pytest.mark.parametrize("ask", [chat, completion])
def test_11_a_constraint_is_enforced_under_every_name(ask, kind: str, fields: dict[str, Any]) -> None:
    over = facts()
    prepared = ask(over=over, **fields)
    assert prepared.plan.constraint in _paths("", fields)
    fitting, other = FITS[kind]
    for text, fits in ((fitting, True), (other, False)):
        tokens = not_none(over.tokenizer).encode(text, add_special_tokens=False)
        matcher = prepared.jobs[0].grammar.start(over.num_tokens, {0})
        assert _accepts(matcher, tokens) == fits, text


def _paths(prefix: str, value: Any) -> set[str]:
    if not isinstance(value, dict):
        return {prefix}
    return {prefix}.union(*(_paths(f"{prefix}.{name}".lstrip("."), one) for name, one in value.items()))


def _accepts(matcher, tokens: list[int]) -> bool:
    for token in tokens:
        if matcher.is_finished or not matcher.allowed[token]:
            return False
        matcher.accept([token])
    return matcher.is_finished or bool(matcher.allowed[0])


REFUSED = [
    ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema"),
    ({"response_format": {"type": "text", "regex": "a"}}, "response_format.regex"),
    ({"response_format": {"type": "json_object", "schemas": SCHEMA}}, "response_format.schemas"),
    ({"response_format": {"type": "json_object", "regex": "a"}}, "response_format.regex"),
    ({"response_format": {"type": "structural_tag", "structures": []}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"type": "object"}}},
        "response_format.json_schema.type",
    ),
    (
        {"response_format": {"type": "json_schema", "schema": {}, "json_schema": {"schema": {}}}},
        "response_format.schema",
    ),
    ({"response_format": {"type": "json", "value": 5}}, "response_format.value"),
    ({"response_format": {"type": "regex", "value": {}}}, "response_format.value"),
    ({"response_format": {"type": "regex"}}, "response_format.regex"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.json_schema.schema"),
    ({"text": {"formats": {}}}, "text.formats"),
    ({"structured_outputs": {"jsons": {}}}, "structured_outputs.jsons"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    (
        {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
        "structured_outputs.disable_additional_properties",
    ),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"grammar": GBNF, "grammar_lazy": True}, "grammar_lazy"),
    ({"grammar": GBNF, "grammar_triggers": [{"type": 1}]}, "grammar_triggers"),
    ({"grammar": 'root ::= "a" undefined'}, "grammar"),
    ({"grammar": "root ::= ("}, "grammar"),
    ({"guided_json": {"type": "nope"}}, "guided_json"),
    ({"grammar": {"type": "lark", "value": LARK}}, "grammar.type"),
    ({"json_schema": "{"}, "json_schema"),
    ({"json_schema": {"not": {}}}, "json_schema"),
    ({"json_schema": {"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}}, "json_schema"),
    ({"json_schema": SCHEMA, "grammar": GBNF}, "grammar"),
    ({"json_schema": SCHEMA, "response_format": {"type": "json_object"}}, "json_schema"),
    ({"format": "yaml"}, "format"),
    ({"structural_tag": "{}"}, "structural_tag"),
    ({"response_schema": SCHEMA}, "response_schema"),
    ({"guided_decoding": {"json": {}}}, "guided_decoding"),
    ({"choice": ["a", "b"]}, "choice"),
    ({"json": SCHEMA}, "json"),
    ({"json_object": True}, "json_object"),
    ({"extra_body": {"guided_json": SCHEMA}}, "extra_body.guided_json"),
    ({"options": {"format": "json"}}, "options.format"),
    ({"sampling_params": {"regex": "a"}}, "sampling_params.regex"),
    ({"parameters": {"grammar": {"type": "regex", "value": "a"}}}, "parameters.grammar"),
    ({"nvext": {"guided_choice": ["a"]}}, "nvext.guided_choice"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[json.dumps(fields)[:60] for fields, _ in REFUSED])
@pytest.mark.parametrize("ask", [chat, completion])
def test_11_what_is_not_enforced_is_a_400_that_names_it(ask, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        ask(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"text": {"format": {"type": "text"}}},
        {"text": {}},
        {"grammar": "", "json_schema": None, "grammar_string": "", "format": "", "ebnf": ""},
        {"guided_json_object": False, "structured_outputs": {"json_object": False}},
        {"options": {"num_ctx": 5}, "response_mime_type": "text/plain", "structural_tag": None},
    ],
)
@pytest.mark.parametrize("ask", [chat, completion])
def test_11_neutral_values_are_no_constraint(ask, fields: dict[str, Any]) -> None:
    assert ask(**fields).jobs[0].grammar is None


def test_an_empty_list_of_choices_is_named_as_such() -> None:
    body = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": ""}], "guided_choice": []})
    compiler: Any = SimpleNamespace(compile=lambda kind, source, tokenizer, _: compile_grammar(kind, source, tokenizer))
    with pytest.raises(ApiError) as refused:
        not_none(find_constraint(body)).compile(byte_tokenizer(), compiler, Cancellation())
    assert refused.value.message == "`guided_choice` is an empty list; give at least one text"


def test_11_a_schema_that_allows_everything_is_still_json() -> None:
    for fields in ({"format": {}}, {"json_schema": {}}, {"json_schema": True}, {"schema": {}}):
        body = ChatCompletionRequest.model_validate(
            {"messages": [], **fields} | {"messages": [{"role": "user", "content": ""}]}
        )
        assert not_none(find_constraint(body)).kind == "json_schema"
    with pytest.raises(ApiError):
        chat(json_schema=False)


def test_11_a_constraint_of_any_name_does_not_go_with_tools() -> None:
    with pytest.raises(ApiError) as refused:
        chat(over=facts(TOOL_TEMPLATE), tools=[TOOL], grammar=GBNF)
    assert (refused.value.status, refused.value.param) == (400, "grammar")

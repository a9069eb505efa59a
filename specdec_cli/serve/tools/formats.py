"""The formats of tool calls by name, and which of them a model has.

Its chat template writes a made-up call, and the output shows the format.

| format | a call looks like |
|---|---|
| hermes | `<tool_call>{"name": "f", "arguments": {…}}</tool_call>` (Hermes, Qwen2.5, Qwen3) |
| granite, jamba, phi4_mini_json | the same objects in a list after `<|tool_call|>`, `<tool_calls>` and `functools` |
| qwen3_coder | `<tool_call><function=f><parameter=x>1</parameter></function></tool_call>`, values as plain text |
| seed_oss, minimax_m2 | the same with `<seed:tool_call>`; with `<minimax:tool_call><invoke name="f">…` |
| glm45 | `<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>`, values as plain text |
| deepseek | `<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}<｜tool▁call▁end｜>…`, V3 and V3.1 |
| kimi_k2 | the same with Kimi's tokens, `functions.f:0` as the name |
| llama3_json | `{"name": "f", "parameters": {…}}` at the beginning, or after `<|python_tag|>`; several joined by `;` |
| pythonic | `[f(x=1), g(y='a')]` at the beginning, or between Llama 4's or LFM2's tokens |
| olmo3 | `<function_calls>f(x=1)</function_calls>` |
| mistral | `[TOOL_CALLS][{"name": "f", "arguments": {…}}]`, or `[TOOL_CALLS]f[ARGS]{…}` |
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from specdec_cli.serve.tools.call_format import CallFormat
from specdec_cli.serve.tools.json_calls import BareObjects, MarkedObjects, MistralCalls, NamedJson
from specdec_cli.serve.tools.python_calls import BracketedPython, PythonLines
from specdec_cli.serve.tools.tag_calls import GlmCalls, TaggedCalls
from specdec_cli.text.call_probe import CALL_ID, CALLED, SAID, written_call, written_prompt, written_text

if TYPE_CHECKING:
    from specdec_cli.text.tokenizer import Tokenizer

FORMATS: Mapping[str, CallFormat] = {
    "qwen3_coder": TaggedCalls(
        "<tool_call>",
        "</tool_call>",
        parsers=("qwen3_coder", "qwen3_xml"),
        written=r"<tool_call>\s*<function=NAME",
        line="\n",
    ),
    "seed_oss": TaggedCalls("<seed:tool_call>", "</seed:tool_call>", written=r"<seed:tool_call>\s*<function=NAME"),
    "minimax_m2": TaggedCalls(
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        written=r'<minimax:tool_call>\s*<invoke name="NAME',
        call=('<invoke name="', '">'),
        end_call="</invoke>",
        parameter=('<parameter name="', '">'),
    ),
    "glm45": GlmCalls(
        "<tool_call>", "</tool_call>", parsers=("glm45", "glm47"), written=r"<tool_call>\s*NAME\s*<arg_key>"
    ),
    "hermes": MarkedObjects(
        "<tool_call>",
        "</tool_call>",
        written=r'<tool_call>\s*\[?\s*\{[^{}]*"name"[^{}]*NAME',
        is_list=False,
    ),
    "granite": MarkedObjects("<|tool_call|>", written=r'<\|tool_call\|>\s*\[?\s*\{[^{}]*"name"[^{}]*NAME'),
    "jamba": MarkedObjects("<tool_calls>", "</tool_calls>", written=r'<tool_calls>\s*\[\s*\{[^{}]*"name"[^{}]*NAME'),
    "phi4_mini_json": MarkedObjects("functools", written=r'functools\s*\[\s*\{[^{}]*"name"[^{}]*NAME'),
    "deepseek": NamedJson(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        parsers=("deepseek_v3", "deepseek_v31"),
        written=r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>NAME|NAME<｜tool▁sep｜>)",
        call="<｜tool▁call▁begin｜>",
        arguments="<｜tool▁sep｜>",
        end_call="<｜tool▁call▁end｜>",
    ),
    "kimi_k2": NamedJson(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        written=rf"<\|tool_call_begin\|>(?:(?:functions\.)?NAME|{CALL_ID}<\|tool_call_argument_begin\|>)",
        ids="numbered",
        call="<|tool_call_begin|>",
        arguments="<|tool_call_argument_begin|>",
        end_call="<|tool_call_end|>",
        name=re.compile(r"(?:functions\.)?(.+?)(?::\d+)?"),
    ),
    "mistral": MistralCalls(
        "[TOOL_CALLS]", written=r'\[TOOL_CALLS\]\s*(?:\[\s*\{[^{}]*"name"[^{}]*)?NAME', ids="short"
    ),
    "olmo3": PythonLines("<function_calls>", "</function_calls>", written=r"<function_calls>\s*NAME\("),
    "llama3_json": BareObjects(
        "<|python_tag|>",
        parsers=("llama3_json", "llama4_json", "llama3"),
        written=r'<\|python_tag\|>\s*\{[^{}]*"name"[^{}]*NAME',
        bare=r'\[?\s*\{\s*(?:"type":\s*"function",\s*)?"name":\s*"NAME",\s*"(?:parameters|arguments)":',
        instructions=r'\{"name": function name, "parameters": ',
        bare_starts="{[",
    ),
    "pythonic": BracketedPython(
        "",
        parsers=("pythonic", "llama4_pythonic"),
        written=r"(?:<\|python_start\|>|<\|tool_call_start\|>)\s*\[NAME\(",
        bare=r"\[NAME\(",
        instructions=r"\[func(?:tion)?_name1?\(\w+=",
        bare_starts="[",
    ),
}
"""In the order in which a template is looked at."""

PARSERS: Mapping[str, str] = {parser: name for name, form in FORMATS.items() for parser in form.parsers or (name,)}
"""Formats by the names of `--tool-call-parser`."""

_WORD = r"[^\s\"<>()]*[\w}>]"


@lru_cache(maxsize=32)
def find_format(tokenizer: Tokenizer, chat_template: str) -> str | None:
    """The format in which a chat template writes calls, else the format in its instructions; None for neither.

    Args:
        tokenizer: has the template.
        chat_template: the template, so that a changed one is looked at again.
    """
    arguments = {"probe_key": "probe value"}
    tried = (written_call(tokenizer, form) for form in (arguments, json.dumps(arguments)))
    written = next((text for text in tried if text is not None and (CALLED in text or CALL_ID in text)), "")
    instructions = written_prompt(tokenizer) or ""
    turn = _turn(tokenizer, written)
    attempts = (
        (re.search, "written", written, CALLED),
        (re.search, "written", instructions, _WORD),
        (re.match, "bare", turn, CALLED),
        (re.search, "instructions", instructions, ""),
    )
    for find, attribute, text, name in attempts:
        for form, call_format in FORMATS.items():
            pattern = getattr(call_format, attribute)
            if pattern and find(pattern.replace("NAME", name), text):
                return form
    return None


def _turn(tokenizer: Tokenizer, written: str) -> str:
    """The assistant's text in a rendered conversation, without the head of its turn; empty if unclear."""
    plain = written_text(tokenizer)
    if plain is None or SAID not in plain:
        return ""
    head = plain[: plain.index(SAID)].rstrip()
    return written[len(head) :].lstrip() if written.startswith(head) else ""

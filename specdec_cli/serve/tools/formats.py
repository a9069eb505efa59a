"""Which tool-call format a model has: its chat template writes a made-up call, and the output shows the form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from specdec_cli.serve.tools.probe import CALL_ID, CALLED, SAID, written_call, written_prompt, written_text
from specdec_cli.serve.tools.tools import Format

if TYPE_CHECKING:
    from specdec_cli.recipe.schema import ToolCallParser
    from specdec_cli.text.tokenizer import Tokenizer

PARSERS: Mapping[ToolCallParser, Format] = {
    "hermes": "hermes",
    "granite": "granite",
    "jamba": "jamba",
    "phi4_mini_json": "phi4_mini_json",
    "qwen3_coder": "qwen3_coder",
    "qwen3_xml": "qwen3_coder",
    "seed_oss": "seed_oss",
    "minimax_m2": "minimax_m2",
    "glm45": "glm45",
    "glm47": "glm45",
    "deepseek_v3": "deepseek",
    "deepseek_v31": "deepseek",
    "kimi_k2": "kimi_k2",
    "llama3_json": "llama3_json",
    "llama4_json": "llama3_json",
    "llama3": "llama3_json",
    "pythonic": "pythonic",
    "llama4_pythonic": "pythonic",
    "olmo3": "olmo3",
    "mistral": "mistral",
}
"""Formats by the names of `--tool-call-parser`, which are vLLM's; `llama3` is an older one of ours."""

# `NAME` is the called function in a written call and any word in the template's instructions.
_MARKED: Mapping[Format, str] = {
    "qwen3_coder": r"<tool_call>\s*<function=NAME",
    "seed_oss": r"<seed:tool_call>\s*<function=NAME",
    "minimax_m2": r'<minimax:tool_call>\s*<invoke name="NAME',
    "glm45": r"<tool_call>\s*NAME\s*<arg_key>",
    "hermes": r'<tool_call>\s*\[?\s*\{[^{}]*"name"[^{}]*NAME',
    "granite": r'<\|tool_call\|>\s*\[?\s*\{[^{}]*"name"[^{}]*NAME',
    "jamba": r'<tool_calls>\s*\[\s*\{[^{}]*"name"[^{}]*NAME',
    "phi4_mini_json": r'functools\s*\[\s*\{[^{}]*"name"[^{}]*NAME',
    "deepseek": r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>NAME|NAME<｜tool▁sep｜>)",
    "kimi_k2": rf"<\|tool_call_begin\|>(?:(?:functions\.)?NAME|{CALL_ID}<\|tool_call_argument_begin\|>)",
    "mistral": r'\[TOOL_CALLS\]\s*(?:\[\s*\{[^{}]*"name"[^{}]*)?NAME',
    "olmo3": r"<function_calls>\s*NAME\(",
    "llama3_json": r'<\|python_tag\|>\s*\{[^{}]*"name"[^{}]*NAME',
    "pythonic": r"(?:<\|python_start\|>|<\|tool_call_start\|>)\s*\[NAME\(",
}
_BARE: Mapping[Format, str] = {
    "llama3_json": r'\[?\s*\{\s*(?:"type":\s*"function",\s*)?"name":\s*"NAME",\s*"(?:parameters|arguments)":',
    "pythonic": r"\[NAME\(",
}
"""Forms without a mark, where the turn begins with the call."""
_TOLD: Mapping[Format, str] = {
    "llama3_json": r'\{"name": function name, "parameters": ',
    "pythonic": r"\[func(?:tion)?_name1?\(\w+=",
}
_WORD = r"[^\s\"<>()]*[\w}>]"


@lru_cache(maxsize=32)
def find_format(tokenizer: Tokenizer, chat_template: str) -> Format | None:
    """The format in which a chat template writes calls, else the format in its instructions; None for neither.

    Args:
        tokenizer: has the template.
        chat_template: the template, so that a changed one is looked at again.
    """
    arguments = {"probe_key": "probe value"}
    tried = (written_call(tokenizer, given) for given in (arguments, json.dumps(arguments)))
    written = next((text for text in tried if text is not None and (CALLED in text or CALL_ID in text)), "")
    instructions = written_prompt(tokenizer) or ""
    return (
        _match(_MARKED, written, CALLED)
        or _match(_MARKED, instructions, _WORD)
        or _match(_BARE, _turn(tokenizer, written), CALLED, at_begin=True)
        or _match(_TOLD, instructions, "")
    )


def _match(patterns: Mapping[Format, str], text: str, name: str, at_begin: bool = False) -> Format | None:
    find = re.match if at_begin else re.search
    return next((form for form, pattern in patterns.items() if find(pattern.replace("NAME", name), text)), None)


def _turn(tokenizer: Tokenizer, written: str) -> str:
    """The assistant's text in a rendered conversation, without the head of its turn; empty if unclear."""
    plain = written_text(tokenizer)
    if plain is None or SAID not in plain:
        return ""
    head = plain[: plain.index(SAID)].rstrip()
    return written[len(head) :].lstrip() if written.startswith(head) else ""

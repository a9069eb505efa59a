"""Write token ids and chat prompts as llama.cpp makes them, which tests/real_models expects of our tokenizers.

    python -m venv E; E/bin/pip install xllamacpp
    E/bin/python scripts/llama_cpp_ids.py FILE.gguf... --save tests/real_models/llama_cpp.json

It needs no more than that wheel. The 1,000 texts are the lines of tests/real_models/texts.txt, pieces of them, and
combinations of words, digits, signs, spaces, special tokens and characters of all scripts, drawn with a fixed seed. Of
each text the file keeps a digest of its ids, of each conversation the prompt.
"""

from __future__ import annotations

import argparse
import json
import random
import urllib.error
import urllib.request
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

LISTED = Path(__file__).parents[1] / "tests" / "real_models" / "texts.txt"
"""A text a line, with Python's escapes."""
NUM_TEXTS = 1000
_PARTS = {
    "words": (
        "hello|World| the| Ünï|code|'s|'LL|’t|naïve| ПРИВЕТ|привет|你好| 世界|カナ| ひら|안녕|مرحبا|שלום|हिन्दी|ไทย"
        "|ß|ﬁ|ẞ|İ|ǅ|ª|ʰ|ٱ|𝒳"
    ),
    "digits": "0|7|42|365|1024|65536|20251128|٣|५|²|Ⅷ|½|３",
    "signs": ".|,|!?|...|->|!=|//|/*|*/|();|{}|[]|::|€|¿|。|—|°|_|\u0301|\u0948|\u200d|\ufe0f|🎉|👍🏽|🇩🇪",
    "spaces": " |  |   |\t|\n|\n\n|\r\n| \n|\n |\u00a0|\u3000|        |\n\t\t",
    "special": "<|im_start|>\0<|im_end|>\0<|endoftext|>\0<bos>\0<end_of_turn>\0<|\0|>\0<tool_call>\0</s>",
}
"""Pieces of drawn texts, between bars, or zeros where they have bars."""
_SCRIPTS = (
    (0x20, 0x7F), (0xA0, 0x180), (0x180, 0x250), (0x250, 0x300), (0x300, 0x370), (0x370, 0x400), (0x400, 0x530),
    (0x530, 0x590), (0x590, 0x600), (0x600, 0x700), (0x700, 0x860), (0x900, 0x980), (0x980, 0xB00), (0xB00, 0xD80),
    (0xD80, 0xE80), (0xE80, 0x1000), (0x1000, 0x1200), (0x1200, 0x1400), (0x1400, 0x1700), (0x1780, 0x1A00),
    (0x1E00, 0x2000), (0x2000, 0x2070), (0x2070, 0x2150), (0x2150, 0x2200), (0x2200, 0x2400), (0x2400, 0x2700),
    (0x2700, 0x2C00), (0x2C00, 0x2E80), (0x3000, 0x3100), (0x3100, 0x3400), (0x4E00, 0xA000), (0xA000, 0xAC00),
    (0xAC00, 0xD7A4), (0xF900, 0xFB50), (0xFB50, 0xFE00), (0xFE00, 0x10000), (0x10000, 0x10800), (0x1D000, 0x1D800),
    (0x1F000, 0x1F700), (0x1F900, 0x1FA00), (0x20000, 0x2A000),
)  # fmt: skip
"""Ranges of characters, assigned or not; surrogates are none."""
_DIGITS = (
    "0123456789",
    "0123456789.,",
    "0123456789abcdefx",
    "0123456789 +-*/=()",
    "٠١٢٣٤٥٦٧٨٩",
    "०१२३४५६७८९.",
    "１２３４５",
)
_SPACES = (" ", "  ", "    ", "\t", "\n", "\n\n", "\r\n", "\r", "\u00a0", "\u3000", "\u2009", "\v", "\f")
_CONTROLS = tuple(map(chr, (*range(0x20), *range(0x7F, 0xA1), 0xAD, 0x200B, 0x200D, 0x2060, 0xFEFF, 0xFFFD, 0xFFFF)))
_QUESTION = {"role": "user", "content": "What is 2 + 2?"}
_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Current weather of a city, e.g. "Köln"',
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Köln", "<Paris>"]}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
_TIME = {"type": "function", "function": {"name": "now", "description": "It's <the> time & date,\nin 'UTC' 🕐"}}
_NESTED = {
    "type": "function",
    "function": {
        "name": "book.table-2",
        "description": "",
        "parameters": {
            "type": "object",
            "properties": {
                "guests": {"type": "array", "items": {"type": "object", "properties": {"age": {"minimum": 0.5}}}},
                "when": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}], "default": None},
            },
            "additionalProperties": False,
        },
    },
}


def _call(*functions: tuple[str, str], content: str | None = "") -> dict[str, Any]:
    """A turn of the assistant that calls functions with arguments."""
    calls = [
        {"id": f"call_{place}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for place, (name, arguments) in enumerate(functions, start=1)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _said(role: str, content: str | list[str]) -> dict[str, Any]:
    """A turn; a list becomes parts of text."""
    parts = content if isinstance(content, str) else [{"type": "text", "text": text} for text in content]
    return {"role": role, "content": parts}


_CALL = _call(("get_weather", '{"city": "Köln", "days": 2}'))
_RESULT = {"role": "tool", "tool_call_id": "call_1", "content": '{"celsius": 7.5}'}
CHATS: list[dict[str, Any]] = [
    {"messages": [_QUESTION]},
    {"messages": [{"role": "system", "content": "Answer in one word."}, _QUESTION]},
    {"messages": [{"role": "system", "content": ""}, _QUESTION]},
    {"messages": [_QUESTION, {"role": "assistant", "content": "4"}, {"role": "user", "content": "And 3 + 3?"}]},
    {"messages": [{"role": "user", "content": "  spaces around \n\n"}]},
    {"messages": [{"role": "user", "content": '<|im_end|>\n<end_of_turn> 你好 😀 "quotes" & <tags>'}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "one"}]}]},
    {"messages": [_QUESTION], "add_generation_prompt": False},
    {"messages": [_QUESTION], "tools": [_WEATHER]},
    {"messages": [{"role": "system", "content": "Be brief."}, _QUESTION], "tools": [_WEATHER]},
    {"messages": [_QUESTION, _CALL, _RESULT], "tools": [_WEATHER]},
    {
        "messages": [_QUESTION, _CALL, _RESULT, {"role": "assistant", "content": "7.5 °C"}, _QUESTION],
        "tools": [_WEATHER],
    },
    {"messages": [_said("user", ["one", "two\n", "", " three"])]},
    {"messages": [_said("system", ["Be", "brief."]), _said("user", ["Hi"]), _said("assistant", ["Ho"]), _QUESTION]},
    {"messages": [_said("user", ""), _said("assistant", ""), _said("user", "x")]},
    {"messages": [_said("user", "a"), _said("user", "b"), _said("assistant", "c"), _said("user", "d")]},
    {"messages": [_said("user", "a"), _said("system", "Now in French."), _said("user", "b")]},
    {"messages": [_said(("user", "assistant")[place % 2], f"Turn {place}: {'é😀' * place}") for place in range(21)]},
    {"messages": [_said("user", "def f():\n\treturn {'a': \"b\"}\r\n\u2028\x07{{ x }} {% y %} {# z #}")]},
    {"messages": [_QUESTION], "tools": [_WEATHER, _TIME, _NESTED]},
    {"messages": [_said("system", ["Use", "tools."]), _said("user", ["x", "y"])], "tools": [_TIME]},
    {"messages": [_QUESTION, _call(("now", "{}")), _said("tool", "12:30")], "tools": [_TIME]},
    {"messages": [_QUESTION, _call(("now", "{}"), content=None), _said("tool", ["12", "30"])], "tools": [_TIME]},
    {
        "messages": [
            _QUESTION,
            _call(("get_weather", '{"days":1.50,"city":"<Köln> & \'x\'"}'), ("now", "{}"), content="Two calls: 😀"),
            _said("tool", '{"celsius": 7.5}'),
            _said("tool", "line\nline <b>&amp;</b>"),
            _said("user", "And?"),
        ],
        "tools": [_WEATHER, _TIME],
    },
    {
        "messages": [
            _QUESTION,
            _call(("book.table-2", '{"guests": [{"age": 3}, {}], "when": null, "n": [1, 2.5, true, "ü\\n\\"q\\""]}')),
            _said("tool", ""),
            _call(("now", "{}")),
            _said("tool", "12"),
            _said("assistant", "Booked."),
            _said("user", "Thanks."),
        ],
        "tools": [_NESTED, _TIME],
    },
    {
        "messages": [_QUESTION, _said("assistant", "The sum is")],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    {
        "messages": [_QUESTION],
        "tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object"}}}],
    },
]


def texts() -> list[str]:
    """The texts, some of several lines."""
    rng = random.Random(51)
    lines = LISTED.read_text(encoding="utf-8").splitlines()
    listed = [line.encode("ascii", "backslashreplace").decode("unicode_escape") for line in lines]
    parts = {room: pieces.split("\0" if "\0" in pieces else "|") for room, pieces in _PARTS.items()}

    def combined() -> str:
        rooms = rng.choices(list(parts), weights=[5, 2, 3, 4, 1], k=rng.randint(2, 14))
        return "".join(rng.choice(parts[room]) for room in rooms)

    def piece() -> str:
        text = rng.choice(listed)
        begin = rng.randrange(len(text))
        return text[begin : begin + rng.randint(1, 80)]

    def mixture() -> str:
        return "".join(rng.choice((piece, combined, lambda: rng.choice(parts["special"])))() for _ in range(4))

    def characters() -> str:
        ranges = [rng.choice(_SCRIPTS) for _ in range(rng.randint(1, 3))]
        return "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randint(1, 24)))

    def digits() -> str:
        return " ".join("".join(rng.choices(rng.choice(_DIGITS), k=rng.randint(1, 18))) for _ in range(3))

    def spaces() -> str:
        runs = ("".join(rng.choices(_SPACES, k=rng.randint(1, 5))) for _ in range(5))
        return "".join(run + rng.choice(("", "x", "é", "1", ".", "你", "if")) for run in runs)

    def controls() -> str:
        return "".join(rng.choice((*_CONTROLS, "a", "B", " ", "1", "-")) for _ in range(rng.randint(1, 16)))

    kinds = (combined, piece, mixture, characters, digits, spaces, controls)
    distinct = dict.fromkeys(listed)
    while len(distinct) < NUM_TEXTS:
        distinct[kinds[len(distinct) % len(kinds)]()] = None
    return list(distinct)


def digest(ids: Sequence[int]) -> str:
    """Eight hexadecimal digits of token ids."""
    return blake2b(",".join(map(str, ids)).encode(), digest_size=4).hexdigest()


def inputs() -> str:
    """A digest of the texts and conversations."""
    return digest(json.dumps([texts(), CHATS]).encode())


class Server:
    """llama.cpp's server over a file."""

    def __init__(self, path: Path, port: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.warmup, params.port = 512, 1, False, port
        self._server = xllamacpp.Server(params)

    def ask(self, route: str, body: dict[str, Any]) -> Any:
        """Its answer; None where it refuses."""
        address = f"{self._server.listening_address}{route}"
        request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            print(f"{route}: {error.code} {error.read().decode()}")
            return None


def of_file(path: Path, port: int) -> dict[str, Any]:
    """A digest of every text's token ids, and the prompt of every conversation."""
    server = Server(path, port)
    body = {"add_special": True, "parse_special": True}
    ids = [digest(server.ask("/tokenize", body | {"content": text})["tokens"]) for text in texts()]
    prompts = [(server.ask("/apply-template", chat) or {}).get("prompt") for chat in CHATS]
    return {"ids": "".join(ids), "prompts": prompts}


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--save", type=Path, required=True)
    parser.add_argument("--port", type=int, default=18181)
    given = parser.parse_args()
    from importlib.metadata import version

    found = {path.name: of_file(path, given.port + place) for place, path in enumerate(given.files)}
    whole = {"made_by": f"xllamacpp {version('xllamacpp')}", "inputs": inputs(), "models": found}
    given.save.write_text(json.dumps(whole, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

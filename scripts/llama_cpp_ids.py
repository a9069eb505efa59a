"""Write token ids and chat prompts as llama.cpp makes them, which tests/real_models expects of our tokenizers.

    python -m venv E; E/bin/pip install xllamacpp
    E/bin/python scripts/llama_cpp_ids.py FILE.gguf... --save tests/real_models/llama_cpp.json

It needs no more than that wheel. Texts are those listed below and combinations of their parts, drawn with a fixed seed.
"""

from __future__ import annotations

import argparse
import json
import random
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

TEXTS = """
Hello, world!
The quick brown fox jumps over the lazy dog.
I'm sure they'll say we've won; she'd've known. I'M SURE THEY'LL. Don’t ‘quote’ “this”…
def add(a: int, b: int) -> int:\\n    return a + b\\n
for (int i = 0; i < n; ++i) {\\n\\tsum += a[i] * b[i]; // dot\\n}\\n
SELECT name, COUNT(*) FROM users WHERE age >= 18 GROUP BY name HAVING COUNT(*) > 1;
{"name": "Ada", "tags": ["a", "b"], "n": 1.5e-3, "ok": true, "none": null}
<html><body class="x">&nbsp;<br/></body></html>
$ grep -rn 'TODO' src/ | awk -F: '{print $1}' | sort -u
# Title\\n\\n- one\\n- two\\n\\n```python\\nprint("x")\\n```\\n
E = mc² ∑ᵢ xᵢ ≤ ∞, ∂f/∂x ≈ 0.5 ± 10⁻³ √2 ½ ①
https://example.org/a/b?c=d&e=f#g user@example.org C:\\\\Temp\\\\x.txt
0 1 12 123 1234 12345 1234567890 3.14159 1,000,000 0xFF 1e10 ٣٤٥ १२३ ५६ 五六
Größe, Äpfel, Straße, Übermut; l'été à Noël, ça va, œuvre; mañana, ¿qué?, ¡sí!
Привет, как дела? Ёлка и съезд. Київ. Здраво.
Ελληνικά: καλημέρα κόσμε, ΑΒΓ ά ϊ ΰ
你好，世界。今天天气很好！「引号」《书名》——省略……
こんにちは、世界。カタカナとひらがな、漢字ﾊﾝｶｸ
안녕하세요 세계. 한국어 텍스트입니다.
السلام عليكم، كيف حالك؟ مُحَمَّد
שלום עולם. ניקוד: שָׁלוֹם
नमस्ते दुनिया। क्षत्रिय ज्ञान
สวัสดีชาวโลก ภาษาไทยไม่มีช่องว่าง
Xin chào thế giới, tiếng Việt có dấu: ấ ề ỗ ữ
ქართული ენა. Հայերեն. አማርኛ. தமிழ். తెలుగు. বাংলা. ਪੰਜਾਬੀ. ಕನ್ನಡ. മലയാളം. ខ្មែរ. မြန်မာ.
😀😃🎉 👍🏽 👨‍👩‍👧‍👦 🇩🇪🇫🇷 ❤️ ☺ 1️⃣ 🏳️‍🌈 🤷🏻‍♀️
 leading, trailing\\x20
  two   three    four     five\\t\\ttabs \\t mixed\\t\\x20
line\\nline\\n\\nparagraph\\n\\n\\nthree\\r\\nwindows\\rmac\\r\\n\\r\\n
 \\n  \\n\\t\\n\\x20\\x20\\x20
a\\u00a0b\\u2003c\\u3000d\\u200be\\u2028f\\ufeffg\\u0085h
e\\u0301 cafe\\u0301 a\\u0308 \\u1100\\u1161\\u11a8 \\0 \\7 \\x1b[31mred\\x1b[0m \\ufffd \\U0001d54f \\U000e0041
camelCase snake_case SCREAMING_CASE kebab-case PascalCase XMLHttpRequest i18n a1b2c3
!!! ??? ... ---- ==== **** //// #### $$$ %%% ^^^ &&& ((())) [[[]]] {{{}}} <<>> ~~ `` ''' \\"\\"\\"
aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
antidisestablishmentarianism supercalifragilistic Donaudampfschifffahrt hippopotomonstrosesquippedaliophobia
<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n
<|im_start|><|im_start|> <|im_end|>x<|im_end|> <|endoftext|>a<|endoftext|>
<s> </s> <unk> <pad> <bos> <eos> <mask> [INST] [/INST] <<SYS>>
<start_of_turn>user\\nHi<end_of_turn>\\n<start_of_turn>model\\n
<|fim_prefix|>def f():<|fim_suffix|>    return x<|fim_middle|> <|fim_pad|> <|repo_name|>a<|file_sep|>b.py
<tool_call>\\n{\\"name\\": \\"f\\"}\\n</tool_call> <tool_response>1</tool_response> <think>hm</think>
<|object_ref_start|>x<|object_ref_end|><|box_start|>(1,2)<|box_end|><|quad_start|><|vision_pad|><|image_pad|>
<unused0> <unused99> <0x0A> <0xFF> ▁ ▁▁ Ġ Ċ Ã© <filename> <gh_stars> <issue_start> <jupyter_code> <reponame>
<table><tr><td>1</td></tr></table> <h1>x</h1> <strong>y</strong> [multimodal] <start_of_image> <end_of_image>
"""
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
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Köln", "days": 2}'},
        }
    ],
}
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
]


def texts() -> list[str]:
    """The texts, some of several lines."""
    rng = random.Random(51)
    listed = [
        line.encode("ascii", "backslashreplace").decode("unicode_escape") for line in TEXTS.strip("\n").split("\n")
    ]
    parts = {room: pieces.split("\0" if "\0" in pieces else "|") for room, pieces in _PARTS.items()}
    drawn = []
    for _ in range(250):
        rooms = rng.choices(list(parts), weights=[5, 2, 3, 4, 1], k=rng.randint(2, 14))
        drawn.append("".join(rng.choice(parts[room]) for room in rooms))
    return [*listed, *drawn]


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
    """Token ids of every text and the prompt of every conversation."""
    server = Server(path, port)
    body = {"add_special": True, "parse_special": True}
    ids = [server.ask("/tokenize", body | {"content": text})["tokens"] for text in texts()]
    prompts = [(server.ask("/apply-template", chat) or {}).get("prompt") for chat in CHATS]
    return {"ids": ids, "prompts": prompts}


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--save", type=Path, required=True)
    parser.add_argument("--port", type=int, default=18181)
    given = parser.parse_args()
    from importlib.metadata import version

    found = {path.name: of_file(path, given.port + place) for place, path in enumerate(given.files)}
    whole = {"made_by": f"xllamacpp {version('xllamacpp')}", "texts": texts(), "chats": CHATS, "models": found}
    lines = json.dumps(whole, ensure_ascii=True, separators=(",", ":")).replace("],[", "],\n[")
    given.save.write_text(lines + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Token ids and chat prompts of real GGUF files are llama.cpp's, as scripts/llama_cpp_ids.py recorded them."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from real_files import GEMMA, QWEN, SMOLLM, real_file

from specdec_cli.errors import UsageError
from specdec_cli.lm.load import load_tokenizer
from specdec_cli.serve.protocol import Message, TemplateFields, Tool
from specdec_cli.serve.request.conversation import Conversation
from specdec_cli.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow
RECORDED = json.loads(Path(__file__).with_name("llama_cpp.json").read_text(encoding="utf-8"))
SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "llama_cpp_ids.py"))
TEXTS: list[str] = SCRIPT["texts"]()


@pytest.fixture(scope="module", params=[QWEN, SMOLLM, GEMMA])
def name(request: pytest.FixtureRequest) -> str:
    real_file(request.param)
    return str(request.param)


@pytest.fixture(scope="module")
def tokenizer(name: str) -> Tokenizer:
    return Tokenizer(load_tokenizer(real_file(name)))


def test_inputs_are_those_that_llama_cpp_read() -> None:
    assert (len(set(TEXTS)), SCRIPT["inputs"]()) == (1000, RECORDED["inputs"])


def test_ids_are_those_of_llama_cpp(tokenizer: Tokenizer, name: str) -> None:
    digests = RECORDED["models"][name]["ids"]
    expected = [digests[begin : begin + 8] for begin in range(0, len(digests), 8)]
    pairs = zip(TEXTS, expected, strict=True)
    assert [text for text, digest in pairs if SCRIPT["digest"](tokenizer.encode(text)) != digest] == []


def test_decoded_ids_are_the_text(tokenizer: Tokenizer) -> None:
    """In one piece and token by token; `▁` is SentencePiece's own letter for a space.

    SmolLM2 has no token for some control characters, which llama.cpp leaves out, too.
    """
    missing = [chr(code) for code in range(128) if not tokenizer.encode(chr(code), add_special_tokens=False)]
    assert len(missing) < 10
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        stream = tokenizer.detokenizer(skip_special_tokens=False)
        assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids, skip_special_tokens=False)
        known = "".join(letter for letter in text if letter not in missing)
        assert tokenizer.decode(ids, skip_special_tokens=False) in (known, known.replace("▁", " "))


def served_text(tokenizer: Tokenizer, chat: dict[str, Any]) -> str:
    """A request's conversation as `serve` passes it to the model."""
    names = ("add_generation_prompt", "continue_final_message")
    fields = TemplateFields(**{name: chat[name] for name in names if name in chat})
    messages = [Message.model_validate(message) for message in chat["messages"]]
    tools = [Tool.model_validate(tool) for tool in chat.get("tools", ())]
    model: Any = SimpleNamespace(tokenizer=tokenizer, tool_call_format=None, max_context=4096)
    return tokenizer.decode(Conversation(messages, fields, tools).encode(model), skip_special_tokens=False)


def api_text(tokenizer: Tokenizer, chat: dict[str, Any]) -> str:
    """The same conversation as the Python API encodes it."""
    fields = {"tools": chat.get("tools"), "continue_final_message": chat.get("continue_final_message", False)}
    ids = tokenizer.chat(chat["messages"], chat.get("add_generation_prompt", True), **fields)
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_chats_are_rendered_as_by_llama_cpps_server(tokenizer: Tokenizer, name: str) -> None:
    """A file without a chat template is refused; llama.cpp assumes ChatML there."""
    prompts = RECORDED["models"][name]["prompts"]
    if name == GEMMA:
        with pytest.raises(UsageError, match="has no chat template"):
            tokenizer.render_chat(SCRIPT["CHATS"][0]["messages"])
        return
    for chat, prompt in zip(SCRIPT["CHATS"], prompts, strict=True):
        if "tools" in chat and not tokenizer.template_reads(True).variables & {"tools"}:
            continue  # refused: this template ignores tools
        assert served_text(tokenizer, chat) == prompt
        assert api_text(tokenizer, chat) == prompt

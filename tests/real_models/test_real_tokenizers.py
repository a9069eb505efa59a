"""Token ids and chat prompts of real GGUF files are llama.cpp's, as scripts/llama_cpp_ids.py recorded them."""

import json
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


@pytest.fixture(scope="module", params=[QWEN, SMOLLM, GEMMA])
def name(request: pytest.FixtureRequest) -> str:
    real_file(request.param)
    return str(request.param)


@pytest.fixture(scope="module")
def tokenizer(name: str) -> Tokenizer:
    return Tokenizer(load_tokenizer(real_file(name)))


def test_ids_are_those_of_llama_cpp(tokenizer: Tokenizer, name: str) -> None:
    expected = RECORDED["models"][name]["ids"]
    pairs = list(zip(RECORDED["texts"], expected, strict=True))
    assert len(pairs) > 250
    assert {text: tokenizer.encode(text) for text, ids in pairs if tokenizer.encode(text) != ids} == {}


def test_decoded_ids_are_the_text(tokenizer: Tokenizer) -> None:
    """In one piece and token by token; `▁` is SentencePiece's own letter for a space."""
    for text in RECORDED["texts"]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        stream = tokenizer.detokenizer(skip_special_tokens=False)
        assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids, skip_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) in (text, text.replace("▁", " "))


def served_text(tokenizer: Tokenizer, chat: dict[str, Any]) -> str:
    """A request's conversation as `serve` passes it to the model."""
    fields = TemplateFields(add_generation_prompt=chat.get("add_generation_prompt"))
    messages = [Message.model_validate(message) for message in chat["messages"]]
    tools = [Tool.model_validate(tool) for tool in chat.get("tools", ())]
    model: Any = SimpleNamespace(tokenizer=tokenizer, tool_call_format=None, max_context=4096)
    return tokenizer.decode(Conversation(messages, fields, tools).encode(model), skip_special_tokens=False)


def test_chats_are_rendered_as_by_llama_cpps_server(tokenizer: Tokenizer, name: str) -> None:
    """A file without a chat template is refused; llama.cpp assumes ChatML there."""
    prompts = RECORDED["models"][name]["prompts"]
    if name == GEMMA:
        with pytest.raises(UsageError, match="has no chat template"):
            tokenizer.render_chat(RECORDED["chats"][0]["messages"])
        return
    for chat, prompt in zip(RECORDED["chats"], prompts, strict=True):
        if "tools" in chat and not tokenizer.template_reads(True).variables & {"tools"}:
            continue  # refused: this template ignores tools
        assert served_text(tokenizer, chat) == prompt

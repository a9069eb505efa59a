"""A trace of recorded traffic: prompts with the answers that a target gave, read as text.

Drafts that look up text need no model at all, so what they would have had accepted follows from the log alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specdec_cli.errors import UsageError
from specdec_cli.files import given_path, read_text
from specdec_cli.measure.predict.trace import Trace, TracedPrompt
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.text.tokenizer import Tokenizer

_PROMPTS = ("prompt", "messages", "input")
_ANSWERS = ("answer", "output", "response", "completion", "text")
_HINT = 'each row needs a prompt and its answer, such as {"prompt": "…", "answer": "…"} or a chat in `messages`'


def recorded_trace(path: Path, tokenizer: Tokenizer, target: str, most: int) -> Trace:
    """Prompts and answers of a log, as a target's greedy text.

    Raises:
        UsageError: it cannot be read, or a row lacks prompt or answer.
    """
    prompts: list[TracedPrompt] = []
    for number, row in enumerate(_rows(path), 1):
        if len(prompts) == most:
            break
        prompt, answer = _pair(row, f"row {number} of `{path}`")
        ids = tokenizer.chat(prompt) if isinstance(prompt, list) else tokenizer.encode(prompt)
        output = tokenizer.encode(answer, add_special_tokens=False)
        if len(output) > 1:  # a step begins behind the first token
            params = SamplingParams(max_new_tokens=len(output))
            category = row.get("category")
            prompts.append(TracedPrompt(tuple(ids), tuple(output), len(ids) + len(output), params, category))
    if not prompts:
        raise UsageError(f"`{path}` holds no answer of two tokens or more", _HINT)
    num = sum(len(prompt.output) for prompt in prompts)
    return Trace(target, tokenizer.num_tokens, (), None, prompts, np.zeros(num, dtype=np.float32))


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    text = read_text(given_path(path), f"`{path}`")
    try:
        whole = json.loads(text)
        values = whole if isinstance(whole, list) else [whole]
    except (ValueError, RecursionError):
        values = []
        for number, line in enumerate(text.split("\n"), 1):  # a string in JSON may hold other line breaks
            if line.strip():
                try:
                    values.append(json.loads(line))
                except (ValueError, RecursionError):
                    raise UsageError(f"line {number} of `{path}` is not JSON", _HINT) from None
    for number, value in enumerate(values, 1):
        if not isinstance(value, Mapping):
            raise UsageError(f"row {number} of `{path}` is no JSON object", _HINT)
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            message = f"row {number} of `{path}` holds half of a surrogate pair, which is no text"
            raise UsageError(message, "leave the row out") from None
        yield value


def _pair(row: Mapping[str, Any], where: str) -> tuple[str | list[dict[str, str]], str]:
    """Prompt, as text or as messages, and answer of a row: of logs, of requests with responses, of chats."""
    if isinstance(row.get("request"), Mapping) and isinstance(row.get("response"), Mapping):
        row = {**row["request"], "answer": _of_response(row["response"])}
    answer = next((row[name] for name in _ANSWERS if isinstance(row.get(name), str)), None)
    prompt = next((row[name] for name in _PROMPTS if row.get(name)), None)
    if isinstance(prompt, list):
        messages = [_message(message, where) for message in prompt]
        if answer is None and messages[-1]["role"] == "assistant":
            answer = messages.pop()["content"]
        if messages and answer is not None:
            return messages, answer
    if isinstance(prompt, str) and answer is not None:
        return prompt, answer
    raise UsageError(f"{where} lacks a prompt or its answer", _HINT)


def _message(message: Any, where: str) -> dict[str, str]:
    """A message of a chat, its text as a whole or in parts."""
    content = message.get("content") if isinstance(message, Mapping) else None
    parts = content if isinstance(content, list) else []
    if parts and all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        content = "\n".join(part["text"] for part in parts)
    if not isinstance(content, str):
        raise UsageError(f"{where} has a message that is not text alone", "leave the row out")
    return {"role": str(message.get("role")), "content": content}


def _of_response(response: Mapping[str, Any]) -> str | None:
    choices = response.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, Mapping):
        return None
    message = choice.get("message")
    text = choice.get("text", message.get("content") if isinstance(message, Mapping) else None)
    return text if isinstance(text, str) else None

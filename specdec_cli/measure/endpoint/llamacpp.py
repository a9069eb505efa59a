"""llama-server asked by its own API, for callers that ask as they would ask vLLM.

Its OpenAI routes give no token ids without log-probabilities, and those cost a plain server a pass over the vocabulary
for every token. `/completions` below the root is its own route: it gives ids for free. Chats become prompts by
`/apply-template`, prompts become ids by `/tokenize` (tools/server/README.md, November 2026).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from specdec_cli.measure.endpoint.answer import Answer
from specdec_cli.measure.endpoint.endpoint import Endpoint
from specdec_cli.text.printable import printable

_SAME = ("stream", "temperature", "top_p", "min_p", "seed", "stop", "ignore_eos", "prompt")
_RENAMED = {
    "max_tokens": "n_predict",
    "logprobs": "n_probs",
    "return_token_ids": "return_tokens",
    "repetition_penalty": "repeat_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
_WHOLE_CONTEXT = 1 << 17
"""Tokens that penalties count, as many as any model has seen; the server's own default is 64."""
_NOT_SENT = ("model", "stream_options", "return_tokens_as_token_ids", "messages", "top_logprobs")
_FINISHED = {"eos": "stop", "word": "stop", "limit": "length"}
_BUILD = re.compile(r"b([1-9]\d*)")


class LlamaCppEndpoint(Endpoint):
    """llama-server: takes requests and gives answers in the form of vLLM's completions."""

    async def version(self) -> str | None:
        """Number of its build, such as `b11549`, from `/props`; None where the build does not know it."""
        try:
            properties = json.loads(await self.text("/props") or "null")
        except (ValueError, RecursionError):
            return None
        build = properties.get("build_info") if isinstance(properties, dict) else None
        number = _BUILD.match(build) if isinstance(build, str) else None
        return None if number is None else printable(number[0])

    async def ask(self, path: str, body: dict[str, Any], watch: Callable[[Answer], None] | None = None) -> Answer:
        """Send one request and read its stream to the end, as `Endpoint.ask`."""
        prompt = await self._prompt(body)
        return await super().ask("/completions", self._native(body) | {"prompt": prompt}, watch)

    async def whole(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send one request that is not streamed, as `Endpoint.whole`; the answer has the prompt's token ids, too."""
        prompt = await self._prompt(body)
        ids = prompt if isinstance(prompt, list) else await self._token_ids(prompt)
        answer = self._openai(await self._post("/completions", self._native(body) | {"prompt": ids}))
        choice = answer["choices"][0] | {"prompt_token_ids": ids}
        if "logprobs" in body:
            choice["logprobs"] = _logprobs(answer["probabilities"], by_id="return_tokens_as_token_ids" in body)
        return answer | {"choices": [choice]}

    def _url(self, path: str) -> str:
        """Address of a path below the root: its own routes stand there."""
        return self.address.root + path

    async def _prompt(self, body: Mapping[str, Any]) -> Any:
        """The request's prompt: text, or token ids; that of a chat is made by the model's template."""
        if "messages" not in body:
            return body["prompt"]
        made = await self._post("/apply-template", {"messages": body["messages"]})
        return self._field(made, "prompt", str, "/apply-template")

    async def _token_ids(self, prompt: str) -> list[int]:
        asked = {"content": prompt, "add_special": True, "parse_special": True}
        ids: list[int] = self._field(await self._post("/tokenize", asked), "tokens", list, "/tokenize")
        return ids

    def _field(self, answer: Any, name: str, kind: type, path: str) -> Any:
        value = answer.get(name) if isinstance(answer, dict) else None
        if not isinstance(value, kind):
            raise self._say.error(f"`{self._url(path)}` answers without `{name}`", "use a newer llama-server")
        return value

    def _native(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a request by llama-server's names."""
        asked = {name: body[name] for name in _SAME if name in body}
        asked |= {name: body[theirs] for theirs, name in _RENAMED.items() if theirs in body}
        if any(name.endswith("_penalty") for name in asked):
            asked["repeat_last_n"] = _WHOLE_CONTEXT
        if body.get("messages") is not None and "logprobs" in body:
            asked["n_probs"] = body.get("top_logprobs") or 1
        if "top_k" in body:
            asked["top_k"] = max(body["top_k"], 0)  # 0 takes the whole vocabulary
        if "logit_bias" in body:
            asked["logit_bias"] = [[int(token), bias] for token, bias in body["logit_bias"].items()]
        unknown = set(body) - {*_SAME, *_RENAMED, *_NOT_SENT, "top_k", "logit_bias"}
        assert not unknown, f"{sorted(unknown)} should have been refused before a request is made"
        return asked

    def _chunk(self, event: str, data: str, url: str) -> dict[str, Any]:
        """A chunk of a stream in OpenAI's form."""
        chunk = self._json(data, url)
        if not isinstance(chunk, dict) or "content" not in chunk:
            return super()._chunk(event, data, url)
        return self._openai(chunk)

    def _openai(self, answer: Any) -> dict[str, Any]:
        """An answer, or a chunk of one, in the form of vLLM's."""
        self._field(answer, "content", str, "/completions")
        choice = {"index": 0, "text": answer["content"], "token_ids": answer.get("tokens") or []}
        made: dict[str, Any] = {"choices": [choice], "probabilities": answer.get("completion_probabilities")}
        if answer.get("stop"):
            choice["finish_reason"] = _FINISHED.get(str(answer.get("stop_type")), str(answer.get("stop_type")))
            choice["stop_reason"] = answer.get("stopping_word") or None
            usage = {
                "prompt_tokens": answer.get("tokens_evaluated"),
                "completion_tokens": answer.get("tokens_predicted"),
            }
            made |= {"usage": usage, "timings": answer.get("timings")}
        return made


def _logprobs(listed: Any, *, by_id: bool) -> dict[str, Any]:
    """Log-probabilities in the form of vLLM's completions; empty lists where the server gives none."""
    rows = [row for row in listed if isinstance(row, dict)] if isinstance(listed, list) else []
    return {
        "tokens": [row.get("token") for row in rows],
        "token_logprobs": [row.get("logprob") for row in rows],
        "top_logprobs": [
            {_name(other, by_id): other.get("logprob") for other in row.get("top_logprobs") or []} for row in rows
        ],
    }


def _name(row: Mapping[str, Any], by_id: bool) -> str:
    return f"token_id:{row.get('id')}" if by_id else str(row.get("token"))

"""Results of unmodified client libraries, compared with the same request sent as plain HTTP.

Each check gives what a client got and what it had to get; a client that raises is a difference too.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Check = tuple[str, Callable[[], tuple[Any, Any]]]
"""A name, and what gives (what was got, what had to be)."""
STORY = "Once upon a time, there was a little"
TURNS = [{"role": "user", "content": "Tell me a story about a dog."}]
GREEDY: dict[str, Any] = {"max_tokens": 24, "temperature": 0}


class Animal(BaseModel):
    """The schema for `.parse`, `with_structured_output` and the tool. More fields would let a small model ramble."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["cat", "dog", "bird"]
    legs: int = Field(ge=0, le=4)
    is_big: bool


ANIMAL_TOOL = {
    "type": "function",
    "function": {"name": "note_animal", "description": "Note it.", "parameters": Animal.model_json_schema()},
}


@dataclass(frozen=True)
class Place:
    """A server.

    Args:
        url: without `/v1`.
        model: the name that it serves.
        api_key: what it wants; any text where it wants none.
    """

    url: str
    model: str
    api_key: str

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """The answer to a request by the standard library."""
        data = json.dumps({"model": self.model, **body}).encode()
        headers = {"content-type": "application/json", "authorization": f"Bearer {self.api_key}"}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=120) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def completion(self, **body: Any) -> str:
        """The first text of a completion."""
        return str(self.post("/v1/completions", **body)["choices"][0]["text"])

    def chat(self, **body: Any) -> str:
        """The first message of a chat."""
        return str(self.post("/v1/chat/completions", **body)["choices"][0]["message"]["content"])


def openai_checks(place: Place) -> Iterator[Check]:
    """openai-python."""
    import openai

    client = openai.OpenAI(base_url=place.url + "/v1", api_key=place.api_key)
    chat: Any = client.chat.completions
    asked: dict[str, Any] = {"model": place.model, "messages": TURNS, **GREEDY}
    told = {"model": place.model, "prompt": STORY, **GREEDY}
    text, story = place.chat(messages=TURNS, **GREEDY), place.completion(prompt=STORY, **GREEDY)
    warm = {**asked, "temperature": 0.8, "seed": 5}

    yield "models.list", lambda: ([one.id for one in client.models.list()], [place.model])
    yield "chat", lambda: (chat.create(**asked).choices[0].message.content, text)
    yield "chat, streamed", lambda: (_joined(chat.create(**asked, stream=True)), text)
    yield (
        "chat, streamed with usage",
        lambda: (
            list(chat.create(**asked, stream=True, stream_options={"include_usage": True}))[-1].usage.completion_tokens,
            chat.create(**asked).usage.completion_tokens,
        ),
    )
    yield "chat.completions.stream", lambda: (_managed(client, asked), place.chat(messages=TURNS, stop=["."], **GREEDY))
    yield "completion", lambda: (client.completions.create(**told).choices[0].text, story)
    yield (
        "completion, streamed",
        lambda: ("".join(one.choices[0].text for one in client.completions.create(**told, stream=True)), story),
    )
    yield (
        "completions of four prompts",
        lambda: (
            [one.text for one in client.completions.create(**{**told, "prompt": [STORY, "The", STORY, "A"]}).choices][
                ::2
            ],
            [story] * 2,
        ),
    )
    yield "async, 8 at once", lambda: (asyncio.run(_many(place, asked)), [text] * 8)
    yield "async, streamed", lambda: (asyncio.run(_async_stream(place, asked)), text)
    yield "parse", lambda: (type(_parsed(client, asked)), Animal)
    yield "logprobs", lambda: (_logprobs(chat.create(**asked, logprobs=True, top_logprobs=3)), (text, True))
    yield (
        "n and seed",
        lambda: (
            [one.message.content for one in chat.create(**warm, n=3).choices],
            [one["message"]["content"] for one in place.post("/v1/chat/completions", **warm, n=3)["choices"]],
        ),
    )
    yield "stop", lambda: (chat.create(**asked, stop=[" a"]).choices[0].message.content, text.split(" a")[0])
    yield "tool that is named", lambda: (_called(chat, asked, _named("note_animal")), "note_animal")
    yield "tool that is required", lambda: (_called(chat, asked, "required"), "note_animal")
    yield "prediction", lambda: (_predicted(chat, asked, text), (text, True))
    yield "errors", lambda: (_refused(openai, chat, asked), (400, "temperature"))


def langchain_checks(place: Place) -> Iterator[Check]:
    """langchain-openai."""
    from langchain_openai import ChatOpenAI, OpenAI

    common: Any = {"base_url": place.url + "/v1", "api_key": place.api_key, "model": place.model, **GREEDY}
    model, teller = ChatOpenAI(**common), OpenAI(**common)
    text, story = place.chat(messages=TURNS, **GREEDY), place.completion(prompt=STORY, **GREEDY)
    turn = TURNS[0]["content"]
    yield "invoke", lambda: (model.invoke(turn).content, text)
    yield "stream", lambda: ("".join(str(one.content) for one in model.stream(turn)), text)
    yield "batch", lambda: ([one.content for one in model.batch([turn] * 4)], [text] * 4)
    yield "ainvoke", lambda: (asyncio.run(model.ainvoke(turn)).content, text)
    yield "completion, invoke", lambda: (teller.invoke(STORY), story)
    longer = ChatOpenAI(**{**common, "max_tokens": 100})
    for method in ("json_schema", "function_calling"):
        made: Any = longer.with_structured_output(Animal, method=method)
        yield f"with_structured_output, {method}", partial(_type_of_answer, made, turn)


def _type_of_answer(model: Any, turn: str) -> tuple[type, type]:
    return type(model.invoke(turn)), Animal


def litellm_checks(place: Place) -> Iterator[Check]:
    """litellm."""
    import litellm

    where: Any = {"model": f"openai/{place.model}", "api_base": place.url + "/v1", "api_key": place.api_key, **GREEDY}
    text, story = place.chat(messages=TURNS, **GREEDY), place.completion(prompt=STORY, **GREEDY)
    whole: Any = litellm.completion
    yield "completion", lambda: (whole(messages=TURNS, **where).choices[0].message.content, text)
    yield "completion, streamed", lambda: (_joined(whole(messages=TURNS, stream=True, **where)), text)
    yield (
        "acompletion",
        lambda: (asyncio.run(litellm.acompletion(messages=TURNS, **where)).choices[0].message.content, text),
    )
    told = {**where, "model": f"text-completion-openai/{place.model}"}
    yield "text_completion", lambda: (litellm.text_completion(prompt=STORY, **told).choices[0].text, story)


LIBRARIES = {
    "openai": ("openai", openai_checks),
    "langchain-openai": ("langchain_openai", langchain_checks),
    "litellm": ("litellm", litellm_checks),
}
"""Distribution: the module to import, and its checks."""


def _joined(chunks: Any) -> str:
    return "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)


def _managed(client: Any, asked: dict[str, Any]) -> str:
    with client.chat.completions.stream(**asked, stop=["."]) as stream:
        return "".join(event.delta for event in stream if event.type == "content.delta")


async def _many(place: Place, asked: dict[str, Any]) -> list[str]:
    import openai

    async with openai.AsyncOpenAI(base_url=place.url + "/v1", api_key=place.api_key) as client:
        answers = await asyncio.gather(*(client.chat.completions.create(**asked) for _ in range(8)))
    return [str(one.choices[0].message.content) for one in answers]


async def _async_stream(place: Place, asked: dict[str, Any]) -> str:
    import openai

    async with openai.AsyncOpenAI(base_url=place.url + "/v1", api_key=place.api_key) as client:
        stream: Any = await client.chat.completions.create(**asked, stream=True)
        return "".join([one.choices[0].delta.content or "" async for one in stream])


def _parsed(client: Any, asked: dict[str, Any]) -> Any:
    answer = client.chat.completions.parse(**{**asked, "max_tokens": 100}, response_format=Animal)
    return answer.choices[0].message.parsed


def _logprobs(answer: Any) -> tuple[str, bool]:
    """The text by its tokens' bytes, and whether every greedy token is the best of its alternatives, bit for bit."""
    entries = answer.choices[0].logprobs.content
    text = bytes(byte for one in entries for byte in one.bytes).decode()
    return text.removeprefix(" "), all(one.logprob == one.top_logprobs[0].logprob for one in entries)


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _called(chat: Any, asked: dict[str, Any], choice: Any) -> str:
    """The name of the call, its arguments read."""
    answer = chat.create(**{**asked, "max_tokens": 100}, tools=[ANIMAL_TOOL], tool_choice=choice)
    call = answer.choices[0].message.tool_calls[0]
    Animal.model_validate_json(call.function.arguments)
    return str(call.function.name)


def _predicted(chat: Any, asked: dict[str, Any], text: str) -> tuple[str, bool]:
    answer = chat.create(**asked, prediction={"type": "content", "content": text})
    return answer.choices[0].message.content, answer.usage.completion_tokens_details.accepted_prediction_tokens > 0


def _refused(openai: Any, chat: Any, asked: dict[str, Any]) -> tuple[int, str]:
    try:
        chat.create(**{**asked, "temperature": -1})
    except openai.BadRequestError as error:
        return error.status_code, str(error.param)
    return 200, ""

"""A server with the routes that the page talks to and a made-up model behind them; its metrics are the real ones."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from specdec_cli.events import Emitted, Stepped
from specdec_cli.serve.metrics import Metrics
from specdec_cli.serve.page import read_page

Steps = tuple[tuple[tuple[str, bool], ...], ...]
"""An answer: of each step its tokens, and whether each was drafted and accepted."""
STEPS: Steps = (
    (("Once", True), (" upon", True), (" a", False)),
    ((" time", True), (" <b>there", False)),
    ((" was.", False),),
)


class PageServer:
    """Serves on a free port from a thread; a context manager that gives its address."""

    def __init__(
        self,
        prefix: str = "specdec",
        template: str | None = "{{ messages }}",
        key: str | None = None,
        model: dict[str, Any] | None = None,
        answers: Sequence[Steps] = (STEPS,),
        num_nodes: int = 3,
    ) -> None:
        self.answers, self.num_nodes = answers, num_nodes
        self.metrics = Metrics("toy", prefix)
        self.template, self.key = template, key
        self.model = {"id": "toy", "object": "model"} | (model or {})
        self.num_refused = 0
        self.is_loading = False
        self.bodies: list[dict[str, Any]] = []
        self.num_disconnected = 0
        routes = [
            Route("/", self.page),
            Route("/metrics", self.scrape),
            Route("/v1/models", self.models),
            Route("/tokenizer_info", self.tokenizer_info),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/v1/chat/completions", self.answer, methods=["POST"]),
            Route("/v1/completions", self.answer, methods=["POST"]),
        ]
        self._server = uvicorn.Server(
            uvicorn.Config(Starlette(routes=routes), port=0, log_level="critical", lifespan="off")
        )
        self._thread = threading.Thread(target=self._server.run)

    def __enter__(self) -> str:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}/"

    def __exit__(self, *_: Any) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join()

    async def page(self, _: Request) -> Response:
        page = read_page()
        return Response(
            page.body, media_type="text/html", headers={"Content-Security-Policy": page.content_security_policy}
        )

    async def scrape(self, request: Request) -> Response:
        if refusal := self._refusal(request):
            return refusal
        body, content_type = self.metrics.render()
        return Response(body, headers={"Content-Type": content_type})

    async def models(self, request: Request) -> Response:
        return self._refusal(request) or JSONResponse({"object": "list", "data": [self.model]})

    async def tokenizer_info(self, _: Request) -> Response:
        return JSONResponse({"tokenizer_class": "Toy", "chat_template": self.template})

    async def answer(self, request: Request) -> Response:
        if refusal := self._refusal(request):
            return refusal
        body = await request.json()
        self.bodies.append(body)
        if self._length(body) > self.model.get("max_model_len", 10**9):
            error: dict[str, Any] = {
                "message": "`messages` are too long",
                "param": "messages",
                "code": "context_length_exceeded",
            }
            return JSONResponse({"error": error}, 400)
        said = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        if "refuse" in said:
            error = {"message": "the queue is full", "type": "rate_limit_error", "param": None, "code": "queue_full"}
            return JSONResponse({"error": error}, 429, {"Retry-After": "3"})
        steps = self.answers[(len(self.bodies) - 1) % len(self.answers)]
        stream = self._stream(steps, "messages" in body, "forever" in said, "break off" in said)
        return StreamingResponse(stream, media_type="text/event-stream")

    async def tokenize(self, request: Request) -> Response:
        count = self._length(await request.json())
        return JSONResponse({"count": count, "max_model_len": self.model["max_model_len"], "tokens": []})

    def _length(self, body: dict[str, Any]) -> int:
        """A conversation's tokens: ten for each turn."""
        return 10 * len(body.get("messages", ["prompt"]))

    async def _stream(self, steps: Steps, is_chat: bool, forever: bool, breaks: bool) -> AsyncIterator[bytes]:
        ended = False
        try:
            while True:
                for step in steps:
                    yield self._chunk(step, is_chat)
                    await asyncio.sleep(0.005)
                if breaks:
                    await asyncio.sleep(0.3)  # what was sent is read before the connection breaks
                    raise ConnectionError("planted")
                if not forever:
                    break
            choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
            choice["delta" if is_chat else "text"] = {} if is_chat else ""
            usage = {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}
            for document in ({"choices": [choice]}, {"choices": [], "usage": usage}):
                yield b"data: " + json.dumps(document).encode() + b"\n\n"
            yield b": ping\n\ndata: [DONE]\n\n"
            ended = True
        finally:
            self.num_disconnected += not ended

    def _chunk(self, step: tuple[tuple[str, bool], ...], is_chat: bool) -> bytes:
        num_accepted = sum(accepted for _, accepted in step)
        ranks = ((1, 2),) if self.num_nodes > 3 else ()
        emitted = Emitted(
            *(0, tuple(range(len(step))), "", 3, num_accepted, False), num_nodes=self.num_nodes, ranks=ranks
        )
        self.metrics.stepped(Stepped((emitted,), 2, 1, 0, 0.001, 0.002, 0.001, 40, 100), 0)
        text = "".join(text for text, _ in step)
        tokens = [{"text": text, "accepted": accepted} for text, accepted in step]
        choice: dict[str, Any] = {"index": 0, "finish_reason": None}
        choice |= {"delta": {"content": text}} if is_chat else {"text": text}
        choice["speculative"] = {"num_drafted": 3, "num_accepted": num_accepted, "tokens": tokens}
        if self.num_nodes > 3:
            choice["speculative"]["num_draft_nodes"] = self.num_nodes
        return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"

    def _refusal(self, request: Request) -> Response | None:
        if self.is_loading:
            return JSONResponse({"error": {"message": "the model is loading", "code": "loading"}}, 503)
        if self.key is None or request.headers.get("authorization") == f"Bearer {self.key}":
            return None
        self.num_refused += 1
        return JSONResponse({"error": {"message": "no valid API key", "code": "invalid_api_key"}}, 401)

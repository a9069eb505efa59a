"""The routes: each takes its request to the handler and nothing more."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from specdec_cli import __version__
from specdec_cli.serve.answer.responses import ResponseAnswer
from specdec_cli.serve.http.openapi import body_of, responses
from specdec_cli.serve.http.request_handler import handler_of
from specdec_cli.serve.models import Model
from specdec_cli.serve.page import WebPage, read_page
from specdec_cli.serve.page.reference import reference_page
from specdec_cli.serve.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from specdec_cli.serve.request.prepare import prepare_chat, prepare_completion
from specdec_cli.serve.request.responses_protocol import ResponsesRequest
from specdec_cli.serve.request.responses_request import prepare_response
from specdec_cli.serve.request.tokens import detokenize, tokenize, tokenizer_info

router = APIRouter()
_CHAT, _COMPLETIONS, _RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
GENERATING = frozenset({_CHAT, _COMPLETIONS, _RESPONSES})  # paths under which text is asked for


@router.post(_CHAT, openapi_extra=body_of(ChatCompletionRequest), responses=responses(generates=True))
async def chat_completions(request: Request) -> Response:
    """The next message of a conversation."""
    return await handler_of(request).answer(request, ChatCompletionRequest, prepare_chat)


@router.post(_COMPLETIONS, openapi_extra=body_of(CompletionRequest), responses=responses(generates=True))
async def completions(request: Request) -> Response:
    """The continuation of a text."""
    return await handler_of(request).answer(request, CompletionRequest, prepare_completion)


@router.post(_RESPONSES, openapi_extra=body_of(ResponsesRequest), responses=responses(generates=True))
async def create_response(request: Request) -> Response:
    """The next items of a conversation, in the form of OpenAI's Responses."""
    return await handler_of(request).answer(request, ResponsesRequest, prepare_response, ResponseAnswer)


@router.get("/v1/models", responses=responses())
async def list_models(request: Request) -> Response:
    """Every model that is served."""
    data = [_described(model, name) for model in handler_of(request).models.all for name in model.names]
    return JSONResponse({"object": "list", "data": data})


@router.get("/v1/models/{name:path}", responses=responses(404))
async def show_model(request: Request, name: str) -> Response:
    """One of the models."""
    return JSONResponse(_described(handler_of(request).models.find(name), name))


@router.post("/tokenize", openapi_extra=body_of(TokenizeRequest), responses=responses(takes_body=True))
async def tokenize_text(request: Request) -> Response:
    """A text or a conversation as token ids."""
    handler = handler_of(request)
    async with handler.read(request, TokenizeRequest) as (body, headers):
        return JSONResponse(
            await handler.in_pool(tokenize, body, handler.models.find(body.model).info), headers=headers
        )


@router.post("/detokenize", openapi_extra=body_of(DetokenizeRequest), responses=responses(takes_body=True))
async def detokenize_ids(request: Request) -> Response:
    """Token ids as text."""
    handler = handler_of(request)
    async with handler.read(request, DetokenizeRequest) as (body, headers):
        return JSONResponse(
            await handler.in_pool(detokenize, body, handler.models.find(body.model).info), headers=headers
        )


@router.get("/tokenizer_info", responses=responses(503))
async def show_tokenizer(request: Request, model: str | None = None) -> Response:
    """A model's tokenizer, or the first one's."""
    handler = handler_of(request)
    return JSONResponse(await handler.in_pool(tokenizer_info, handler.models.find(model).info))


@router.get("/health", responses=responses(503))
async def health(request: Request) -> Response:
    """Whether the server is ready for requests; needs no key."""
    state = handler_of(request).health()
    return JSONResponse({"status": state}, status_code=200 if state == "ok" else 503)


@router.get("/version", responses=responses())
async def version() -> Response:
    """Which version serves."""
    return JSONResponse({"version": __version__})


@router.get("/metrics", responses=responses())
async def metrics(request: Request) -> Response:
    """Numbers for Prometheus."""
    first, *others = (model.metrics for model in handler_of(request).models.all)
    body, content_type = first.render(others)
    return Response(body, headers={"content-type": content_type})


@router.get("/", include_in_schema=False)
async def page() -> Response:
    """The page to try and to watch the server."""
    return _html(read_page())


@router.get("/docs", include_in_schema=False)
async def reference(request: Request) -> Response:
    """The API as a page to read."""
    return _html(reference_page(request.app.openapi()))


def _html(web_page: WebPage) -> Response:
    headers = {"content-security-policy": web_page.content_security_policy, "x-content-type-options": "nosniff"}
    return Response(web_page.body, media_type="text/html; charset=utf-8", headers=headers)


def _described(model: Model, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "specdec",
        "root": model.root,
        "parent": None,
        "max_model_len": model.max_model_len,
        "speculative": {
            "draft": model.draft,
            "num_speculative_tokens": model.num_speculative_tokens,
            "tree": model.tree,
        },
    }

"""The routes about tokens: `/tokenize`, `/detokenize`, `/tokenizer_info`. Pure, and off the event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec_cli.serve.errors import ApiError, bad_field, unknown_model
from specdec_cli.serve.request.conversation import Conversation
from specdec_cli.serve.request.prompts import check_ids, encode_text

if TYPE_CHECKING:
    from specdec_cli.serve.protocol import DetokenizeRequest, TokenizeRequest
    from specdec_cli.serve.request.prepare import ModelInfo
    from specdec_cli.text.tokenizer import Tokenizer


_DETOKENIZED_CONTEXTS = 4  # whatever /tokenize answers with can be turned back
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


def tokenize(request: TokenizeRequest, model: ModelInfo) -> dict[str, Any]:
    """The answer of `/tokenize`: `{count, max_model_len, tokens, token_strs}`.

    Raises:
        ApiError: 404 for an unknown model, 400 naming the field.
    """
    tokenizer = _tokenizer(request.model, model)
    if (request.prompt is None) == (request.messages is None):
        raise bad_field("prompt", "or `messages` must be given, one of them")
    if request.prompt is not None:
        _refuse_chat_fields(request)
        tokens = encode_text(request.prompt, "prompt", model, request.add_special_tokens is not False)
    else:
        tokens = _encode_messages(request, model)
    strings = [tokenizer.piece(token) for token in tokens] if request.return_token_strs else None
    return {"count": len(tokens), "max_model_len": model.max_context, "tokens": list(tokens), "token_strs": strings}


def detokenize(request: DetokenizeRequest, model: ModelInfo) -> dict[str, Any]:
    """The answer of `/detokenize`: `{prompt}`, special tokens written out.

    Raises:
        ApiError: 404 for an unknown model, 400 naming the field.
    """
    tokenizer = _tokenizer(request.model, model)
    most = _DETOKENIZED_CONTEXTS * model.max_context
    if len(request.tokens) > most:
        raise bad_field("tokens", f"has `{len(request.tokens)}` ids, and at most {most} are taken")
    check_ids(request.tokens, "tokens", model)
    return {"prompt": tokenizer.decode(request.tokens, skip_special_tokens=False)}


def tokenizer_info(model: ModelInfo) -> dict[str, Any]:
    """The answer of `/tokenizer_info`; special tokens as text under the names of `tokenizer_config.json`, as in vLLM's.

    Raises:
        ApiError: 404 for a model without a tokenizer.
    """
    tokenizer = _tokenizer(None, model)
    return {
        "tokenizer_class": type(getattr(tokenizer.hf, "of_transformers", tokenizer.hf)).__name__,
        "vocab_size": tokenizer.num_tokens,
        **{name: getattr(tokenizer.hf, name, None) for name in _SPECIAL},
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_ids": list(tokenizer.eos_token_ids),
        "model_max_length": model.max_context,
        "chat_template": tokenizer.chat_template or None,
        "tool_call_format": model.tool_call_format,
    }


def _tokenizer(name: str | None, model: ModelInfo) -> Tokenizer:
    if name is not None and name not in model.names:
        raise unknown_model(name, model.names)
    if model.tokenizer is None:
        raise ApiError(404, "the model has no tokenizer", code="no_tokenizer")
    return model.tokenizer


def _refuse_chat_fields(request: TokenizeRequest) -> None:
    for name in ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
        if getattr(request, name) is not None:
            raise bad_field(name, "goes with `messages`, not with `prompt`")


def _encode_messages(request: TokenizeRequest, model: ModelInfo) -> tuple[int, ...]:
    messages = request.messages or []
    if not messages:
        raise bad_field("messages", "must have at least one turn")
    if request.add_special_tokens:
        raise bad_field("add_special_tokens", "goes with `prompt`: the chat template brings its own special tokens")
    return Conversation(messages, request, request.tools or ()).encode(model)

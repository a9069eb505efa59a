"""The prompts of a completion request: text or token ids, one or many, and their echo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specdec_cli.serve.errors import bad_field
from specdec_cli.serve.protocol import CompletionRequest

if TYPE_CHECKING:
    from specdec_cli.serve.request.prepare import ModelInfo

Prompts = tuple[tuple[int, ...], ...]
_TRUNCATED_CONTEXTS = 16
"""Contexts that a text with `truncate_prompt_tokens` may fill: all of it is tokenized, however little is kept."""


def encode_text(
    text: str, where: str, model: ModelInfo, add_special_tokens: bool = True, truncate_to: int | None = None
) -> tuple[int, ...]:
    """Token ids of a text. One that cannot fit the model's context is refused before it is tokenized as a whole.

    Args:
        text: any text of a request.
        where: its field.
        model: the served model.
        add_special_tokens: as the tokenizer does by default.
        truncate_to: `truncate_prompt_tokens`: how many of the last tokens are kept.

    Raises:
        ApiError: 400 naming the field.
    """
    if model.tokenizer is None:
        raise bad_field(where, "must be token ids: the model has no tokenizer")
    most = model.max_context * (1 if truncate_to is None else _TRUNCATED_CONTEXTS)
    if model.tokenizer.exceeds(text, most):
        allowed = "" if truncate_to is None else f", and a prompt to truncate may have {most} tokens"
        message = f"has more than `{most}` tokens, and the model's context is {model.max_context}{allowed}"
        raise bad_field(where, message, "context_length_exceeded")
    return truncated(model.tokenizer.encode(text, add_special_tokens), truncate_to)


def check_num_choices(num_prompts: int, n: int, model: ModelInfo) -> None:
    """Refuse more choices than the server's limit, naming `n` or `prompt`."""
    limit = model.serve.max_choices
    if n > limit:
        raise bad_field("n", f"must be at most {limit}, not `{n}`")
    if num_prompts * n > limit:
        message = f"asks for `{num_prompts * n}` choices (prompts times `n`), and at most {limit} are taken"
        raise bad_field("prompt", message)


def read_prompts(request: CompletionRequest, model: ModelInfo) -> tuple[tuple[int, ...], ...]:
    """Token ids of each prompt.

    Raises:
        ApiError: 400 naming the prompt: none, an empty one, too many, ids that do not exist.
    """
    prompt: Any = request.prompt
    is_one = isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], int))
    many = [prompt] if is_one else prompt
    if not many:
        raise bad_field("prompt", "must not be empty")
    check_num_choices(len(many), request.n or 1, model)
    encoded = []
    for i, prompt in enumerate(many):
        where = "prompt" if is_one else f"prompt[{i}]"
        encoded.append(_encode(prompt, where, request, model))
    return tuple(encoded)


def _encode(prompt: str | list[int], where: str, request: CompletionRequest, model: ModelInfo) -> tuple[int, ...]:
    most = request.truncate_prompt_tokens
    if isinstance(prompt, str):
        tokens = encode_text(prompt, where, model, request.add_special_tokens is not False, most)
    else:
        tokens = truncated(prompt, most)
        if len(tokens) > model.max_context:
            message = f"has `{len(tokens)}` tokens, and the model's context is {model.max_context}"
            raise bad_field(where, message, "context_length_exceeded")
        check_ids(prompt, where, model)
    if not tokens:
        raise bad_field(where, "must have at least one token")
    return tokens


def check_ids(tokens: Sequence[int], where: str, model: ModelInfo) -> None:
    """Refuse token ids that the model does not have, naming the first one's place."""
    wrong = next((i for i, token in enumerate(tokens) if token >= model.num_tokens), None)
    if wrong is not None:
        message = f"must be a token id below {model.num_tokens}, not `{tokens[wrong]}`"
        raise bad_field(f"{where}[{wrong}]", message)


def truncated(tokens: Sequence[int], most: int | None) -> tuple[int, ...]:
    """The last tokens, as many as `truncate_prompt_tokens` says."""
    return tuple(tokens if most is None else tokens[-most:])


def echo(request: CompletionRequest, prompts: Prompts, model: ModelInfo) -> tuple[str, ...]:
    """Each prompt as it was given, or as its tokens say it: special ones too where `skip_special_tokens` is false."""
    prompt: Any = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    if isinstance(prompt[0], str) and request.truncate_prompt_tokens is None:
        return tuple(prompt)
    if model.tokenizer is None:
        return ("",) * len(prompts)
    skips_special = request.skip_special_tokens is not False
    return tuple(model.tokenizer.decode(prompt, skips_special) for prompt in prompts)

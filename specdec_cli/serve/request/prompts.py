"""The prompts of a completion request: text or token ids, one or many, and their echo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specdec_cli.serve.errors import bad_field
from specdec_cli.serve.protocol import CompletionRequest, GenerationBody

if TYPE_CHECKING:
    from specdec_cli.serve.request.prepare import Facts

Prompts = tuple[tuple[int, ...], ...]


def check_num_choices(num_prompts: int, n: int, facts: Facts) -> None:
    """Refuse more choices than the server's limit, naming `n` or `prompt`."""
    limit = facts.limits.max_choices
    if n > limit:
        raise bad_field("n", f"must be at most {limit}, not `{n}`")
    if num_prompts * n > limit:
        said = f"asks for `{num_prompts * n}` choices (prompts times `n`), and at most {limit} are taken"
        raise bad_field("prompt", said)


def read_prompts(request: CompletionRequest, facts: Facts) -> tuple[tuple[int, ...], ...]:
    """Token ids of each prompt.

    Raises:
        ApiError: 400 naming the prompt: none, an empty one, too many, ids that do not exist.
    """
    given: Any = request.prompt
    is_one = isinstance(given, str) or (len(given) > 0 and isinstance(given[0], int))
    many = [given] if is_one else given
    if not many:
        raise bad_field("prompt", "must not be empty")
    check_num_choices(len(many), request.n or 1, facts)
    found = []
    for i, prompt in enumerate(many):
        where = "prompt" if is_one else f"prompt[{i}]"
        found.append(truncated(_encode(prompt, where, request.add_special_tokens, facts), request))
    return tuple(found)


def _encode(prompt: str | list[int], where: str, add_special_tokens: bool | None, facts: Facts) -> list[int]:
    if isinstance(prompt, str):
        if facts.tokenizer is None:
            raise bad_field(where, "must be token ids: the model has no tokenizer")
        tokens = facts.tokenizer.encode(prompt, add_special_tokens is not False)
    else:
        tokens = prompt
        wrong = next((i for i, token in enumerate(tokens) if token >= facts.num_tokens), None)
        if wrong is not None:
            said = f"must be a token id below {facts.num_tokens}, not `{tokens[wrong]}`"
            raise bad_field(f"{where}[{wrong}]", said)
    if not tokens:
        raise bad_field(where, "must have at least one token")
    return tokens


def truncated(tokens: Sequence[int], request: GenerationBody) -> tuple[int, ...]:
    """The last tokens, as many as `truncate_prompt_tokens` says."""
    return tuple(tokens if request.truncate_prompt_tokens is None else tokens[-request.truncate_prompt_tokens :])


def echo(request: CompletionRequest, prompts: Prompts, facts: Facts) -> tuple[str, ...]:
    """Each prompt as it was given, or as its tokens say it: special ones too where `skip_special_tokens` is false."""
    given: Any = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    if isinstance(given[0], str) and request.truncate_prompt_tokens is None:
        return tuple(given)
    if facts.tokenizer is None:
        return ("",) * len(prompts)
    skips_special = request.skip_special_tokens is not False
    return tuple(facts.tokenizer.decode(prompt, skips_special) for prompt in prompts)

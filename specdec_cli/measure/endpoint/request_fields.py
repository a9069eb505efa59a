"""The body of a request to a server: prompt and sampling, which the benchmark sets, and extra fields."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from specdec_cli.engine.prompts import PromptRow
from specdec_cli.errors import UsageError
from specdec_cli.recipe.schema import Sampling

MaxTokensField = Literal["max_tokens", "max_completion_tokens"]
_WARM_UP = "Before the runners start, they"
_LENGTH = "give -n/--max-new-tokens; --max-tokens-field chooses the field that holds it"
_ONE_ANSWER = "each request has one answer, which is timed"
_ALWAYS_STREAMS = "every request streams and asks for usage"
_OWN_PROMPT = "prompts come from --dataset; --chat sends them as messages"
_OWNED = {
    "model": "give --endpoint-model",
    **dict.fromkeys(("prompt", "messages", "input", "echo", "suffix"), _OWN_PROMPT),
    **dict.fromkeys(("stream", "stream_options"), _ALWAYS_STREAMS),
    **dict.fromkeys(("n", "best_of", "use_beam_search"), _ONE_ANSWER),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "n_predict", "max_new_tokens"), _LENGTH),
    "stop_token_ids": "give --stop-token-id",
    "skip_special_tokens": "give --set sampling.skip_special_tokens=false",
}
_SENT_WHERE_SET = (
    *("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("ignore_eos", "min_tokens", "skip_special_tokens"),
)
_OPTIONS = (*_SENT_WHERE_SET, "temperature", "seed", "stop", "logit_bias")


def sampling_fields(sampling: Sampling, max_tokens_field: MaxTokensField = "max_tokens") -> dict[str, Any]:
    """Sampling fields of a request: OpenAI's, and vLLM's extras where they are set.

    Length and temperature are always sent, because servers have defaults of their own; a seed where chance is involved.
    """
    given: dict[str, Any] = {max_tokens_field: sampling.max_new_tokens, "temperature": sampling.temperature}
    if sampling.temperature > 0 or sampling.seed:
        given["seed"] = sampling.seed
    neutral = Sampling()
    for name in _SENT_WHERE_SET:
        if getattr(sampling, name) != getattr(neutral, name):
            given[name] = getattr(sampling, name)
    if sampling.logit_bias:
        given["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    lists = {"stop": sampling.stop, "stop_token_ids": sampling.stop_token_ids}
    return given | {name: list(values) for name, values in lists.items() if values}


def parse_extra_body(text: str | None) -> dict[str, Any]:
    """Read `--extra-body`: fields for every request beside those that the benchmark sets itself.

    Raises:
        UsageError: it is no JSON object, or has a field that the benchmark owns.
    """
    example = """for example `--extra-body '{"chat_template_kwargs": {"enable_thinking": false}}'`"""
    if text is None:
        return {}
    try:
        fields = json.loads(text)
        json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        message = error.msg if isinstance(error, json.JSONDecodeError) else "it holds a value that JSON cannot say"
        raise UsageError(f"`--extra-body` is not JSON: {message}", example) from None
    if not isinstance(fields, dict):
        raise UsageError("`--extra-body` must be a JSON object", example)
    for name in fields:
        if name in _OWNED or name in _OPTIONS:
            hint = _OWNED.get(name, f"give --{name.replace('_', '-')}")
            raise UsageError(f"`--extra-body` must not hold `{name}`: the benchmark sets that itself", hint)
    return fields


def check_max_tokens_field(name: MaxTokensField, chat: bool) -> None:
    """Refuse a field that the route does not have: servers that skip it would choose a length of their own.

    Raises:
        UsageError: it is `max_completion_tokens` and prompts are no messages.
    """
    if name == "max_completion_tokens" and not chat:
        raise UsageError("`max_completion_tokens` is a field of /v1/chat/completions alone", "add --chat")


def request_body(
    row: PromptRow,
    model: str,
    chat: bool,
    fields: Mapping[str, Any],
    extra: Mapping[str, Any] | None = None,
    max_tokens_field: MaxTokensField = "max_tokens",
) -> dict[str, Any]:
    """The request body for one prompt. Its own length and seed override the run's."""
    own = {max_tokens_field: row.max_new_tokens, "seed": seed_of(row, fields["seed"]) if "seed" in fields else row.seed}
    asked = {"messages": row.chat()} if chat else {"prompt": row.prompt}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    return {
        "model": model,
        **asked,
        **fields,
        **{name: value for name, value in own.items() if value is not None},
        **(extra or {}),
        **stream,
    }


def seed_of(row: PromptRow, seed: int) -> int:
    """The seed of a prompt: its own, or the run's and its row.

    Servers give two requests of one seed the same random numbers: they would accept and reject in the same steps, and
    a run's prompts would say as little about chance as one.
    """
    if row.seed is not None:
        return row.seed
    return seed if seed < 0 else seed + max(row.index, 0)


def warm_up_row(rows: Sequence[PromptRow]) -> PromptRow:
    """A prompt that shares no prefix with a row, so that nothing cached for it helps the rows."""
    text = _WARM_UP
    while any(row.prompt.startswith(text) or text.startswith(row.prompt) for row in rows):
        text = f"{len(text)} {text}"
    return PromptRow(-1, text)

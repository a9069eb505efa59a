"""A request's sampling fields become sampling parameters, each checked against the model and the server's limits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from specdec_cli.errors import UsageError
from specdec_cli.recipe.schema import Serve
from specdec_cli.sampling.params import SamplingParams, random_seed, settled_seed
from specdec_cli.serve.errors import as_api_error, bad_field
from specdec_cli.serve.protocol import SAMPLING_FIELDS

if TYPE_CHECKING:
    from specdec_cli.lm.files.generation import Generation
    from specdec_cli.serve.protocol import GenerationBody
    from specdec_cli.serve.request.prepare import ModelInfo

_MAX_BIAS = 100
_MOST_TOKENS = 2**31 - 1
"""More are bounded here, and refused by the context's own check, which names the request's field."""
Bound = tuple[str, int | None]
"""The name of a request's field, and its value; None where the field is absent."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """Defaults of a request's sampling fields.

    Args:
        params: their values; temperature 1 by default, as in OpenAI's API.
        named: parameters that are set for this server; a seed and a length count only if they are.
        is_greedy: whether the server verifies in mode `greedy`, which takes temperature 0 alone.
    """

    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=1.0))
    named: frozenset[str] = frozenset()
    is_greedy: bool = False

    def over(self, generation: Generation) -> Defaults:
        """Defaults with those of a model's checkpoint below them."""
        taken = self.taken(generation)
        return Defaults(replace(self.params, **taken), self.named | set(taken), self.is_greedy)

    def taken(self, generation: Generation) -> dict[str, Any]:
        """The checkpoint's settings that apply: those that neither repeat nor contradict the server's own."""
        kept = set(self.named) | ({"temperature"} if self.is_greedy else set())
        if self.params.min_tokens > generation.sampling.get("max_new_tokens", 2**31):
            kept.add("max_new_tokens")
        return {name: value for name, value in generation.sampling.items() if name not in kept}

    def length(self, otherwise: int) -> int:
        """Most tokens of a request that does not say."""
        return self.params.max_new_tokens if "max_new_tokens" in self.named else otherwise

    def seed(self) -> int:
        """Seed of a request without one: random, unless one is set for the server."""
        return self.params.seed if "seed" in self.named else random_seed()


def sampling_params(request: GenerationBody, model: ModelInfo, length: Bound, logprobs: Bound) -> SamplingParams:
    """Sampling parameters of a request's first choice; `max_new_tokens` is for the caller to bound by the context.

    Raises:
        ApiError: 400 naming the field.
    """
    limits, defaults = model.serve, model.sampling
    max_tokens, num_logprobs = length[1], logprobs[1]
    fields: dict[str, Any] = {name: getattr(request, name) for name in (*SAMPLING_FIELDS, "skip_special_tokens")}
    fields = {name: value for name, value in fields.items() if value is not None}
    if request.top_k is not None:
        fields["top_k"] = request.top_k if request.top_k > 0 else None
    if num_logprobs is not None and num_logprobs > limits.max_logprobs:
        raise bad_field(logprobs[0], f"must be at most {limits.max_logprobs}, not `{num_logprobs}`")
    if request.min_tokens is not None and max_tokens is not None and request.min_tokens > max_tokens:
        raise bad_field("min_tokens", f"is `{request.min_tokens}`, above `{length[0]}`, which is `{max_tokens}`")
    if (request.min_tokens or 0) >= 2**31:
        raise bad_field("min_tokens", f"must be less than {2**31}, not `{request.min_tokens}`")
    if request.logit_bias is not None:
        fields["logit_bias"] = _logit_bias(request.logit_bias, model.num_tokens)
    if request.stop is not None:
        fields["stop"] = _stop(request.stop, limits)
    if request.stop_token_ids is not None:
        fields["stop_token_ids"] = _stop_token_ids(request.stop_token_ids, model.num_tokens)
    at_least = defaults.params.min_tokens if request.min_tokens is None else request.min_tokens
    fields |= {
        "seed": defaults.seed() if request.seed is None else settled_seed(request.seed),
        "logprobs": num_logprobs,
        "index": 0,
        "max_new_tokens": min(max(max_tokens or 0, at_least, 1), _MOST_TOKENS),
        "min_tokens": min(at_least, max(max_tokens or _MOST_TOKENS, 1), _MOST_TOKENS),
    }
    try:
        params = replace(defaults.params, **fields)
    except UsageError as error:
        raise as_api_error(error) from error
    if defaults.is_greedy and params.temperature > 0:
        message = f"must be 0, not `{params.temperature:g}`: this server verifies in mode `greedy`"
        raise bad_field("temperature", message)
    return params


def _logit_bias(biases: dict[str, float], num_tokens: int) -> dict[int, float]:
    by_token = {}
    for name, bias in biases.items():
        if not (
            name.isascii() and name.isdigit() and len(name) < 10 and str(int(name)) == name and int(name) < num_tokens
        ):
            message = f"must have token ids below {num_tokens} as keys, not `{name[:50]}`"
            raise bad_field("logit_bias", message)
        if abs(bias) > _MAX_BIAS:
            raise bad_field(f"logit_bias.{name}", f"must be from -{_MAX_BIAS} to {_MAX_BIAS}, not `{bias:g}`")
        by_token[int(name)] = float(bias)
    return by_token


def _stop(stop: str | list[str], limits: Serve) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else stop
    for i, text in enumerate(texts):
        where = "stop" if isinstance(stop, str) else f"stop[{i}]"
        if not text:
            raise bad_field(where, "must not be an empty string")
        if len(text) > limits.max_stop_chars:
            raise bad_field(where, f"has `{len(text)}` characters, and at most {limits.max_stop_chars} are taken")
    return tuple(texts)


def _stop_token_ids(token_ids: list[int], num_tokens: int) -> tuple[int, ...]:
    for i, token in enumerate(token_ids):
        if token >= num_tokens:
            raise bad_field(f"stop_token_ids[{i}]", f"must be below {num_tokens}, not `{token}`")
    return tuple(token_ids)

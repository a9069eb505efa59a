"""A request's sampling fields become sampling parameters, each checked against the model and the server's limits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from specdec_cli.errors import UsageError
from specdec_cli.sampling.params import SamplingParams, random_seed, settled_seed
from specdec_cli.serve.errors import as_api_error, bad_field
from specdec_cli.serve.limits import RequestLimits

if TYPE_CHECKING:
    from specdec_cli.lm.files.generation import Generation
    from specdec_cli.serve.protocol import GenerationBody

_SAME_NAME = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
    "skip_special_tokens",
)
_MAX_BIAS = 100


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
        """These over what a model's checkpoint asks for."""
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


@dataclass(frozen=True, slots=True)
class OutputFields:
    """The end conditions of a request, from the fields of its API.

    Args:
        max_tokens: most tokens to emit; None where the field is absent.
        max_tokens_field: its name.
        logprobs: alternatives beside each token; None reports nothing.
        logprobs_field: the name of their number.
    """

    max_tokens: int | None
    max_tokens_field: str
    logprobs: int | None
    logprobs_field: str


def sampling_params(
    request: GenerationBody, wanted: OutputFields, defaults: Defaults, num_tokens: int, limits: RequestLimits
) -> SamplingParams:
    """Sampling parameters of a request's first choice; `max_new_tokens` is for the caller to bound by the context.

    Args:
        request: the typed body.
        wanted: its ends.
        defaults: what absent fields take.
        num_tokens: V, for token ids.
        limits: how much a request may ask for.

    Raises:
        ApiError: 400 naming the field.
    """
    given: dict[str, Any] = {name: getattr(request, name) for name in _SAME_NAME}
    given = {name: value for name, value in given.items() if value is not None}
    if request.top_k is not None:
        given["top_k"] = request.top_k if request.top_k > 0 else None
    if wanted.logprobs is not None and wanted.logprobs > limits.max_logprobs:
        raise bad_field(wanted.logprobs_field, f"must be at most {limits.max_logprobs}, not `{wanted.logprobs}`")
    if request.min_tokens is not None and wanted.max_tokens is not None and request.min_tokens > wanted.max_tokens:
        field = wanted.max_tokens_field
        raise bad_field("min_tokens", f"is `{request.min_tokens}`, above `{field}`, which is `{wanted.max_tokens}`")
    if (request.min_tokens or 0) >= 2**31:
        raise bad_field("min_tokens", f"must be less than {2**31}, not `{request.min_tokens}`")
    if request.logit_bias is not None:
        given["logit_bias"] = _logit_bias(request.logit_bias, num_tokens, limits)
    if request.stop is not None:
        given["stop"] = _stop(request.stop, limits)
    if request.stop_token_ids is not None:
        given["stop_token_ids"] = _stop_token_ids(request.stop_token_ids, num_tokens, limits)
    at_least = defaults.params.min_tokens if request.min_tokens is None else request.min_tokens
    given |= {
        "seed": defaults.seed() if request.seed is None else settled_seed(request.seed),
        "logprobs": wanted.logprobs,
        "index": 0,
        "max_new_tokens": max(wanted.max_tokens or 0, at_least, 1),
        "min_tokens": min(at_least, max(wanted.max_tokens or 2**31, 1)),
    }
    try:
        params = replace(defaults.params, **given)
    except UsageError as error:
        raise as_api_error(error) from error
    if defaults.is_greedy and params.temperature > 0:
        said = f"must be 0, not `{params.temperature:g}`: this server verifies in mode `greedy`"
        raise bad_field("temperature", said)
    return params


def _logit_bias(given: dict[str, float], num_tokens: int, limits: RequestLimits) -> dict[int, float]:
    if len(given) > limits.max_logit_bias:
        raise bad_field("logit_bias", f"has `{len(given)}` entries, and at most {limits.max_logit_bias} are taken")
    found = {}
    for name, bias in given.items():
        if not (
            name.isascii() and name.isdigit() and len(name) < 10 and str(int(name)) == name and int(name) < num_tokens
        ):
            said = f"must have token ids below {num_tokens} as keys, not `{name[:50]}`"
            raise bad_field("logit_bias", said)
        if abs(bias) > _MAX_BIAS:
            raise bad_field(f"logit_bias.{name}", f"must be from -{_MAX_BIAS} to {_MAX_BIAS}, not `{bias:g}`")
        found[int(name)] = float(bias)
    return found


def _stop(given: str | list[str], limits: RequestLimits) -> tuple[str, ...]:
    texts = [given] if isinstance(given, str) else given
    if len(texts) > limits.max_stop:
        raise bad_field("stop", f"has `{len(texts)}` strings, and at most {limits.max_stop} are taken")
    for i, text in enumerate(texts):
        where = "stop" if isinstance(given, str) else f"stop[{i}]"
        if not text:
            raise bad_field(where, "must not be an empty string")
        if len(text) > limits.max_stop_chars:
            raise bad_field(where, f"has `{len(text)}` characters, and at most {limits.max_stop_chars} are taken")
    return tuple(texts)


def _stop_token_ids(given: list[int], num_tokens: int, limits: RequestLimits) -> tuple[int, ...]:
    if len(given) > limits.max_stop:
        raise bad_field("stop_token_ids", f"has `{len(given)}` tokens, and at most {limits.max_stop} are taken")
    for i, token in enumerate(given):
        if token >= num_tokens:
            raise bad_field(f"stop_token_ids[{i}]", f"must be below {num_tokens}, not `{token}`")
    return tuple(given)

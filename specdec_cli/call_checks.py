"""Checks of calls from Python: unknown parameters and values of another type are refused by their names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache, wraps
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from specdec_cli.errors import UsageError, closest

Called = TypeVar("Called", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)

_MOST_LISTED = 20  # parameters in a hint
_PARAMETERS: dict[str, tuple[str, ...]] = {}
"""Each checked callable's parameters, in the order in which hints look for a name."""
_ELSEWHERE: dict[str, tuple[str, ...]] = {
    "num_speculative_tokens": (
        *("k", "gamma", "num_assistant_tokens", "num_draft_tokens", "num_spec_tokens", "spec_tokens"),
        *("speculative_num_steps", "speculative_tokens", "max_draft_len", "draft_len"),
    ),
    "max_new_tokens": (
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "max_length", "num_predict", "n_predict"),
        "num_tokens",
    ),
    "repetition_penalty": ("repeat_penalty",),
    "stop": ("stop_strings", "stop_sequences"),
    "stop_token_ids": ("eos_token_id", "eos_token_ids"),
    "seed": ("random_seed",),
    "grammar": ("guided_decoding", "structured_outputs", "response_format", "json_schema", "regex"),
    "params": ("sampling_params", "sampling", "generation_config"),
    "prompts": ("prompt", "prompt_token_ids", "token_ids", "input_ids", "messages", "inputs", "text"),
    "prompt": ("prompts", "prompt_token_ids", "token_ids", "input_ids", "messages", "inputs", "text"),
    "progress": ("use_tqdm", "callback"),
    "target": ("model", "model_path", "target_model", "model_id"),
    "draft": (
        *("speculative_model", "draft_model", "assistant_model", "spec_model", "spec_method"),
        *("method", "drafter"),
    ),
    "prefix_caching": ("enable_prefix_caching",),
    "kv_cache_bytes": ("gpu_memory_utilization", "kv_cache_memory", "kv_cache_memory_bytes"),
    "quantize": ("quantization", "load_in_8bit"),
    "dtype": ("torch_dtype",),
    "device": ("device_map",),
    "max_model_len": ("max_seq_len", "max_context", "context_length", "n_ctx"),
    "max_num_seqs": ("batch_size", "max_batch_size"),
    "verify": ("rejection_sample_method", "spec_decoding_acceptance_method", "draft_sample_method"),
    "p_min": ("assistant_confidence_threshold", "draft_p_min"),
    "block_size": ("kv_block_size",),
    "chat_variables": ("chat_template_kwargs", "default_chat_template_kwargs"),
}
"""Our name of a parameter, and what vLLM, transformers, OpenAI's client and llama.cpp call it."""
_ADVICE = {
    **dict.fromkeys(
        ("n", "best_of", "num_return_sequences"), "give the prompt once for each output: each one is sampled by itself"
    ),
    "speculative_config": "name the draft as `draft` and its number of tokens as `num_speculative_tokens`",
    "do_sample": "a temperature above 0 samples, and 0 is greedy",
    "tokenizer": "the target's own tokenizer is used",
    "prompt_lookup_num_tokens": 'name prompt lookup as the draft: draft="ngram"',
    **dict.fromkeys(
        ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
        "specdec runs a model on one device; `specdec export vllm` writes the command for several",
    ),
    "prompt_logprobs": "`logprobs` reports the generated tokens'",
}
"""Parameters elsewhere that have no counterpart, and what to do."""


def checked_call(title: str | None = None) -> Callable[[Called], Called]:
    """Make a function refuse keyword arguments that it does not have, naming the right one.

    Args:
        title: how users call it; None takes its qualified name.
    """

    def decorate(function: Called) -> Called:
        name, parameters = title or function.__qualname__, inspect.signature(function).parameters.values()
        names = frozenset(one.name for one in parameters)
        _PARAMETERS[name] = tuple(one.name for one in parameters if one.name not in ("self", "cls"))

        @wraps(function)
        def called(*given: Any, **named: Any) -> Any:
            if not named.keys() <= names:
                refuse_unknown(name, named)
            return function(*given, **named)

        return called  # type: ignore[return-value]

    return decorate


def checked_fields(made: Class) -> Class:
    """Make a data class refuse unknown fields and values of another type, by their names."""
    set_fields: Any = made.__init__  # type: ignore[misc]
    _PARAMETERS[made.__name__] = names = tuple(inspect.signature(made).parameters)
    known = frozenset(names)

    @wraps(set_fields)
    def checked(self: Any, *given: Any, **named: Any) -> None:
        if not named.keys() <= known:
            refuse_unknown(made.__name__, named)
        kinds = _kinds(made)
        for name, value in (*zip(names, given, strict=False), *named.items()):
            check_kind(name, value, kinds[name])
        set_fields(self, *given, **named)

    made.__init__ = checked  # type: ignore[misc]
    return made


@lru_cache
def _kinds(made: type) -> dict[str, Any]:
    return get_type_hints(made)


def refuse_unknown(title: str, named: Iterable[str]) -> None:
    """Refuse the first argument that a callable does not have.

    Raises:
        UsageError: there is one.
    """
    for name in named:
        if name not in _PARAMETERS[title]:
            raise UsageError(f"`{title}` has no parameter `{name}`", _suggestion(title, name))


def _suggestion(title: str, name: str) -> str:
    """The hint for a name that a callable does not have."""
    if name in _ADVICE:
        return _ADVICE[name]
    meant = [ours for ours, others in _ELSEWHERE.items() if name in others] or [name]
    own = _PARAMETERS[title]
    for ours in meant:
        if ours in own:
            return f"use `{ours}`"
    for ours in meant:
        for owner, parameters in _PARAMETERS.items():
            if ours in parameters:
                return f"it is `{ours}` of `{owner}`"
    close = closest(name, own)
    if close is not None:
        return f"did you mean `{close}`?"
    return f"it has: {', '.join(own)}" if len(own) <= _MOST_LISTED else f"see help({title})"


def check_kind(name: str, value: Any, kind: Any) -> None:
    """Refuse a value of another type than its parameter's.

    Raises:
        UsageError: it is of another type.
    """
    if not fits(value, kind):
        is_lone = isinstance(value, str) and fits((value,), kind)
        hint = f"one string: {name}=({value!r},)" if is_lone else None
        raise UsageError(f"{name} must be {kind_name(kind)}, not `{value!r}`", hint)


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a type, as an annotation writes it; numbers of numpy count, and a bool is no number."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(fits(value, one) for one in arguments)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin is None or not issubclass(origin, tuple | Mapping):
        return callable(value) if origin is not None else _is_plain(value, kind)
    return _has_items(value, origin, arguments)


def _is_plain(value: Any, kind: Any) -> bool:
    """Whether a value is of a type without arguments."""
    if kind is Any or isinstance(value, bool):
        return kind in (Any, bool)
    numbers = {int: (int, Integral), float: (int, float, Real)}
    return isinstance(value, numbers.get(kind, kind))


def _has_items(value: Any, origin: type, arguments: tuple[Any, ...]) -> bool:
    """Whether a value is a mapping or a list of items of these types; any collection counts as a tuple."""
    if issubclass(origin, Mapping):
        key, item = arguments
        return isinstance(value, Mapping) and all(fits(k, key) and fits(v, item) for k, v in value.items())
    if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
        return False
    kinds = [arguments[0]] * len(value) if arguments[-1] is ... else arguments
    return len(value) == len(kinds) and all(map(fits, value, kinds))


_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", NoneType: "none"}
_PLURALS = {int: "whole numbers", float: "numbers", str: "strings"}


def kind_name(kind: Any) -> str:
    """A type in words."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(kind_name(one) for one in arguments)
    if origin is Literal:
        return " or ".join(f"`{one}`" for one in arguments)
    if origin is tuple:
        return f"a list of {_PLURALS.get(arguments[0]) or _many(arguments[0])}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a mapping" if arguments[1] is Any else f"a mapping of {' to '.join(_PLURALS[one] for one in arguments)}"
    return _NAMES.get(kind) or ("a function" if origin is not None else kind.__name__)


def _many(kind: Any) -> str:
    """Several values of a type that is no plain one, in words."""
    return "pairs of whole numbers" if get_origin(kind) is tuple else kind.__name__

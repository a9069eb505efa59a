"""Checks of calls from Python: unknown parameters and values of another type are refused by their names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
    "grammar": (
        *("guided_decoding", "structured_outputs", "response_format", "json_schema", "regex"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    ),
    "min_tokens": ("min_new_tokens", "min_length"),
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
    "quantize": ("quantization", "load_in_8bit", "load_in_4bit"),
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
    "num_beams": "there is no beam search; a temperature above 0 samples, and 0 is greedy",
    **dict.fromkeys(("bad_words", "bad_words_ids"), "`logit_bias` with -100 bans a token"),
    "detokenize": "an output has both its text and its token ids",
    "include_stop_str_in_output": "`stop_reason` holds the stop string, which is never part of the text",
}
"""Parameters elsewhere that have no counterpart, and what to do."""
_IN_OWN_WORDS = ("prompt", "prompts", "params", "k", "drafts")
"""Parameters of many forms, whose checks are those of their functions."""


def checked_call(title: str | None = None, makes: str = "") -> Callable[[Called], Called]:
    """Make a function refuse arguments that it does not have, lacks, or of another type, each by its name.

    Args:
        title: how users call it; None takes its qualified name.
        makes: of a constructor whose parts are objects of any kind, the function that makes them; their types are not
            checked.
    """

    def decorate(function: Called) -> Called:
        name, parameters = title or function.__qualname__, [*inspect.signature(function).parameters.values()]
        own = {"self", "cls"} & {parameters[0].name}
        _PARAMETERS[name] = tuple(parameter.name for parameter in parameters if parameter.name not in own)
        by_place = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
        needed = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
        names = frozenset(parameter.name for parameter in parameters)

        @wraps(function)
        def called(*given: Any, **named: Any) -> Any:
            if not named.keys() <= names:
                refuse_unknown(name, named)
            if len(given) > len(by_place):
                others = (
                    f"name the others, such as `{_PARAMETERS[name][len(by_place) - len(own)]}=`"
                    if names > {*by_place}
                    else None
                )
                places, num = len(by_place) - len(own), len(given) - len(own)
                raise UsageError(f"`{name}` takes {places} arguments without a name, not `{num}`", others)
            arguments = {**dict(zip(by_place, given, strict=False)), **named}
            missing = [parameter for parameter in needed if parameter not in arguments]
            if missing:
                raise UsageError(f"`{name}` needs {' and '.join(f'`{each}`' for each in missing)}", makes or None)
            if len(arguments) < len(given) + len(named):
                twice = next(parameter for parameter in by_place[: len(given)] if parameter in named)
                raise UsageError(f"`{name}` is given `{twice}` twice, by its place and by its name")
            if not makes:
                kinds = _kinds(function)
                for parameter, value in arguments.items():
                    if parameter in kinds:
                        check_kind(parameter, value, kinds[parameter])
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
def _kinds(made: Callable[..., Any]) -> dict[str, Any]:
    """Types of a data class's fields, or of a function's parameters."""
    return {name: kind for name, kind in get_type_hints(made).items() if name not in _IN_OWN_WORDS}


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
        owners = [owner for owner, parameters in _PARAMETERS.items() if ours in parameters]
        if owners:
            alike = max(owners, key=lambda owner: len({*own} & {*_PARAMETERS[owner]}))
            return f"it is `{ours}` of `{alike}`"
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
        return any(fits(value, argument) for argument in arguments)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin is None or not issubclass(origin, Sequence | Mapping):
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
    is_any_length = arguments[-1] is ... or not issubclass(origin, tuple)
    kinds = [arguments[0]] * len(value) if is_any_length else arguments
    return len(value) == len(kinds) and all(map(fits, value, kinds))


_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", NoneType: "none"}
_PLURALS = {int: "whole numbers", float: "numbers", str: "strings"}


def kind_name(kind: Any) -> str:
    """A type in words."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(kind_name(argument) for argument in arguments)
    if origin is Literal:
        return " or ".join(f"`{argument}`" for argument in arguments)
    if origin is not None and issubclass(origin, Sequence):
        return f"a list of {_PLURALS.get(arguments[0]) or _many(arguments[0])}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return (
            "a mapping"
            if arguments[1] is Any
            else f"a mapping of {' to '.join(_PLURALS[argument] for argument in arguments)}"
        )
    return _NAMES.get(kind) or ("a function" if origin is not None else kind.__name__)


def _many(kind: Any) -> str:
    """Several values of a type that is no plain one, in words."""
    return "pairs of whole numbers" if get_origin(kind) is tuple else kind.__name__

"""How an engine is loaded: the settings of its models, what they share, and the keyword arguments of `Engine.load`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any, Concatenate, ParamSpec, TypeVar

from specdec_cli.call_checks import check_kind, checked_call, checked_fields
from specdec_cli.engine.options import EngineOptions
from specdec_cli.errors import UsageError
from specdec_cli.lm.cache.cache_plan import KVCacheBytes
from specdec_cli.lm.files.names import AUTO
from specdec_cli.lm.settings import ModelArguments
from specdec_cli.lm.settings import ModelSettings as ModelSettings  # engines' callers name it here
from specdec_cli.recipe.keys import check_ranges
from specdec_cli.recipe.schema import EngineSection
from specdec_cli.recipe.values import Compute, Decoder, LoadFormat, Quantize

LoadProgress = Callable[[str], None]
"""Called with a short description of each loading phase; its `count_bytes`, if it has one, with the bytes of a file."""
_DRAFT = "draft_"


def model_settings(model: Any) -> ModelSettings:
    """How a recipe's target or draft is loaded."""
    return ModelSettings(**{field.name: getattr(model, field.name) for field in fields(ModelSettings)})


@checked_fields
@dataclass(frozen=True, slots=True)
class LoadSettings:
    """Everything about loading that is not an engine option.

    Args:
        target: how the target is loaded.
        draft: how the draft is loaded.
        max_model_len: context limit, at most the target's own; None uses the model's.
        block_size: tokens per KV block.
        kv_cache_bytes: memory for each KV cache in bytes; None uses half of the free memory.
        decoder: auto (the built-in decoder on a CPU, CUDA graphs on a GPU, where they support the model), transformers,
            or graphs (CUDA graphs).
        generation_config: auto reads the target's generation_config.json; none ignores it; or a folder.
        chat_template: a file or template text that replaces the target's own; None keeps the target's.
        chat_variables: variables for every conversation's chat template, unless the conversation sets them itself.
        check: compare the logits of a few tokens with the unmodified transformers forward when a model is loaded.
        trust_remote_code: run code that comes with a checkpoint.
        others: draft methods without a model that requests may choose instead of the engine's draft: ngram, prediction.
        progress: called with a short description of each loading phase.
    """

    target: ModelSettings = field(default_factory=ModelSettings)
    draft: ModelSettings = field(default_factory=ModelSettings)
    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_bytes: KVCacheBytes = None
    decoder: Decoder = "auto"
    generation_config: str = AUTO
    chat_template: str | None = None
    chat_variables: Mapping[str, Any] | None = None
    check: bool = True
    trust_remote_code: bool = False
    others: tuple[str, ...] = ()
    progress: LoadProgress | None = None

    def __post_init__(self) -> None:
        """Refuse values out of range, each by its name."""
        check_ranges(self, EngineSection)
        if self.block_size < 1:
            raise UsageError(f"block_size is out of range: `{self.block_size}`", "it must be at least 1")
        if isinstance(self.kv_cache_bytes, int) and self.kv_cache_bytes < 1:
            raise UsageError(f"kv_cache_bytes is out of range: `{self.kv_cache_bytes}`", "it must be at least 1")


class LoadArguments(ModelArguments, total=False):
    """Types of the keyword arguments of `Engine.load`, for editors and type checkers.

    `load_parameters` has their defaults, from the data classes that they fill; a test compares both.
    """

    num_speculative_tokens: int
    verify: str
    synthetic_acceptance_rates: tuple[float, ...] | None
    depth_policy: str
    tree: str | None
    p_min: float
    k_by_batch: tuple[tuple[int, int], ...]
    k_by_context: tuple[tuple[int, int], ...]
    disable_by_batch_size: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk: int
    prefix_caching: bool
    max_model_len: int | None
    block_size: int
    kv_cache_bytes: KVCacheBytes
    decoder: Decoder
    generation_config: str
    chat_template: str | None
    chat_variables: Mapping[str, Any] | None
    check: bool
    trust_remote_code: bool
    others: tuple[str, ...]
    progress: LoadProgress | None
    draft_revision: str | None
    draft_dtype: str
    draft_device: str
    draft_load_format: LoadFormat
    draft_quantize: Quantize
    draft_compute: Compute


@dataclass(frozen=True, slots=True)
class LoadParameter:
    """One keyword argument of `Engine.load`: its name, and the field of a data class that it fills."""

    name: str
    field: Field[Any]
    owner: type

    @property
    def is_draft(self) -> bool:
        """Whether it says how the draft is loaded."""
        return self.owner is ModelSettings and self.name.startswith(_DRAFT)


def load_parameters() -> list[LoadParameter]:
    """Keyword arguments of `Engine.load`: the fields of EngineOptions, LoadSettings and, for each model, ModelSettings.

    Those of ModelSettings apply to the target; with the prefix `draft_` they apply to the draft.
    """
    owners = ((EngineOptions, ""), (LoadSettings, ""), (ModelSettings, ""), (ModelSettings, _DRAFT))
    return [
        LoadParameter(prefix + field.name, field, owner)
        for owner, prefix in owners
        for field in fields(owner)
        if field.name not in ("target", "draft")
    ]


def settle(
    changes: Mapping[str, Any], options: EngineOptions | None, settings: LoadSettings | None
) -> tuple[EngineOptions, LoadSettings]:
    """The engine's options and load settings with the given keyword arguments applied.

    Raises:
        UsageError: a value of another type or out of range.
    """
    check_kind("options", options, EngineOptions | None)
    check_kind("settings", settings, LoadSettings | None)
    options, settings = options or EngineOptions(), settings or LoadSettings()
    known = {parameter.name: parameter for parameter in load_parameters()}
    of_options, of_loading, of_target, of_draft = (
        {known[name].field.name: value for name, value in changes.items() if is_here(known[name])}
        for is_here in (
            lambda parameter: parameter.owner is EngineOptions,
            lambda parameter: parameter.owner is LoadSettings,
            lambda parameter: parameter.owner is ModelSettings and not parameter.is_draft,
            lambda parameter: parameter.is_draft,
        )
    )
    target = replace(settings.target, **of_target)
    try:
        draft = replace(settings.draft, **of_draft)
    except UsageError as error:
        raise UsageError(f"{_DRAFT}{error.message}", error.hint) from error
    return replace(options, **of_options), replace(settings, target=target, draft=draft, **of_loading)


F = TypeVar("F", bound=Callable[..., Any])


def takes_load_arguments(function: F) -> F:
    """Give a function that takes `**changes: Unpack[LoadArguments]` their signature, and refuse all other names.

    `help()`, notebooks and the reference pages then show every argument with its default.
    """
    shown = inspect.signature(function)
    own = [parameter for parameter in shown.parameters.values() if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    more = [
        inspect.Parameter(
            load.name, inspect.Parameter.KEYWORD_ONLY, default=_default(load.field), annotation=load.field.type
        )
        for load in load_parameters()
    ]
    function.__signature__ = shown.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
    return checked_call()(function)


P = ParamSpec("P")
T = TypeVar("T")


def loads_like(load: Callable[P, object]) -> Callable[[Callable[..., T]], Callable[Concatenate[Any, P], T]]:
    """Give a class method that passes its arguments on to another one that method's signature.

    Type checkers, `help()`, notebooks and the reference pages then show the same arguments for both.
    """

    def decorate(function: Callable[..., T]) -> Callable[Concatenate[Any, P], T]:
        own, shown = inspect.signature(function), inspect.signature(load)
        first = next(iter(own.parameters.values()))
        function.__signature__ = own.replace(parameters=[first, *shown.parameters.values()])  # type: ignore[attr-defined]
        return function

    return decorate


def _default(field: Field[Any]) -> Any:
    return field.default if field.default is not MISSING else inspect.Parameter.empty

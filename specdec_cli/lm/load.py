"""Load a language model or a tokenizer by name; every way in which that fails ends in one clear sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from specdec_cli.lm.files.names import AUTO
from specdec_cli.lm.plan import ModelPlan
from specdec_cli.lm.settings import ModelArguments, ModelSettings
from specdec_cli.lm.transformers_lm import CacheArguments, TransformersLM

if TYPE_CHECKING:
    from specdec_cli.lm.files.gguf_weights import Progress


class LMArguments(ModelArguments, CacheArguments, total=False):
    """Keyword arguments of `load_lm`: settings of the model, and the size of its cache."""


def load_lm(
    name: str,
    *,
    decoder: str = AUTO,
    generation_config: str = AUTO,
    trust_remote_code: bool = False,
    check: bool = True,
    progress: Progress | None = None,
    **arguments: Unpack[LMArguments],
) -> TransformersLM:
    """Load a causal LM: its plan, with settings and a cache by keyword arguments.

    Args:
        name: as ModelPlan takes it, like the next three.
        decoder: whose forward runs.
        generation_config: auto, none, or a folder.
        trust_remote_code: run Python code that comes with the model.
        check: as `ModelPlan.load` takes it, like `progress`.
        progress: told of bytes that are read.
        arguments: fields of ModelSettings, and what sizes the cache of TransformersLM.

    Raises:
        UsageError: a wrong option, or an architecture that cannot be a target or a draft.
        RunError: the model does not load.
    """
    cache: dict[str, Any] = dict(arguments)
    settings = ModelSettings(
        **{argument: cache.pop(argument) for argument in ModelArguments.__annotations__ if argument in cache}
    )
    plan = ModelPlan(name, settings, decoder, generation_config, trust_remote_code)
    return plan.load(check=check, progress=progress, **cache)


def load_tokenizer(name: str, *, trust_remote_code: bool = False, **settings: Unpack[ModelArguments]) -> Any:
    """Load a transformers tokenizer by the name of its model; where the weights are random, one stands in for none.

    Raises:
        RunError: there is none, or it is broken.
    """
    return ModelPlan(name, ModelSettings(**settings), trust_remote_code=trust_remote_code).tokenizer()

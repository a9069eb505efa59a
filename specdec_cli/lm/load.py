"""Load a language model by its plan or name; every way in which that fails ends in one clear sentence."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

import torch

from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.files import dummy
from specdec_cli.lm.files.checkpoint import clear_errors
from specdec_cli.lm.files.headers import first_dtype
from specdec_cli.lm.files.names import AUTO
from specdec_cli.lm.files.origin import Origin, fingerprint
from specdec_cli.lm.files.quantization import stays_quantized
from specdec_cli.lm.files.weights_files import all_files, weights_files
from specdec_cli.lm.forward.implementations import NAME
from specdec_cli.lm.int4_blocks import quantize_model
from specdec_cli.lm.llama.plain_modules import read_builtin_model
from specdec_cli.lm.load_memory import check_plan_room
from specdec_cli.lm.model_tokenizer import tokenizer_of
from specdec_cli.lm.oracle import Oracle, RoundingError
from specdec_cli.lm.plan import DTYPES, NATIVE, ModelPlan
from specdec_cli.lm.settings import ModelArguments, ModelSettings
from specdec_cli.lm.transformers_lm import CacheArguments, TransformersLM

if TYPE_CHECKING:
    from specdec_cli.lm.blocks_check import BlocksOracle
    from specdec_cli.lm.files.gguf_weights import Progress

_log = logging.getLogger(__name__)


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

    Raises:
        UsageError: a wrong option, or an architecture that cannot be a target or a draft.
        RunError: the model does not load.
    """
    cache: dict[str, Any] = dict(arguments)
    settings = ModelSettings(
        **{argument: cache.pop(argument) for argument in ModelArguments.__annotations__ if argument in cache}
    )
    plan = ModelPlan(name, settings, decoder, generation_config, trust_remote_code)
    return load_model(plan, check=check, progress=progress, **cache)


def load_tokenizer(name: str, *, trust_remote_code: bool = False, **settings: Unpack[ModelArguments]) -> Any:
    """Load a transformers tokenizer by the name of its model; where the weights are random, one stands in for none.

    Raises:
        RunError: there is none, or it is broken.
    """
    return tokenizer_of(ModelPlan(name, ModelSettings(**settings), trust_remote_code=trust_remote_code))


def load_model(
    plan: ModelPlan, *, check: bool = True, progress: Progress | None = None, **cache: Unpack[CacheArguments]
) -> TransformersLM:
    """Load a model by its plan.

    Args:
        plan: of the model.
        check: compare the logits of a few tokens with transformers' own forward (see lm.oracle).
        progress: told how many bytes of a GGUF file are packed or dequantized, and of how many.
        cache: what sizes its cache, as TransformersLM takes it.

    Raises:
        UsageError: an architecture that cannot be a target or a draft, or settings that do not fit it.
        RunError: the model does not load.
    """
    for obstacle in plan.obstacles:
        raise obstacle
    with clear_errors(plan.name), plan.quietly():
        check_plan_room(plan)
        model = read_model(plan, progress).to(plan.device).eval()
        oracle = _oracle(model, plan.is_in_blocks) if check else None
        quantized = None if plan.is_plain_torch else stays_quantized(plan.config)
        if quantized is not None and plan.settings.dtype != "auto" and model.dtype != plan.dtype:
            message = f"`{plan.name}` is quantized by `{quantized}` and runs in `{_word(model.dtype)}`"
            raise UsageError(f"{message}, not in `{plan.settings.dtype}`", "leave --dtype at auto")
        if isinstance(oracle, Oracle) and oracle.is_quantized:  # its dtype may be none that its kernels take
            oracle.check_reference(plan.name)
        lm = TransformersLM(
            model,
            plan.name,
            eos_token_ids=plan.eos_token_ids,
            decoder=plan.decoder,
            kind=plan.kind(model.dtype),
            **cache,
        )
        lm.generation, lm.origin = plan.generation, _origin(plan, lm.dtype)
        doubt = None if oracle is None else _doubt(oracle, lm)
    if doubt is None:
        return lm
    del model, lm  # float32 takes their memory
    in_float32 = replace(plan, settings=replace(plan.settings, dtype="float32"))
    try:
        lm = load_model(in_float32, check=check, progress=progress, **cache)
    except RunError as error:
        raise doubt from error
    _log.warning("%s: float32 agrees with it, so `%s` runs in float32", doubt.message, plan.name)
    return lm


def read_model(plan: ModelPlan, progress: Progress | None) -> Any:
    """The modules with their weights, which the decoder makes blocks of 4 bits of if it is asked to."""
    if plan.settings.quantize != "int4":
        return _model_as_stored(plan, progress)
    stored = None
    if plan.is_mapped and not plan.is_plain_torch:
        stored = first_dtype([plan.folder / file for file in weights_files(plan.name, plan.folder)])
    model = _model_as_stored(plan, progress, DTYPES.get(stored or ""))
    return quantize_model(plan.name, model, plan.dtype)


def _model_as_stored(plan: ModelPlan, progress: Progress | None, dtype: torch.dtype | None = None) -> Any:
    """The modules with their weights: the built-in pair's, a GGUF file's blocks, random or plain numbers."""
    if plan.is_plain_torch:
        plan.config._attn_implementation = NAME
    if plan.is_plain_torch and plan.header is None:
        return read_builtin_model(plan.folder, plan.config, plan.dtype)
    if plan.is_native and plan.header is not None:
        from specdec_cli.lm.gguf_blocks import model_in_blocks

        return model_in_blocks(plan.name, plan.header, plan.outline, plan.dtype, progress)
    if plan.is_native:
        from specdec_cli.lm.integer_blocks import model_of_integers

        return model_of_integers(plan, plan.integers)
    from specdec_cli.lm.from_files import model_from_files, registered_attention

    if plan.is_dummy:
        attention = registered_attention(plan.config)
        return dummy.build(plan.name, plan.config, plan.dtype, plan.device, attention, plan.trust_remote_code)
    return model_from_files(plan, dtype=dtype, progress=progress)


def _origin(plan: ModelPlan, dtype: torch.dtype) -> Origin:
    files = None if plan.is_dummy else all_files(plan.name, plan.folder)
    weights = None if files is None else fingerprint(plan.checkpoint.config_bytes, plan.folder, files)
    kept_as = NATIVE if plan.is_native else plan.settings.quantize
    return Origin(plan.name, plan.settings.revision, _word(dtype), kept_as, weights)


def _oracle(model: Any, is_in_blocks: bool) -> Oracle | BlocksOracle:
    if not is_in_blocks:
        return Oracle(model)
    from specdec_cli.lm.blocks_check import BlocksOracle

    return BlocksOracle(model)


def _doubt(oracle: Oracle | BlocksOracle, lm: TransformersLM) -> RoundingError | None:
    """Check a model; what only float32 can judge."""
    try:
        oracle.check(lm)
    except RoundingError as error:
        return error.with_traceback(None)  # whose frames hold the model
    return None


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

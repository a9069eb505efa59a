"""Faults of a model's files and settings, which keep it from running, and limits of it as a target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from specdec_cli.errors import SpecdecError, UsageError
from specdec_cli.lm.decoders import check_decoder, own_obstacle
from specdec_cli.lm.door import Tap
from specdec_cli.lm.files.adapter import check_adapter
from specdec_cli.lm.files.architecture import check_architecture
from specdec_cli.lm.files.checkpoint import clear_errors
from specdec_cli.lm.files.lengths import max_context, own_context
from specdec_cli.lm.files.quantization import check_quantization, stays_quantized
from specdec_cli.lm.forward.taps import check_taps
from specdec_cli.lm.self_draft import SelfDraft

if TYPE_CHECKING:
    from specdec_cli.lm.plan import ModelPlan


def faults_of(plan: ModelPlan) -> tuple[SpecdecError, ...]:
    """Errors of a model or its settings on any machine, in the order in which loading raises them."""
    first: list[Callable[[], object]] = [lambda: plan.folder, lambda: _check_architecture(plan)]
    first += [lambda: plan.is_complete, lambda: plan.dtype]
    checks = (_check_decoder, _check_quantization, _check_int4, _check_gguf, _check_adapter)
    more: list[Callable[[], object]] = [partial(check, plan) for check in checks]
    more += [lambda: plan.is_native, lambda: plan.generation]
    faults = raised_by(plan, first, stops=True)
    return tuple(faults or raised_by(plan, more))


def raised_by(plan: ModelPlan, checks: Sequence[Callable[[], object]], *, stops: bool = False) -> list[SpecdecError]:
    """Errors of a plan's checks; with `stops`, the first one alone."""
    raised: list[SpecdecError] = []
    for check in checks:
        try:
            with clear_errors(plan.name), plan.quietly():
                check()
        except SpecdecError as error:
            raised.append(error.with_traceback(None))  # whose frames may hold a model
            if stops:
                break
    return raised


def _check_architecture(plan: ModelPlan) -> None:
    if not plan.is_plain_torch:
        check_architecture(plan.name, plan.config, plan.trust_remote_code)


def _check_decoder(plan: ModelPlan) -> None:
    if not plan.is_plain_torch:
        check_decoder(plan.name, plan.decoder, plan.config, plan.device)


def _check_quantization(plan: ModelPlan) -> None:
    if not plan.is_dummy and not plan.is_plain_torch:
        its_folder = plan.folder if plan.is_complete else None
        check_quantization(plan.name, plan.stored_config, its_folder, plan.settings.quantize)


def _check_int4(plan: ModelPlan) -> None:
    if plan.settings.quantize != "int4" or plan.is_plain_torch:
        return
    obstacle = own_obstacle(plan.outline, plan.decoder, plan.device)
    if obstacle is not None:
        message = f"`{plan.name}` cannot be quantized to int4, which takes our own decoder: {obstacle}"
        raise UsageError(message, "set quantize to int8 or none")


def _check_gguf(plan: ModelPlan) -> None:
    if plan.header is not None:
        from specdec_cli.lm.files.gguf_tensors import check_gguf_tensors

        check_gguf_tensors(plan.name, plan.header, plan.outline)


def _check_adapter(plan: ModelPlan) -> None:
    if plan.is_complete and not plan.is_plain_torch:
        check_adapter(plan.name, plan.folder, stays_quantized(plan.config))


def check_target(
    plan: ModelPlan, max_model_len: int | None, taps: Sequence[Tap] = (), drafts: Sequence[SelfDraft] = ()
) -> None:
    """Refuse what the model cannot give as a target, before its weights are read.

    Raises:
        UsageError: a limit that is longer than its own, hidden states that it has not, a draft with all its
            layers, or a model that is a draft itself.
        RunError: the model's configuration cannot be read.
    """
    if plan.drafted_tokens is not None:
        message = f"`{plan.name}` is a draft: it has only {len(plan.drafted_tokens)} of its tokenizer's tokens"
        raise UsageError(message, f"name it as one: --draft {plan.name}")
    if max_model_len is None and not taps and not drafts:
        return
    with clear_errors(plan.name), plan.quietly():
        config = plan.text_config
    own = own_context(config)
    if own is not None and max_model_len is not None and max_model_len > own:
        raise UsageError(
            f"max_model_len is `{max_model_len}`, and `{plan.name}` reads `{own}` tokens at most",
            f"lower --max-model-len (engine.max_model_len) to {own}, or leave it out",
        )
    check_taps(plan.name, taps, config, max_context(config, max_model_len))
    for draft in drafts:
        draft.check(plan.name, config.num_hidden_layers)

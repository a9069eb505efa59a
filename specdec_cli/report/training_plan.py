"""The plan of a training run (`train-draft --dry-run`): its size in lines of text, and its JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specdec_cli.report.train import duration

if TYPE_CHECKING:
    from specdec_cli.measure.machine.roofline import Speed
    from specdec_cli.train.plan import TrainingPlan

_USES = {
    "target": "target",
    "draft": "draft",
    "gradients": "gradients",
    "optimizer": "AdamW",
    "frozen": "copies of the target's layers",
    "hidden_states": "hidden states",
    "logits": "logits of a batch",
    "checkpoints": "checkpoints",
}


def plan_document(plan: TrainingPlan, speed: Speed | None) -> dict[str, Any]:
    """The JSON form.

    Args:
        plan: of the run.
        speed: of the device; None leaves the times out.
    """
    rates = {name: getattr(speed, name, None) for name in ("flops_per_second", "bytes_per_second")}
    times = dict(zip(("answer_seconds", "step_seconds"), _seconds(plan, speed), strict=True))
    return plan.as_dict() | rates | times


def plan_lines(plan: TrainingPlan, speed: Speed | None) -> list[str]:
    """Lines of text: tokens, parameters, memory, disk and time.

    Args:
        plan: of the run.
        speed: of the device; None has no time.
    """
    answers, steps = _seconds(plan, speed)
    lines = [
        f"tokens: {plan.num_prompt_tokens} of prompts, {plan.num_answer_tokens} of answers at most",
        f"parameters: {_millions(plan.num_trained)} trained, {_millions(plan.num_target)} in the target",
        f"memory: {_sizes(plan.memory_bytes)}; an estimate without activations and the engine's KV cache",
        f"disk: {_sizes(plan.disk_bytes)}",
    ]
    if speed is None or answers is None or steps is None:
        return [*lines, "time: not known, because the device is not here"]
    rates = f"{speed.flops_per_second / 1e9:.0f} GFLOP/s and {speed.bytes_per_second / 1e9:.0f} GB/s"
    told = f"{duration(answers)} for the answers, {duration(steps)} for the steps" if answers else duration(steps)
    what = f"{plan.operations + plan.answer_operations:.1e} operations at the {rates} that this machine reaches"
    return [*lines, f"time: at least {told}; an estimate by {what} in float32, without loading and evaluations"]


def _seconds(plan: TrainingPlan, speed: Speed | None) -> tuple[float | None, float | None]:
    """Seconds for the answers and for the steps."""
    if speed is None:
        return None, None
    answers = max(plan.answer_bytes / speed.bytes_per_second, plan.answer_operations / speed.flops_per_second)
    return answers, plan.operations / speed.flops_per_second


def _sizes(sizes: Mapping[str, int]) -> str:
    """`21.0 GB (target 16.0, draft 5.0)`."""
    unit, name = (1e9, "GB") if sum(sizes.values()) >= 1e9 else (1e6, "MB")
    parts = ", ".join(f"{_USES[use]} {size / unit:.1f}" for use, size in sizes.items() if size)
    return f"{sum(sizes.values()) / unit:.1f} {name} ({parts})"


def _millions(num: int) -> str:
    return f"{num / 1e6:.1f} M" if num < 1e9 else f"{num / 1e9:.2f} B"

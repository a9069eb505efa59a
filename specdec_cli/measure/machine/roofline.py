"""The roofline: what a step must move and compute, against what this machine moved and computed in the same run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

from specdec_cli.document import Count, Seconds

if TYPE_CHECKING:
    import torch

    from specdec_cli.lm.traffic import Traffic

_SMALLEST, _LARGEST = 1 << 20, 1 << 30
_SECONDS = 0.4


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One kind of step, as measured.

    Args:
        num_sequences: mean number of sequences in a step.
        num_tokens: mean number of tokens that the target is fed in a step.
        context: mean context of a sequence, in tokens.
        seconds: of a step, without the draft's part.
    """

    num_sequences: float
    num_tokens: float
    context: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Roof:
    """One kind of step against the roofline; `floor_seconds` is the least that it could take."""

    tokens_per_step: Seconds
    bytes_per_step: Seconds
    flops_per_step: Seconds
    flops_per_byte: Seconds
    bound: Literal["memory", "compute"]
    floor_seconds: Seconds
    seconds_per_step: Seconds
    fraction: Seconds | None


@dataclass(frozen=True, slots=True)
class Roofline:
    """The machine's bandwidth and arithmetic, and both kinds of step against them.

    Args:
        bandwidth_bytes_per_second: reading the same bytes again and again.
        bandwidth_measured_over_bytes: how many; a small model's weights fit the caches, and so do these.
        flops_per_second: of a large matrix product in the target's dtype.
        ridge_flops_per_byte: above which a step is bound by arithmetic.
        plain: a step without a draft; None where none was measured.
        verify: the same for a step that verifies.
    """

    bandwidth_bytes_per_second: Seconds
    bandwidth_measured_over_bytes: Count
    flops_per_second: Seconds
    ridge_flops_per_byte: Seconds
    plain: Roof | None = None
    verify: Roof | None = None


def measure_speed(device: torch.device, dtype: torch.dtype, num_bytes: float) -> Roofline:
    """Measure reading and multiplying, for about a second; no step is set against it yet.

    Args:
        device: the target's.
        dtype: of the product.
        num_bytes: what a step moves; between 1 MiB and 1 GiB, or an eighth of the free memory, of it is read.
    """
    import torch

    from specdec_cli.lm.machine.device_memory import device_memory

    size = int(max(_SMALLEST, min(num_bytes, _LARGEST, device_memory(device).free_bytes // 8)))
    buffer = torch.ones(size // 4, dtype=torch.float32, device=device)
    reading = _best(lambda: buffer.sum(), device)
    side = 4096 if device.type == "cuda" else 1024
    left, right = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    multiplying = _best(lambda: left @ right, device)
    bandwidth, flops_per_second = size / reading, 2 * side**3 / multiplying
    return Roofline(bandwidth, size, flops_per_second, flops_per_second / bandwidth)


def _best(work: Any, device: torch.device) -> float:
    """Seconds of the fastest of several runs: a roof is what the machine can do."""
    import torch

    fastest, end = float("inf"), perf_counter() + _SECONDS
    with torch.inference_mode():
        work()
        for count in range(10_000):
            if count >= 5 and perf_counter() > end:
                break
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            begin = perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            fastest = min(fastest, perf_counter() - begin)
    return fastest


def roofline(traffic: Traffic, machine: Roofline, plain: MeasuredStep | None, verify: MeasuredStep | None) -> Roofline:
    """Set a target's plain steps and verification against the machine; None is a step that was not measured."""
    return replace(machine, plain=_roof(traffic, machine, plain), verify=_roof(traffic, machine, verify))


def _roof(traffic: Traffic, machine: Roofline, load: MeasuredStep | None) -> Roof | None:
    if load is None:
        return None
    moved = traffic.bytes_moved(load.num_tokens, load.num_sequences * load.context)
    flops = traffic.flops(load.num_tokens, load.context)
    memory_seconds, compute_seconds = moved / machine.bandwidth_bytes_per_second, flops / machine.flops_per_second
    floor = max(memory_seconds, compute_seconds)
    return Roof(
        tokens_per_step=load.num_tokens,
        bytes_per_step=moved,
        flops_per_step=flops,
        flops_per_byte=flops / moved,
        bound="memory" if memory_seconds >= compute_seconds else "compute",
        floor_seconds=floor,
        seconds_per_step=load.seconds,
        fraction=floor / load.seconds if load.seconds > 0 else None,
    )

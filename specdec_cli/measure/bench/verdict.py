"""The verdict of a benchmark in sentences: faster or not, how sure, and why speculation was slower."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from specdec_cli.document import Interval
from specdec_cli.measure.bench.bench import Bench
from specdec_cli.measure.bench.passes import Track
from specdec_cli.measure.bench.step_split import StepSplit, costs_of
from specdec_cli.measure.machine.roofline import MeasuredStep, Roofline, measure_speed, roofline
from specdec_cli.measure.stats import ENOUGH_PAIRS, MIN_PAIRS

if TYPE_CHECKING:
    from specdec_cli.lm.door import LM


def load_of(track: Track) -> MeasuredStep | None:
    """The target's work in a step of an arm; None without a step."""
    counts = track.counts()
    if not track.num_steps:
        return None
    num_sequences = counts.num_steps / track.num_steps
    lengths = [
        len(request.token_ids) + num / 2
        for pass_ in track.passes
        for request, num in zip(pass_.group.requests, pass_.run.lengths, strict=True)
    ]
    return MeasuredStep(
        num_sequences=num_sequences,
        num_tokens=num_sequences + counts.num_draft_tokens / track.num_steps,
        context=sum(lengths) / len(lengths),
        seconds=(counts.verify_seconds + counts.overhead_seconds) / track.num_steps,
    )


def measure_roofline(bench: Bench, target: LM) -> Roofline | None:
    """Measure the machine and set both kinds of step against it; None where the target's sizes are not known."""
    traffic, plain = target.traffic, load_of(bench.plain)
    if traffic is None:
        return None
    num_bytes = traffic.bytes_moved(plain.num_tokens, plain.num_sequences * plain.context) if plain else 0
    speed = measure_speed(target.device, target.dtype, num_bytes)
    return roofline(traffic, speed, plain, load_of(bench.draft))


def sentences(bench: Bench, busy: str | None = None) -> list[str]:
    """The findings, with advice only if it is certain.

    Args:
        bench: after its run.
        busy: that the machine was busy, in words, or None.
    """
    decode = bench.speedup("decode")
    if decode is None:
        return ["Nothing was measured: no prompt decoded a second token in both arms."]
    if busy is not None:
        return [f"Inconclusive: {busy}. Decoding was {_times(decode)} with the draft; measure on a quiet machine."]
    findings = [_headline(decode, "decoding")]
    latency = bench.speedup("latency")
    if latency is not None and _direction(latency) != _direction(decode):
        findings.append(_headline(latency, "from a prompt's arrival to its end, it"))
    if bench.efficiency is not None:
        findings.append(
            f"Efficiency {bench.efficiency:.2f}: a step gives {bench.tokens_per_step:.2f} tokens, and the speed-up is "
            f"{decode.median:.2f}."
        )
    costs = costs_of(bench.draft, bench.plain)
    if _direction(decode) < 0 and costs is not None:
        findings += _why(costs)
    for name, track in bench.against.items():
        against = bench.speedup("decode", against=track)
        if against is not None:
            findings.append(f"Against {name}: {_times(against)}.")
    return findings


def _direction(speedup: Interval) -> int:
    """1 for surely faster, -1 for surely slower; fewer pairs than an interval of 95 % takes are never sure."""
    if speedup.pairs < ENOUGH_PAIRS:
        return 0
    return int(speedup.is_above(1)) - int(speedup.is_below(1))


def _headline(speedup: Interval, what: str) -> str:
    what = what[0].upper() + what[1:]
    if speedup.ci95 is None:
        pairs = "a single pair" if speedup.pairs == 1 else f"{speedup.pairs} pairs"
        return (
            f"{what} is {speedup.median:.2f} times as fast with the draft, from {pairs}; "
            f"an interval takes {MIN_PAIRS}: raise --num-prompts."
        )
    if speedup.pairs < ENOUGH_PAIRS:
        return (
            f"{what} is {_times(speedup)} with the draft, from {speedup.pairs} pairs, which are too few to be sure; "
            f"it takes {ENOUGH_PAIRS}: raise --num-prompts."
        )
    if _direction(speedup):
        verb = "is faster" if speedup.is_above(1) else "is slower"
        return f"{what} {verb} with the draft: {_times(speedup)}."
    return (
        f"No significant difference: {what[0].lower()}{what[1:]} is {_times(speedup)} with the draft, "
        "and that interval holds 1; more prompts or repeats narrow it."
    )


def _times(speedup: Interval) -> str:
    if speedup.ci95 is None:
        return f"{speedup.median:.2f} times as fast"
    return f"{speedup.median:.2f} times as fast (95 %: {speedup.ci95[0]:.2f} to {speedup.ci95[1]:.2f})"


def _why(costs: StepSplit) -> Iterator[str]:
    """Why speculation was slower: the costs of a step in plain steps, and the largest of them."""
    plain = costs.plain_step_seconds
    yield (
        f"A step with the draft gives {costs.tokens_per_step:.2f} tokens and costs "
        f"{costs.breakeven_tokens_per_step:.2f} plain steps: drafting {costs.draft_seconds_per_step / plain:.2f}, "
        f"verification {costs.verify_seconds_per_step / plain:.2f} ({costs.verify_cost_ratio:.2f} times a plain "
        f"forward), the rest {costs.overhead_seconds_per_step / plain:.2f}."
    )
    most = costs.drafted_per_step + 1
    if costs.speedup_with_free_draft > 1.0:
        yield (
            f"The draft costs too much: if it were free, the speed-up would be {costs.speedup_with_free_draft:.2f}; "
            "a smaller draft, a smaller k or `--draft ngram` may pay."
        )
    elif costs.overhead_seconds_per_step > max(costs.draft_seconds_per_step, costs.verify_seconds_per_step):
        yield (
            "The largest part is neither the draft nor the target but what the engine does around them: a model this "
            "small leaves a draft nothing to gain."
        )
    elif costs.breakeven_tokens_per_step < most:
        yield (
            f"Too few tokens are accepted: {costs.breakeven_tokens_per_step:.2f} tokens per step would break even, and "
            f"{most:.2f} are possible; a draft that agrees more often may pay, and so may a smaller k."
        )
    else:
        yield (
            f"No draft pays at this k: even if all {costs.drafted_per_step:.2f} drafted tokens were accepted, a step "
            f"would cost more plain steps ({costs.breakeven_tokens_per_step:.2f}) than it gives tokens."
        )

"""Histograms as plain numbers, and the ones that the server keeps."""

from __future__ import annotations

from bisect import bisect_left

TIMES = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
INTERVALS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0),
)
COUNTS = tuple(float(mantissa * 10**exponent) for exponent in range(6) for mantissa in (1, 2, 5))
STEP_TOKENS = (1.0, *(float(2**exponent) for exponent in range(3, 15)))

HISTOGRAMS: dict[str, tuple[tuple[float, ...], str]] = {
    "time_to_first_token_seconds": (TIMES, "Seconds from a request's arrival to its first token."),
    "inter_token_latency_seconds": (INTERVALS, "Seconds between a request's outputs; one may be several tokens."),
    "request_time_per_output_token_seconds": (INTERVALS, "A finished request's seconds per token after its first."),
    "e2e_request_latency_seconds": (TIMES, "Seconds from a request's arrival to its end."),
    "request_queue_time_seconds": (TIMES, "Seconds that a request waited to be scheduled."),
    "request_inference_time_seconds": (TIMES, "Seconds from a request's scheduling to its last token."),
    "request_prefill_time_seconds": (TIMES, "Seconds from a request's scheduling to its first token."),
    "request_decode_time_seconds": (TIMES, "Seconds from a request's first token to its last."),
    "request_prompt_tokens": (COUNTS, "Prompt tokens of a finished request."),
    "request_generation_tokens": (COUNTS, "Generated tokens of a finished request."),
    "iteration_tokens_total": (STEP_TOKENS, "Tokens of a step: prompt tokens fed and tokens generated."),
}


class Histogram:
    """Counts of values by the smallest bound that holds them.

    Args:
        bounds: upper bounds, rising; what is above the last one is counted too.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Prometheus' buckets: each bound as text and how many values are at or under it."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            buckets.append((bound, total))
        return buckets

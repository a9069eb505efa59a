"""Seconds of requests: to the first token, from there to the last, and in all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Timing:
    """Seconds of a request: to its first token, from there to its last, and in all. Documents hold it as it is."""

    ttft_s: float | None = None
    decode_s: float | None = None
    total_s: float | None = None
    decode_tokens_per_second: float | None = None

    def as_dict(self) -> dict[str, float | None]:
        """The JSON form."""
        return asdict(self)


def timing_of(begin: float, first: float, last: float, num_decoded: int) -> Timing:
    """Timing from the moments of queueing, first and last token, and the number of tokens after the first."""
    decode = last - first
    return Timing(first - begin, decode, last - begin, _rate(num_decoded, decode))


def joined_timing(timings: Sequence[Timing], ttft_s: float | None, num_decoded: int) -> Timing:
    """Several timings as one: their seconds added up.

    Args:
        timings: one after the other.
        ttft_s: what stands for their times to a first token.
        num_decoded: tokens after the first ones, of all together.
    """
    decode = sum(timing.decode_s or 0.0 for timing in timings)
    return Timing(ttft_s, decode, sum(timing.total_s or 0.0 for timing in timings), _rate(num_decoded, decode))


def _rate(num_decoded: int, seconds: float) -> float | None:
    return num_decoded / seconds if num_decoded and seconds > 0 else None

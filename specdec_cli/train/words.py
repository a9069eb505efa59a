"""Numbers with their nouns and units, as messages about a run say them."""

from __future__ import annotations

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def counted(num: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{num} {noun}" if num == 1 else f"{num} {noun}s"


def sized(num_bytes: float) -> str:
    """`12.4 GB`, `160.0 MB`, `9.7 kB`."""
    size, unit = next(((size, unit) for size, unit in _UNITS if num_bytes >= size), _UNITS[-1])
    return f"{num_bytes / size:.1f} {unit}"

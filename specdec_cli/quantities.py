"""Numbers with their nouns and units, as messages and reports show them."""

from __future__ import annotations


def counted(num: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{num} {noun}" if num == 1 else f"{num} {noun}s"


def sized(num_bytes: float) -> str:
    """`12.42 GB`, `160.0 MB`, `9.7 kB`, `0`."""
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.2f} GB"
    if num_bytes >= 1e5:
        return f"{num_bytes / 1e6:.1f} MB"
    return f"{num_bytes / 1e3:.1f} kB" if num_bytes else "0"


def in_millions(num: int) -> str:
    """A number of parameters: `1.54 B`, `135.0 M`, `9.2 K`."""
    if num >= 1e9:
        return f"{num / 1e9:.2f} B"
    return f"{num / 1e6:.1f} M" if num >= 1e6 else f"{num / 1e3:.1f} K"

"""Numbers with their nouns, as messages about a run say them."""

from __future__ import annotations


def counted(num: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{num} {noun}" if num == 1 else f"{num} {noun}s"

"""Parameters of which only some run by default; the rest are marked slow."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly_slow(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Parameters in their order; those that are not among the quick ones are marked slow."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]

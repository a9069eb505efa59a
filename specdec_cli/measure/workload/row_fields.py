"""Fields of a row besides its prompt: a name, a length, a seed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from specdec_cli.errors import UsageError
from specdec_cli.sampling.params import settled_seed

ID_COLUMNS = ("id", "question_id", "prompt_id", "task_id")


def id_of(values: Mapping[str, Any], where: str) -> str | int | None:
    """A row's own name.

    Raises:
        UsageError: a value that names nothing.
    """
    name = next((name for name in ID_COLUMNS if values.get(name) is not None), None)
    if name is None:
        return None
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UsageError(f"{where}: `{name}` must be a string or an integer, not `{_shown(value)}`")
    return str(value) if isinstance(value, float) else value


def length_of(values: Mapping[str, Any], where: str) -> int | None:
    """A row's own most new tokens."""
    return _whole_number(values, "max_new_tokens", where, "an integer of at least 1", lambda n: n > 0)


def _whole_number(
    values: Mapping[str, Any], name: str, where: str, wanted: str, is_fine: Callable[[int], bool]
) -> int | None:
    value = values.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not is_fine(value):
        raise UsageError(f"{where}: `{name}` must be {wanted}, not `{_shown(value)}`")
    return value


def seed_of(values: Mapping[str, Any], where: str) -> int | None:
    """A row's seed, drawn for a negative one; a column of that name with words in it is none."""
    if is_words(values.get("seed")):
        return None
    seed = _whole_number(values, "seed", where, "an integer below 2^63", lambda n: abs(n) < 2**63)
    return None if seed is None else settled_seed(seed)


def is_words(value: Any) -> bool:
    """Whether a column `seed` holds what a text grew from, not a number."""
    return isinstance(value, str) and not re.fullmatch(r"\s*[-+]?[\d.]*\s*", value)


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)[:60]

"""Figures beside a result: one that cannot be computed is named with its reason, and costs no result."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pydantic import ValidationError

from specdec_cli.errors import SpecdecError

_Figure = TypeVar("_Figure")


def figure(what: str, compute: Callable[[], _Figure], missing: list[str]) -> _Figure | None:
    """Compute a figure from a measurement, or note that it is missing.

    Args:
        what: its name, as a sentence begins: `the roofline`.
        compute: works it out.
        missing: gets a sentence where that fails.

    Returns:
        The figure, or None where it cannot be computed.
    """
    try:
        return compute()
    except ValidationError as error:  # of a model that reads it
        message = error.errors()[0]["msg"]
    except Exception as error:  # whatever it fails at, the result was measured and is printed
        message = error.message if isinstance(error, SpecdecError) else f"{type(error).__name__}: {error}"
    missing.append(f"{what} is missing, it could not be computed: {message.splitlines()[0].rstrip('.')}")
    return None

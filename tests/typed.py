"""What a test says to the type checker: that something is there, and that a toy stands where the real thing belongs."""

from typing import Any, TypeVar

T = TypeVar("T")


def not_none(value: T | None) -> T:
    """The value itself; the test fails here when there is none."""
    assert value is not None
    return value


def stand_in(value: Any) -> Any:
    """A toy or a planted fault, in the place of what its type does not match."""
    return value

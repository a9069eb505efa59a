"""Faults planted in the source of our own decoder, which is then compiled with them."""

import pytest

from specdec_cli.lm.llama import native

FAULTS = {
    "a query sees the token behind it": (
        "count = rows[(first + q) / groups].position + 1",
        "count = rows[(first + q) / groups].position + 2",
    ),
    "a row is another one in company": (
        "write<ADDS>(Kind::values",
        "write<ADDS>((n > 1 ? 1.0001f : 1.0f) * Kind::values",
    ),
}


def plant(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Have every decoder that is made from now on run with a fault."""
    source = native.SOURCE.read_text()
    assert source.count(FAULTS[fault][0]) == 1
    library = native.load(source.replace(*FAULTS[fault]))
    monkeypatch.setattr(native, "library", lambda: library)

"""What the commands' tests share."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def collected_again() -> Iterator[None]:
    """Measuring commands leave what lives out of collections; a process of many tests must not."""
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_progress_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not add lines to what a test reads; a test of these lines sets its own pause."""
    monkeypatch.setattr("specdec_cli.report.pace.SECONDS_BETWEEN_LINES", 1e6)

"""What the commands' tests share."""

import pytest


@pytest.fixture(autouse=True)
def collections_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring commands leave what lives out of collections, which takes 0.3 s; a process of many tests must not."""
    monkeypatch.setattr("specdec_cli.engine.garbage.leave_alone", lambda: None)


@pytest.fixture(autouse=True)
def no_progress_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not add lines to what a test reads; a test of these lines sets its own pause."""
    monkeypatch.setattr("specdec_cli.report.pace.SECONDS_BETWEEN_LINES", 1e6)


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step costs here need not be known well: a few of each kind do."""
    monkeypatch.setattr("specdec_cli.measure.predict.profiling._MOST_STEPS", 3)


@pytest.fixture(autouse=True)
def quick_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that have counted an answer a moment after it is out."""
    monkeypatch.setattr("specdec_cli.measure.endpoint.counters._SETTLE_SECONDS", 0.01)

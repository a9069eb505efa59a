"""Lines about what is being waited for where no live area can be drawn."""

import io
from time import sleep

import pytest
from rich.console import Console

from specdec_cli.cli.screen import open_screen, progress
from specdec_cli.measure.bench.bench import Progress
from specdec_cli.report import pace
from specdec_cli.report.bench import BenchView


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(pace, "SECONDS_BETWEEN_LINES", 0.02)


def test_a_long_load_says_what_it_does_and_for_how_long(capsys):
    with progress(open_screen(False, streams_text=False)) as say:
        say("loading the target")
        sleep(0.3)
    assert "loading the target (0 s elapsed)" in capsys.readouterr().err


def test_a_quiet_run_has_no_lines(capsys):
    with progress(open_screen(True, streams_text=False)) as say:
        say("loading the target")
        sleep(0.1)
    assert capsys.readouterr().err == ""


def test_passes_have_elapsed_and_remaining_time():
    said: list[str] = []
    view = BenchView(Console(file=io.StringIO()), is_live=False, table=lambda _: "", say=said.append)
    sleep(0.05)
    view.show(None, Progress(arm="plain", done=1, total=4))
    assert said == ["1 of 4 passes, 0 s elapsed, about 0 s left; next: plain"]


@pytest.mark.parametrize(
    ("done", "total", "words"),
    [(0, 4, "100 s"), (1, 4, "2 min elapsed, about 5 min left"), (4, 4, "2 min elapsed"), (1, 100, "2.8 h left")],
)
def test_the_remaining_time(done: int, total: int, words: str, monkeypatch):
    one = pace.Pace()
    monkeypatch.setattr(pace, "perf_counter", lambda: one._begin + 100)
    assert words.replace("100 s", "2 min elapsed") in one.words(done, total)

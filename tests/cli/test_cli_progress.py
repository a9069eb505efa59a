"""Lines about what is being waited for where no live area can be drawn."""

import io
import json
import re
from pathlib import Path
from time import sleep

import pytest
from fake_server import Fake, serving
from rich.console import Console
from toy_engine import LetterTokenizer, toy_engine
from typed import stand_in

from specdec_cli.cli.main import run
from specdec_cli.cli.screen import open_screen, progress, timed_progress
from specdec_cli.engine.decoding import Decoding, Request, decode
from specdec_cli.engine.prompts import rows_of
from specdec_cli.measure.bench.bench import Progress
from specdec_cli.report import pace
from specdec_cli.report.bench import BenchView
from specdec_cli.report.view import RunView, Screen
from specdec_cli.sampling.params import SamplingParams


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "SECONDS_BETWEEN_LINES", 0.02)


@pytest.mark.parametrize("progress", [progress, timed_progress])
def test_long_work_says_what_it_does_and_for_how_long(capsys: pytest.CaptureFixture[str], progress) -> None:
    with progress(open_screen(False, streams_text=False)) as say:
        say("loading the target")
        sleep(0.3)
    assert "loading the target (0 s elapsed)" in capsys.readouterr().err


def test_a_quiet_run_has_no_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(open_screen(True, streams_text=False)) as say:
        say("loading the target")
        sleep(0.1)
    assert capsys.readouterr().err == ""


def test_passes_have_elapsed_and_remaining_time() -> None:
    said: list[str] = []
    view = BenchView(Console(file=io.StringIO()), is_live=False, table=lambda _: "", say=said.append)
    sleep(0.05)
    view.show(stand_in(None), Progress(arm="plain", done=1, total=4))
    assert said == ["1 of 4 passes, 0 s elapsed, about 0 s left; next: plain"]


def test_phases_have_counts_shares_and_their_own_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(pace, "perf_counter", lambda: now[0])
    waiting = pace.Waiting()
    now[0] += 30
    waiting("tracing the target", 0, 8)
    now[0] += 10
    waiting("tracing the target", 2, 8)
    assert waiting.words() == "tracing the target: 2 of 8 (40 s elapsed, about 30 s left)"
    waiting("answers", 600, 1000)  # of a run that continues
    now[0] += 10
    waiting("answers", 700, 1000)
    assert waiting.words() == "answers: 700 of 1000 (50 s elapsed, about 30 s left)"
    waiting("measuring the costs of steps")
    now[0] += 6
    waiting("measuring the costs of steps", 0.4, 1)
    assert waiting.words() == "measuring the costs of steps: 40% (56 s elapsed, about 9 s left)"


def test_49_4_bytes_are_a_bar_on_a_terminal_and_words_elsewhere() -> None:
    waiting = pace.Waiting()
    waiting("loading target model.gguf")
    waiting.count_bytes(123e6, 492e6)
    assert waiting.words() == "loading target model.gguf: 123 of 492 MB (0 s elapsed, about 0 s left)"
    bar = waiting.__rich__()
    assert bar.plain == "━" * 20 + f" {waiting.words()}"
    assert [(span.start, span.end) for span in bar.spans if span.style == "cyan"] == [(0, 5)]
    waiting.count_bytes(492e6, 492e6)
    assert waiting.words() == "loading target model.gguf: 492 of 492 MB, preparing the model (0 s elapsed)"
    waiting("loading draft small")
    assert waiting.__rich__().plain == "loading draft small (0 s elapsed)"


@pytest.mark.parametrize("streams_text", [True, False])
@pytest.mark.parametrize("is_shared", [True, False])
def test_generate_says_how_far_it_is(streams_text: bool, is_shared: bool) -> None:
    """Never into a text that goes to the same place."""
    out, err, arm = io.StringIO(), io.StringIO(), Decoding("with ngram", keeps_errors=True)
    screen = Screen(out, False, Console(file=err, width=200), is_live=False, is_shared=is_shared, is_quiet=False)
    rows = [Request(row, LetterTokenizer().encode(row.prompt), SamplingParams(30)) for row in rows_of(("ab", "cd"))]
    view = RunView(screen, [arm], [4], [0, 1], streams_text=streams_text, most_tokens=30)
    engine = toy_engine()
    step = engine._step
    engine._step = lambda: sleep(0.01) or step()
    with view:
        decode(engine, arm, rows, view.watch, lambda: False)
    said = err.getvalue().splitlines()
    if streams_text and is_shared:
        assert said == []
    else:
        assert re.fullmatch(r"0 of 2 finished, up to 2 together, \d+ s elapsed, about \d+ s left", said[0])


def test_one_long_output_tells_its_tokens() -> None:
    err, arm = io.StringIO(), Decoding("with ngram")
    screen = Screen(io.StringIO(), False, Console(file=err, width=200), False, is_shared=False, is_quiet=False)
    rows = [Request(row, LetterTokenizer().encode(row.prompt), SamplingParams(30)) for row in rows_of(("ab",))]
    view = RunView(screen, [arm], [4], [0], streams_text=False, most_tokens=30)
    engine = toy_engine()
    step = engine._step
    engine._step = lambda: sleep(0.03) or step()
    with view:
        decode(engine, arm, rows, view.watch, lambda: False)
    assert re.match(r"1 token, \d+ s elapsed, about \d+ s left\n2 tokens, ", err.getvalue())


def test_a_servers_benchmark_says_how_far_it_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"prompt {i}"}) + "\n" for i in range(4)))
    with serving(fake := Fake(pause_s=0.1)):
        assert run(["bench", "--endpoint", fake.url, "--dataset", str(prompts), "-n", "4"]) == 0
    assert re.search(
        r"^[1-3] of 4 requests, \d+ s elapsed, about \d+ s left, 1 at a time$", capsys.readouterr().err, re.M
    )


@pytest.mark.parametrize(
    ("done", "total", "words"),
    [(0, 4, "100 s"), (1, 4, "2 min elapsed, about 5 min left"), (4, 4, "2 min elapsed"), (1, 100, "2.8 h left")],
)
def test_the_remaining_time(done: int, total: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "perf_counter", lambda: 0.0)
    one = pace.Pace()
    monkeypatch.setattr(pace, "perf_counter", lambda: 100.0)  # 100 s behind a real time may round to less
    assert words.replace("100 s", "2 min elapsed") in one.words(done, total)

"""The terminal of `serve`: the last seconds beside the whole, from a thread of its own; a line where there is none."""

import io
import threading
from dataclasses import replace

from rich.console import Console

from specdec_cli.engine.jobs.snapshot import Snapshot
from specdec_cli.report.serve import Board, ServeView

BUSY = Snapshot(
    num_running=3,
    num_waiting=2,
    kv_cache_usage=0.25,
    num_finished=7,
    num_refused=1,
    num_prompt_tokens=90,
    num_generation_tokens=100,
    num_drafts=20,
    num_draft_tokens=80,
    num_accepted_tokens=60,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def drawn(board: Board, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(board.table())
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_rates_are_of_the_last_seconds_and_of_the_whole() -> None:
    clock = Clock()
    board = Board(clock)
    clock.now += 10
    board.take(BUSY)
    later = replace(
        BUSY, num_generation_tokens=150, num_drafts=30, num_draft_tokens=100, num_accepted_tokens=65, num_finished=8
    )
    clock.now += 5
    board.take(later)
    assert board.tokens_per_second == 10
    assert board.recent.acceptance_rate == 0.25
    assert board.recent.acceptance_length == 1.5
    assert board.recent.drafted_per_step == 2
    assert (board.recent.num_finished, board.recent.num_running) == (1, 3)
    assert board.latest.acceptance_rate == 0.65


def test_table_and_line_say_the_numbers() -> None:
    clock = Clock()
    board = Board(clock)
    clock.now += 10
    board.take(BUSY)
    table = drawn(board)
    for text in ("running", "waiting", "25.0%", "75.0%", "4.00", "10.0", "refused", "90"):
        assert text in table
    assert max(map(len, table.splitlines())) <= 80
    assert board.line() == (
        "3 running, 2 waiting, 7 finished, 1 refused; 10.0 tokens/s, acceptance rate 75.0%, length 4.00, KV cache 25.0%"
    )


def test_nothing_drafted_is_a_dash() -> None:
    clock = Clock()
    board = Board(clock)
    clock.now += 1
    board.take(Snapshot())
    assert "acceptance rate –, length –" in board.line()
    assert "the draft failed" not in board.line() + drawn(board)
    board.take(Snapshot(num_draft_failures=2))
    assert "the draft failed 2 times" in board.line()
    assert "the draft failed" in drawn(board)


def test_without_a_terminal_a_line_when_something_happens_and_silence_when_idle() -> None:
    said: list[str] = []
    numbers = [BUSY]
    pulled = threading.Semaphore(0)

    def pull() -> Snapshot:
        pulled.release()
        return numbers[0]

    with ServeView(pull, log=said.append, seconds=0.005):
        pulled.acquire()
        pulled.acquire()
        assert said[0].startswith("3 running")
    still = len(said)
    with ServeView(Snapshot, log=said.append, seconds=0.001) as view:
        del view
    assert len(said) == still


def test_a_terminal_is_drawn_from_a_thread_of_its_own_and_left_tidy() -> None:
    stream, threads = io.StringIO(), set()
    console = Console(file=stream, force_terminal=True, width=100, height=30)
    pulled = threading.Semaphore(0)

    def pull() -> Snapshot:
        threads.add(threading.current_thread().name)
        pulled.release()
        return BUSY

    with ServeView(pull, console, seconds=0.005):
        pulled.acquire()
        pulled.acquire()
    text = stream.getvalue()
    assert "specdec-terminal" in threads
    assert "tokens/s" in text
    assert text.rstrip().endswith("\x1b[?25h")
    assert not [thread for thread in threading.enumerate() if thread.name == "specdec-terminal"]


def test_quiet_starts_nothing() -> None:
    def pull() -> Snapshot:
        raise AssertionError("quiet pulls nothing")

    with ServeView(pull, seconds=0.001):
        assert not [thread for thread in threading.enumerate() if thread.name == "specdec-terminal"]

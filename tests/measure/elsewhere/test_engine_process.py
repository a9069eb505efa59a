"""Another engine's process: ready, refused, stuck, killed, interrupted; and nothing of it left running."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_vllm import command_of

from specdec_cli.errors import RunError, UsageError
from specdec_cli.measure.elsewhere.engine_log import last_lines, reason
from specdec_cli.measure.elsewhere.engine_process import EngineError, EngineProcess
from specdec_cli.measure.elsewhere.launch import find_program, free_port, split_arguments
from specdec_cli.measure.elsewhere.process_group import ProcessGroup

pytestmark = pytest.mark.usefixtures("nothing_left")
COMMAND = command_of(os.getpid())


def fake(ways: str = "", *more: str, **options: Any) -> EngineProcess:
    return EngineProcess("vLLM", ("env", f"FAKE_VLLM={ways}", *COMMAND, "serve", "model", *more), **options)


def alive(group_id: int) -> list[int]:
    """The processes of a group that have not ended."""
    found = []
    for one in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if os.getpgid(one.pid) == group_id and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one.pid)
    return found


def failing(started: EngineProcess) -> tuple[EngineError, int]:
    """The error of a start, and the process group of what was started."""
    try:
        with pytest.raises(EngineError) as caught:
            started.start()
        group = started.group_id
    finally:
        started.stop()
    assert group is not None
    return caught.value, group


def test_it_starts_answers_and_is_gone() -> None:
    process = fake()
    with process as url:
        group = process.group_id
        assert group is not None
        assert len(alive(group)) == 2
        assert os.getsid(group) == os.getsid(0)
        assert url.startswith("http://127.0.0.1:")
        assert process.log is not None
        log = process.log
        process.check()
    assert alive(group) == []
    assert not log.exists()
    assert "vLLM API server version" in process.log_text


def test_its_processor_time_is_that_of_all_its_processes(tmp_path: Path) -> None:
    script = tmp_path / "works.py"
    script.write_text(
        "import subprocess, sys, time\n"
        "def work():\n"
        "    while time.process_time() < 0.3: pass\n"
        "if sys.argv[1:]: work(); sys.exit()\n"
        "subprocess.run([sys.executable, __file__, 'ended'])\n"  # a child that has ended
        "work(); print('done', flush=True); time.sleep(60)\n"
    )
    group = ProcessGroup([sys.executable, str(script)], tmp_path / "log")
    try:
        while "done" not in (tmp_path / "log").read_text():
            assert group.exit_code is None
        assert 0.58 <= group.cpu_seconds() < 5
    finally:
        group.stop()
    assert group.cpu_seconds() == 0


def test_its_reason_is_one_sentence_and_its_lines_are_few(tmp_path: Path) -> None:
    error, group = failing(fake("die"))
    assert error.message == (
        "vLLM ended before it was ready (exit code 1): ValueError: the weights of `model` are torn"
    )
    assert error.hint is not None
    log = Path(error.hint.removeprefix("its whole log is in "))
    assert "EngineCoreProc" in log.read_text()
    log.unlink()
    assert error.lines[-1].startswith("vLLM: RuntimeError: Engine core initialization failed")
    assert len(error.lines) <= 8
    assert not any("File" in line for line in error.lines)
    assert alive(group) == []


def test_a_draft_that_it_refuses_is_named() -> None:
    config = '{"method": "medusa", "num_speculative_tokens": 2}'
    error, _ = failing(fake("", "--speculative-config", config))
    assert error.message.endswith("(exit code 1): Unsupported speculative method: 'medusa'")


def test_an_option_that_it_does_not_know_is_named() -> None:
    error, _ = failing(fake("", "--no-such-thing"))
    assert error.message.endswith("(exit code 2): unrecognized arguments: --no-such-thing")


@pytest.mark.in_turn(2, every=3)
@pytest.mark.parametrize("way", ["never", "stuck", "never,deaf"])
def test_one_that_never_is_ready_is_ended(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec_cli.measure.elsewhere.process_group.ProcessGroup.stop.__defaults__", (0.3,))
    error, group = failing(fake(way, timeout_s=1.0))
    assert error.message.startswith("vLLM was not ready after 1 s")
    assert error.hint is not None
    assert error.hint.startswith("raise --engine-timeout; its whole log is in ")
    assert alive(group) == []


def test_a_port_that_is_taken_meanwhile_is_changed(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    with fake(f"busy={tmp_path / 'busy'},seen={seen}"):
        assert len(seen.read_text().splitlines()) == 2


def test_a_stranger_on_its_port_is_not_taken_for_it() -> None:
    with fake() as url:
        ours = fake("stuck", timeout_s=0.5)
        ours._launch(free_port())
        try:
            assert not ours._is_ready(int(url.rpartition(":")[2]))
        finally:
            ours.stop()


def test_one_that_is_killed_is_noticed() -> None:
    process = fake()
    with process:
        group = process.group_id
        assert group is not None
        os.kill(group, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"vLLM ended while it was needed \(killed by SIGKILL\)"):
            process.check(patience_s=5.0)
    assert alive(group) == []
    assert process.log is not None
    process.log.unlink()


def test_a_start_is_given_up() -> None:
    process: EngineProcess = fake("stuck", stopped=lambda: process.group_id is not None)
    with pytest.raises(KeyboardInterrupt), process:
        pytest.fail("it cannot have started")


@pytest.mark.in_turn(1)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_us_ends_it(number: signal.Signals, code: int, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    program = f"""
import sys, time
from pathlib import Path
from specdec_cli.measure.elsewhere.engine_process import EngineProcess
process = EngineProcess("vLLM", (*{COMMAND!r}, "serve", "model"))
try:
    with process:
        Path({str(tmp_path / "part")!r}).write_text(str(process.group_id))
        Path({str(tmp_path / "part")!r}).rename({str(ready)!r})
        while True:  # one long sleep would not be cut short by a signal just before it
            time.sleep(0.1)
except KeyboardInterrupt:
    sys.exit(130)
"""
    ours = subprocess.Popen([sys.executable, "-c", program])
    while not ready.exists():
        assert ours.poll() is None
    ours.send_signal(number)
    assert ours.wait(timeout=200) == code
    assert alive(int(ready.read_text())) == []


def test_a_program_is_found_or_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunError, match="`vllm` is not on PATH"):
        find_program(None, "vllm", "vLLM")
    with pytest.raises(RunError, match="`/no/vllm` is no program"):
        find_program("/no/vllm", "vllm", "vLLM")
    with pytest.raises(UsageError, match="cannot be read: no closing quotation"):
        find_program("'", "vllm", "vLLM")
    assert find_program(f"{sys.executable} -m x", "vllm", "vLLM") == (sys.executable, "-m", "x")
    with pytest.raises(EngineError, match="cannot be run: no such file"):
        EngineProcess("vLLM", (str(tmp_path / "none"),)).start()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_address_is_ours_to_choose() -> None:
    assert split_arguments("--enforce-eager --x 'a b'") == ("--enforce-eager", "--x", "a b")
    with pytest.raises(UsageError, match="must not hold `--port=1`"):
        split_arguments("--port=1")


def test_a_log_is_read_as_people_would() -> None:
    assert reason("INFO 11-26 20:00:00 [a.py:1] all is well") is None
    log = "KeyError: 'x'\n\nDuring handling of the above exception, another exception occurred:\n\nValueError: y\n"
    assert reason(log) == "ValueError: y"
    assert reason("RuntimeError: Engine core initialization failed. See above.") is not None
    assert last_lines("one\rtwo\n\n50%|#| 1/2 [1it/s]\nthree\nthree\n") == ["two", "three"]


def test_the_lines_shown_are_not_those_of_its_shutdown() -> None:
    log = (
        "RuntimeError: Worker failed with error 'head_dim=8'\n"
        "(APIServer pid=7) INFO 11-27 03:05:24 [utils.py:628] [shutdown] Process manager: send sigterm\n"
        "INFO:     Shutting down\nINFO:     Finished server process [7]\n"
        'nanobind: leaked 4 instances!\n - leaked function "get_name"\n - ... skipped remainder\n'
        "See https://nanobind.readthedocs.io/en/latest/refleaks.html\n"
    )
    assert last_lines(log) == ["RuntimeError: Worker failed with error 'head_dim=8'"]

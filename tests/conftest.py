"""Puts this folder and those below it on the path, so that tests import its models and toys, and each other's helpers.

One thread, in child processes too: on models this small a second one only waits, and a busy machine makes it wait long.
A shell's background jobs ignore Ctrl-C; children of tests, which are interrupted, must not inherit that.
Without a GPU Triton's kernels run in its interpreter, which has to be said before it is imported.
"""

import gc
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or every child compiles the package anew
os.environ.pop("COLUMNS", None)  # a worker of pytest-xdist may have it, and output without a terminal has no width
sys.path.extend(sorted({str(path.parent) for path in Path(__file__).parent.rglob("test_*.py")}))

import pytest
import torch
from invariance import known_invariance
from shortened import is_out_of_turn

sys.dont_write_bytecode = False
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def unconfigured_logs() -> None:
    """Logs as at a process's start: a command that serves configures them for its process, which is every test's."""
    for name in ("specdec_cli", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True
        if logger.level != logging.NOTSET:  # a level that is set has every logger look for its own again
            logger.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which nothing else runs: what a measuring command finds depends on no load."""
    from specdec_cli.measure.machine import interruption
    from specdec_cli.measure.machine.interruption import MachineUsage, Usage

    monkeypatch.setattr(interruption, "look_at_usage", lambda: Usage(0.0, 0.0, 0.0, 0))
    monkeypatch.setattr(interruption, "look_at_machine", lambda _: MachineUsage(0.0, 0.0, 0.0, 1))
    monkeypatch.setattr("psutil.getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr("specdec_cli.measure.machine.roofline._SECONDS", 0.02)


@pytest.hookimpl(tryfirst=True)  # before those that are marked slow are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave cases that are out of turn to those who ask for the slow tests."""
    for item in filter(is_out_of_turn, items):
        item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Leave what was imported by now out of every later search for garbage: half a million objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)  # tests make many objects: looking for garbage after each 700 takes 5 % of their time


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """A process whose every object is looked at in a search for garbage; later tests' searches are as short as ever."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def known_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose kernels `doctor` tests once in a process: that takes a second, and they do not change."""
    from specdec_cli.measure.machine import doctor

    monkeypatch.setattr(doctor, "row_invariance", known_invariance)


@pytest.fixture
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No engine that a test starts outlives it; one that does fails this test and no later one."""
    from fake_vllm import running

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where logs of those that fail stay
    yield
    left = running(os.getpid())
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert not left

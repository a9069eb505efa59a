"""A program and all its descendants as one process group, which is ended as a whole.

Ctrl-C at the terminal reaches this process alone, which then ends the group in order. The group stays in this session:
Linux shares its processors among sessions first (`sched_autogroup`), and another session may get a smaller share.
While a group runs, SIGTERM and SIGHUP become `SystemExit`, so that `stop` is reached on the way out.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from types import FrameType
from typing import Any

import psutil

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
_POLL_SECONDS = 0.05
_KILL_SECONDS = 10.0


class ProcessGroup:
    """A running program.

    Args:
        words: the program and its arguments.
        log: file that takes both of its output streams.

    Attributes:
        group_id: of the process group, which is also the program's process id.

    Raises:
        OSError: it cannot be run.
    """

    def __init__(self, words: Sequence[str], log: Path) -> None:
        self._handlers: dict[signal.Signals, Any] = {}
        self._turn_signals_into_exits()
        try:
            with log.open("wb") as stream:
                self._program = subprocess.Popen(
                    list(words),
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                    env={**os.environ, "PYTHONUNBUFFERED": "1"},
                )
        except BaseException:
            self._restore_signals()
            raise
        self.group_id = self._program.pid

    @property
    def exit_code(self) -> int | None:
        """The program's exit code, minus the signal that killed it; None while it runs."""
        return self._program.poll()

    def members(self) -> list[psutil.Process]:
        """The group's processes that have not ended, the program first."""
        self._program.poll()
        return [process for process in psutil.process_iter() if _is_member(process, self.group_id)]

    def cpu_seconds(self) -> float:
        """Processor time that its processes have used so far, those that have ended included."""
        total = 0.0
        for member in self.members():
            with suppress(psutil.Error):
                total += sum(member.cpu_times()[:4])  # user, system, and both of the children that ended
        return total

    def listens(self, port: int) -> bool:
        """Whether a process of the group listens on a port; true where the system does not say."""
        try:
            connections = [each for member in self.members() for each in member.net_connections("tcp")]
        except psutil.Error:
            return True
        return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in connections)

    def stop(self, patience_s: float = 20.0) -> None:
        """End every process of the group: SIGTERM, and SIGKILL for those that are left.

        Args:
            patience_s: how long they may take to end by themselves.
        """
        try:
            self._signal(signal.SIGTERM)
            if not self._ends_within(patience_s):
                self._signal(signal.SIGKILL)
                self._ends_within(_KILL_SECONDS)
        except BaseException:  # a second Ctrl-C: leave nothing running, and do not wait
            self._signal(signal.SIGKILL)
            raise
        finally:
            with suppress(subprocess.TimeoutExpired):
                self._program.wait(timeout=_KILL_SECONDS)
            self._restore_signals()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.group_id, number)

    def _ends_within(self, seconds: float) -> bool:
        end = monotonic() + seconds
        while self.members():
            if monotonic() > end:
                return False
            sleep(_POLL_SECONDS)
        return True

    def _turn_signals_into_exits(self) -> None:
        """Make signals that would end this process at once raise SystemExit; a server handles them itself."""
        if threading.current_thread() is threading.main_thread():
            ours = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
            self._handlers = {number: signal.signal(number, _exit) for number in ours}

    def _restore_signals(self) -> None:
        handlers, self._handlers = self._handlers, {}
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _is_member(process: psutil.Process, group_id: int) -> bool:
    try:
        return os.getpgid(process.pid) == group_id and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, OSError):
        return False


def _exit(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)

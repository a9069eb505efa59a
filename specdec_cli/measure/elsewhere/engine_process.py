"""Another engine's server, started here: `start` waits until it answers, `stop` leaves nothing of it running.

    with EngineProcess("vLLM", words, timeout_s=600, tell=say, stopped=stopped) as url:
        ...  # measure it as any server at `url`

What it writes goes into a file, of which an error has the last useful lines; the file stays if the engine failed.
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType

from specdec_cli.engine.driver import never
from specdec_cli.errors import RunError
from specdec_cli.measure.elsewhere.engine_log import last_lines, reason
from specdec_cli.measure.elsewhere.launch import HOST, free_port
from specdec_cli.measure.elsewhere.process_group import ProcessGroup

Tell = Callable[[str], None]

_POLL_SECONDS = 0.25
_ANSWER_SECONDS = 2.0
_MOST_PORTS = 3
_TAKEN = ("address already in use", "errno 98", "errno 48")


class EngineError(RunError):
    """An engine did not start, or ended while it was needed.

    Args:
        message: the sentence.
        hint: what to do.
        lines: the last useful ones of its log, each with the engine's name.
    """

    def __init__(self, message: str, hint: str | None, lines: list[str]) -> None:
        super().__init__(message, hint)
        self.lines = lines


class EngineProcess:
    """A server that this process starts and ends; a context manager that gives its address.

    Args:
        name: the engine's, for people.
        words: its program and arguments; the program must take `--host` and `--port`, and answer `/health`.
        timeout_s: how long it may take until it answers.
        tell: takes words about the start as it goes on, as often as they change.
        stopped: whether to give up the start.

    Attributes:
        url: `http://host:port`, once it has started.
        log: file with everything that it wrote, until `stop`.
        log_text: the same as text, also afterwards.
    """

    def __init__(
        self,
        name: str,
        words: Sequence[str],
        timeout_s: float = 600.0,
        tell: Tell = lambda _: None,
        stopped: Callable[[], bool] = never,
    ) -> None:
        self.name, self.words = name, tuple(words)
        self.url = ""
        self.log: Path | None = None
        self._timeout_s, self._tell, self._stopped = timeout_s, tell, stopped
        self._group: ProcessGroup | None = None
        self._text = ""
        self._has_failed = False

    def __enter__(self) -> str:
        """Start it."""
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        self.stop()

    @property
    def group_id(self) -> int | None:
        """Id of its process group; None while it does not run."""
        return None if self._group is None else self._group.group_id

    @property
    def cpu_seconds(self) -> float:
        """Processor time that its processes have used so far; 0 while it does not run."""
        return 0.0 if self._group is None else self._group.cpu_seconds()

    @property
    def log_text(self) -> str:
        """Everything that it wrote so far."""
        if self.log is not None:
            with suppress(OSError):
                self._text = self.log.read_text(encoding="utf-8", errors="replace")
        return self._text

    def start(self) -> str:
        """Start it and wait until it answers; `stop` must follow, whatever happens.

        Returns:
            Its address.

        Raises:
            EngineError: it cannot be run, ends, or does not answer in time.
            KeyboardInterrupt: `stopped` turned true meanwhile.
        """
        for attempt in range(1, _MOST_PORTS + 1):
            port = free_port()
            self._launch(port)
            if self._is_up(port, is_last=attempt == _MOST_PORTS):
                break
            self.stop()  # another program took the port meanwhile
        self.url = f"http://{HOST}:{port}"
        return self.url

    def stop(self) -> None:
        """End every process of it. Its log stays, and is named by the error, where it failed."""
        group, self._group = self._group, None
        try:
            if group is not None:
                group.stop()
        finally:
            if not self._has_failed:
                self._drop_log()

    def check(self, patience_s: float = 0.0) -> None:
        """Raise if it has ended.

        Args:
            patience_s: how long an engine that no longer answers may take to end.

        Raises:
            EngineError: it has.
        """
        end = monotonic() + patience_s
        while self._exit_code() is None:
            if monotonic() >= end:
                return
            sleep(min(_POLL_SECONDS, patience_s))
        raise self._ended("while it was needed")

    def _launch(self, port: int) -> None:
        if self.log is None:
            prefix = f"specdec-{self.name.lower()}-"
            with tempfile.NamedTemporaryFile(prefix=prefix, suffix=".log", delete=False) as made:
                self.log = Path(made.name)
        try:
            self._group = ProcessGroup([*self.words, "--host", HOST, "--port", str(port)], self.log)
        except OSError as error:
            self._drop_log()
            message = (error.strerror or str(error)).lower()
            raise EngineError(f"`{self.words[0]}` cannot be run: {message}", "check --engine-command", []) from None

    def _is_up(self, port: int, is_last: bool) -> bool:
        """Wait until it is ready; False where it ended for want of the port and another one may be tried."""
        begin, shown = monotonic(), ""
        while not self._is_ready(port):
            if self._exit_code() is not None:
                if not is_last and any(word in self.log_text.lower() for word in _TAKEN):
                    return False
                raise self._ended("before it was ready")
            if self._stopped():
                raise KeyboardInterrupt
            if monotonic() - begin > self._timeout_s:
                what = f"was not ready after {self._timeout_s:g} s"
                raise self._failed(what, reason(self.log_text), "raise --engine-timeout")
            newest = next(iter(last_lines(self.log_text[-4000:], 1)), "")
            if newest != shown:
                shown = newest
                self._tell(f"starting {self.name}: {newest[:80]}")
            sleep(_POLL_SECONDS)
        return True

    def _is_ready(self, port: int) -> bool:
        """Whether our own server, and no stranger on its port, says that it is ready."""
        assert self._group is not None, "it was launched"
        asked = HTTPConnection(HOST, port, timeout=_ANSWER_SECONDS)
        try:
            asked.request("GET", "/health")
            is_ready = asked.getresponse().status == 200
        except (OSError, HTTPException):
            return False
        finally:
            asked.close()
        return is_ready and self._group.listens(port)

    def _exit_code(self) -> int | None:
        assert self._group is not None, "it was launched"
        return self._group.exit_code

    def _ended(self, when: str) -> EngineError:
        code = self._exit_code()
        assert code is not None, "it has ended"
        how = f"exit code {code}" if code >= 0 else f"killed by {_name(-code)}"
        return self._failed(f"ended {when} ({how})", reason(self.log_text), None)

    def _failed(self, what: str, why: str | None, hint: str | None) -> EngineError:
        """The error in one sentence, with the lines that led to it; the whole log stays."""
        self._has_failed = True
        lines = [f"{self.name}: {line}" for line in last_lines(self.log_text)]
        told = f": {why}" if why else ""
        hints = [*([hint] if hint else []), f"its whole log is in {self.log}"]
        return EngineError(f"{self.name} {what}{told}", "; ".join(hints), lines)

    def _drop_log(self) -> None:
        self._text = self.log_text
        if self.log is not None:
            self.log.unlink(missing_ok=True)
            self.log = None


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

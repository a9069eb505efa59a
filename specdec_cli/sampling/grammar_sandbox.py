"""A trial compilation of a grammar in a process that can be killed, before the grammar is compiled in this one.

llguidance's own limits do not bound what it takes to build a lexer: 400 bytes can cost minutes and all memory, and a
thread that compiles cannot be stopped. So a small process reads the tokenizer once and forks for every trial. The fork
limits its own processor time and memory, compiles, and computes the first mask. Only a grammar that passed is compiled
where the engine runs, at the same cost. A fork has a low priority; a thread beside the engine has not, since one that
waits for a core while it holds Python's lock stops every other thread.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import weakref
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from threading import Lock
from typing import Any

from specdec_cli.errors import RunError, Unavailable, UsageError
from specdec_cli.sampling.grammar import (
    Grammar,
    TokenizerLike,
    check_installed,
    compile_grammar,
    know_tokenizer,
    read_tokenizer,
    tokenizer_document,
)

_MAX_VERDICTS = 1024
_WALL_SECONDS_PER_SECOND = 10
_STACK_BYTES = 4 * 2**20
_NICENESS = 10
_OUT_OF_TIME = (signal.SIGPROF, signal.SIGXCPU)
_START = (
    "import sys; sys.path[:] = {path!r}; "
    "from specdec_cli.sampling.grammar_sandbox import serve_trials; serve_trials({descriptor})"
)


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits of time and memory for a grammar.

    Args:
        compile_seconds: processor time to compile it and to compute its first mask.
        compile_bytes: memory for the same.
        mask_seconds: processor time of all masks of a request beyond 5 ms for each; None for any.
    """

    compile_seconds: float
    compile_bytes: int
    mask_seconds: float | None = None


class GrammarCancelledError(RunError):
    """A trial whose requester went away."""


class Cancellation:
    """Ends a trial from another thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._socket: socket.socket | None = None
        self.is_cancelled = False

    def cancel(self) -> None:
        """End the trial that runs, and do not begin one."""
        with self._lock:
            self.is_cancelled = True
            if self._socket is not None:
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def attach(self, trial: socket.socket | None) -> None:
        """Name the trial to end.

        Raises:
            GrammarCancelledError: it was cancelled before.
        """
        with self._lock:
            self._socket = trial
        self.check()

    def check(self) -> None:
        """Raise GrammarCancelledError after `cancel`."""
        if self.is_cancelled:
            raise GrammarCancelledError("the grammar is no longer wanted")


class GrammarCompiler:
    """Compiles grammars within limits; any thread may use it.

    Args:
        limits: of each grammar.
    """

    def __init__(self, limits: GrammarLimits) -> None:
        self.limits = limits
        self._sandboxes: weakref.WeakKeyDictionary[TokenizerLike, _Sandbox] = weakref.WeakKeyDictionary()
        self._lock = Lock()

    def compile(
        self, kind: str, source: str, tokenizer: TokenizerLike, cancellation: Cancellation | None = None
    ) -> Grammar:
        """A grammar, as `compile_grammar`.

        Raises:
            UsageError: as `compile_grammar`, or the grammar needs more time or memory than it may.
            GrammarCancelledError: `cancellation` was cancelled.
            RunError: there is no process for the trial.
            Unavailable: other processes leave it no time.
        """
        check_installed()
        cancellation = cancellation or Cancellation()
        with self._lock:
            sandbox = self._sandboxes.setdefault(tokenizer, _Sandbox())
        sandbox.try_out(kind, source, tokenizer, self.limits, cancellation)
        cancellation.check()
        return compile_grammar(kind, source, tokenizer, self.limits.mask_seconds)


class _Sandbox:
    """The process that tries grammars for one tokenizer, started at the first trial, and the verdicts so far."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()

    def try_out(
        self, kind: str, source: str, tokenizer: TokenizerLike, limits: GrammarLimits, cancellation: Cancellation
    ) -> None:
        """Refuse a grammar that does not compile within the limits."""
        key = hashlib.sha256(f"{kind}\0{source}".encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            is_known = key in self._verdicts
            refusal = self._verdicts.get(key)
        if not is_known:
            refusal = self._refusal(kind, source, tokenizer, limits, cancellation)
            with self._lock:
                self._verdicts[key] = refusal
                if len(self._verdicts) > _MAX_VERDICTS:
                    self._verdicts.popitem(last=False)
        if refusal is not None:
            raise UsageError(*json.loads(refusal))

    def _refusal(
        self, kind: str, source: str, tokenizer: TokenizerLike, limits: GrammarLimits, cancellation: Cancellation
    ) -> str | None:
        """Message and hint of the error that a grammar is refused with, as JSON; None for a grammar that compiles."""
        request = {"kind": kind, "source": source, "seconds": limits.compile_seconds, "bytes": limits.compile_bytes}
        answer = self._ask(request, tokenizer, limits, cancellation)
        if answer is None:  # the process was killed, as by the machine's own memory limit: once more in a new one
            answer = self._ask(request, tokenizer, limits, cancellation)
        if answer is None:
            raise RunError("the process that tries grammars ended", "the machine may be out of memory")
        if "signal" not in answer:
            return answer["refusal"]  # type: ignore[no-any-return]
        number, mebibytes = answer["signal"], limits.compile_bytes // 2**20
        hint = "simplify the grammar"
        if number in _OUT_OF_TIME:
            words = f"takes more than {limits.compile_seconds:g} s of processor time to compile"
        elif number == signal.SIGSEGV:
            words = "is nested too deep"
        else:
            words = f"takes more than {mebibytes} MiB of memory to compile"
        return json.dumps([f"`{kind}` does not compile: it {words}", hint])

    def _ask(
        self, request: dict[str, Any], tokenizer: TokenizerLike, limits: GrammarLimits, cancellation: Cancellation
    ) -> dict[str, Any] | None:
        """The outcome of a trial; None where the process is gone."""
        mine, theirs = socket.socketpair()
        with mine:
            with theirs:
                try:
                    with self._lock:
                        socket.send_fds(self._started(tokenizer), [b"t"], [theirs.fileno()])
                except OSError:
                    self._end()
                    return None
            cancellation.attach(mine)
            read_tokenizer(tokenizer)  # meanwhile, and to refuse here one that cannot be read
            mine.settimeout(_WALL_SECONDS_PER_SECOND * (limits.compile_seconds + 1))
            try:
                _send(mine, json.dumps(request).encode())
                answer = _receive(mine)
            except TimeoutError:
                seconds = f"{mine.gettimeout():g} s"
                message = f"the grammar was not compiled within {seconds}: other processes take this machine's time"
                raise Unavailable(message, "grammar_timeout") from None
            except OSError:
                answer = None
            finally:
                cancellation.attach(None)
        if answer is None:
            self._end()
            return None
        return json.loads(answer)  # type: ignore[no-any-return]

    def _started(self, tokenizer: TokenizerLike) -> socket.socket:
        """The control socket of the process, which is started if it does not run; the lock is held."""
        if self._process is not None and self._process.poll() is None and self._control is not None:
            return self._control
        document, end = tokenizer_document(tokenizer)
        mine, theirs = socket.socketpair()
        with theirs:
            code = _START.format(path=sys.path, descriptor=theirs.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"},
            )
        self._control = mine  # before it is used: `_end` closes it where that fails
        weakref.finalize(self, _close, mine, self._process)
        facts = [tokenizer.num_tokens, end, tokenizer.name, list(tokenizer.eos_token_ids)]
        for message in (json.dumps(facts), document):
            _send(mine, message.encode())
        return mine

    def _end(self) -> None:
        with self._lock:
            control, self._control = self._control, None
            process, self._process = self._process, None
        if control is not None and process is not None:
            _close(control, process)


def _close(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """End a process: it goes when its control socket closes."""
    control.close()
    try:
        process.wait(1)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def serve_trials(descriptor: int) -> None:
    """Try grammars until the control socket closes; the whole life of the process.

    Args:
        descriptor: of the control socket: first the tokenizer, then a socket for each trial.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=descriptor)
    facts, document = _receive(control), _receive(control)
    if facts is None or document is None:
        return
    num_tokens, end, name, eos_ids = json.loads(facts)
    tokenizer = _TrialTokenizer(num_tokens, name, tuple(eos_ids))
    know_tokenizer(tokenizer, document.decode(), end)
    trials = _Trials(tokenizer, control)
    while trials.go_on():
        pass


@dataclass(eq=False)
class _TrialTokenizer:
    """The parts of a tokenizer that a trial needs."""

    num_tokens: int
    name: str
    eos_token_ids: tuple[int, ...]
    hf: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class _Trial:
    """A fork that compiles, the pipe that its answer comes through, and the socket of its requester."""

    pid: int
    pipe: int
    requester: socket.socket


class _Trials:
    """The trials that run."""

    def __init__(self, tokenizer: Any, control: socket.socket) -> None:
        self._tokenizer = tokenizer
        self._control = control
        self._running: set[_Trial] = set()
        self._selector = DefaultSelector()
        self._selector.register(control, EVENT_READ)

    def go_on(self) -> bool:
        """Wait until something happens, and deal with it; whether there can be more."""
        for key, _ in self._selector.select():
            if key.fileobj is self._control:
                _, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
                if not descriptors:
                    for trial in self._running:
                        os.kill(trial.pid, signal.SIGKILL)
                    return False
                self._begin(socket.socket(fileno=descriptors[0]))
            elif key.data in self._running:  # its other descriptor may have ended it
                self._end(key.data, is_gone=key.fd != key.data.pipe)
        return True

    def _begin(self, requester: socket.socket) -> None:
        request = _receive(requester)
        if request is None:
            requester.close()
            return
        trial = _Trial(*_fork(self._tokenizer, json.loads(request)), requester)
        self._running.add(trial)
        for place in (trial.pipe, requester):
            self._selector.register(place, EVENT_READ, trial)

    def _end(self, trial: _Trial, is_gone: bool) -> None:
        """Answer a trial that ended, or end one whose requester is gone."""
        for place in (trial.pipe, trial.requester):
            self._selector.unregister(place)
        self._running.remove(trial)
        if is_gone:
            os.kill(trial.pid, signal.SIGKILL)
        with os.fdopen(trial.pipe, "rb") as reader:
            answer = reader.read()
        _, status = os.waitpid(trial.pid, 0)
        if not answer:
            number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else signal.SIGABRT
            answer = json.dumps({"signal": number}).encode()
        with suppress(OSError), trial.requester:
            _send(trial.requester, answer)


def _fork(tokenizer: Any, request: dict[str, Any]) -> tuple[int, int]:
    """Begin a trial: its process, and the pipe that its answer comes through."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    try:
        os.nice(_NICENESS)  # the engine's own threads go first
        _limit(request["seconds"], request["bytes"])
        refusal: str | None = None
        try:
            compile_grammar(request["kind"], request["source"], tokenizer)
        except (UsageError, RunError) as error:
            refusal = json.dumps([error.message, error.hint])
        except RecursionError:
            refusal = json.dumps([f"`{request['kind']}` does not compile: it is nested too deep", "simplify it"])
        with os.fdopen(writer, "wb") as answer:
            answer.write(json.dumps({"refusal": refusal}).encode())
    except MemoryError:
        os.kill(os.getpid(), signal.SIGABRT)
    finally:
        os._exit(1)


def _limit(seconds: float, num_bytes: int) -> None:
    """Let the kernel end this process at a processor time, and refuse it memory beyond what it has now."""
    import resource

    with suppress(OSError, ValueError):  # macOS has no limit of address space
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _send(place: socket.socket, data: bytes) -> None:
    place.sendall(struct.pack("<Q", len(data)) + data)


def _receive(place: socket.socket) -> bytes | None:
    """A message, or None where the other side is gone."""
    head = _exactly(place, 8)
    return None if head is None else _exactly(place, struct.unpack("<Q", head)[0])


def _exactly(place: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        data = place.recv(min(size - len(parts), 2**20))
        if not data:
            return None
        parts += data
    return bytes(parts)

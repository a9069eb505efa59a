"""A trial compilation of a grammar in a process that can be killed, before the grammar is compiled in this one.

llguidance's own limits do not bound what it takes to build a lexer: 400 bytes can cost minutes and all memory, and a
thread that compiles cannot be stopped. So a process with a low priority reads the tokenizer once and tries every
grammar, one after the other, within limits of processor time and memory. Only a grammar that passed is compiled where
the engine runs, at the same cost. Where the process ends over a grammar, the next one gets a new process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Timer
from time import monotonic
from typing import Any
from weakref import WeakKeyDictionary, finalize

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
_GONE = ("the process that tries grammars ended", "the machine may be out of memory")
_OUT_OF_TIME = (signal.SIGPROF, signal.SIGXCPU)
_START = "import sys; sys.path[:] = {path!r}; from specdec_cli.sampling.grammar_sandbox import try_all; try_all()"


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
    """A grammar whose requester went away."""


class Cancellation:
    """Ends the trial of a grammar from another thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[str] | None = None
        self.is_cancelled = False

    def cancel(self) -> None:
        """End the trial that runs, and do not begin one."""
        with self._lock:
            self.is_cancelled = True
            if self._process is not None:
                self._process.kill()

    def attach(self, process: subprocess.Popen[str] | None) -> None:
        """Name the process of the trial that runs; None once it has ended.

        Raises:
            GrammarCancelledError: the grammar is no longer wanted.
        """
        with self._lock:
            self._process = process
            if self.is_cancelled:
                raise GrammarCancelledError("the grammar is no longer wanted")


class GrammarCompiler:
    """Compiles grammars within limits; any thread may use it."""

    def __init__(self, limits: GrammarLimits) -> None:
        self.limits = limits
        self._sandboxes: WeakKeyDictionary[TokenizerLike, _Sandbox] = WeakKeyDictionary()
        self._lock = Lock()

    def compile(
        self, kind: str, source: str, tokenizer: TokenizerLike, cancellation: Cancellation | None = None
    ) -> Grammar:
        """A grammar, as `compile_grammar`.

        Raises:
            UsageError: as `compile_grammar`, or the grammar needs more time or memory than it may.
            GrammarCancelledError: `cancellation` was cancelled.
            RunError: the process of the trial ended by itself.
            Unavailable: other processes leave it no time.
        """
        check_installed()
        with self._lock:
            sandbox = self._sandboxes.setdefault(tokenizer, _Sandbox(self.limits))
        refusal = sandbox.refusal(kind, source, tokenizer, cancellation or Cancellation())
        if refusal is not None:
            raise UsageError(*refusal)
        return compile_grammar(kind, source, tokenizer, self.limits.mask_seconds)


class _Sandbox:
    """The process that tries grammars for one tokenizer, and the verdicts so far."""

    def __init__(self, limits: GrammarLimits) -> None:
        self._limits = limits
        self._lock = Lock()
        self._process: subprocess.Popen[str] | None = None
        self._close: finalize[[subprocess.Popen[str]], _Sandbox] | None = None
        self._verdicts: dict[tuple[str, str], tuple[str, str | None] | None] = {}

    def refusal(
        self, kind: str, source: str, tokenizer: TokenizerLike, cancellation: Cancellation
    ) -> tuple[str, str | None] | None:
        """Message and hint of the error that a grammar is refused with; None for one that compiles in time."""
        key = (kind, source)
        with self._lock:
            if key not in self._verdicts:
                verdict = self._try_out(kind, source, tokenizer, cancellation)
                if len(self._verdicts) >= _MAX_VERDICTS:
                    self._verdicts.clear()
                self._verdicts[key] = verdict
            return self._verdicts[key]

    def _try_out(
        self, kind: str, source: str, tokenizer: TokenizerLike, cancellation: Cancellation
    ) -> tuple[str, str | None] | None:
        limits = self._limits
        request = {"kind": kind, "source": source, "seconds": limits.compile_seconds, "bytes": limits.compile_bytes}
        seconds = _WALL_SECONDS_PER_SECOND * (limits.compile_seconds + 1)
        for _ in range(2):  # once more where the machine's own limit killed the process
            process = self._started(tokenizer)
            cancellation.attach(process)
            began = monotonic()
            limit = Timer(seconds, process.kill)
            limit.start()
            answer = _asked(process, request)
            limit.cancel()
            if answer:
                cancellation.attach(None)
                refusal = json.loads(answer)["refusal"]
                return None if refusal is None else (refusal[0], refusal[1])
            number = -self._ended(process)
            cancellation.attach(None)
            if number != signal.SIGKILL:
                break
            if monotonic() - began >= seconds:
                message = f"the grammar was not compiled within {seconds:g} s: other processes take this machine's time"
                raise Unavailable(message, "grammar_timeout")
        if number <= 0 or number == signal.SIGKILL:
            raise RunError(*_GONE)
        if number in _OUT_OF_TIME:
            words = f"takes more than {limits.compile_seconds:g} s of processor time to compile"
        elif number == signal.SIGSEGV:
            words = "is nested too deep"
        else:
            words = f"takes more than {limits.compile_bytes // 2**20} MiB of memory to compile"
        return f"`{kind}` does not compile: it {words}", "simplify the grammar"

    def _started(self, tokenizer: TokenizerLike) -> subprocess.Popen[str]:
        """The process, which is started where it does not run."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        if self._close is not None:
            self._close()
        read_tokenizer(tokenizer)  # refuses one that cannot be read
        document, end = tokenizer_document(tokenizer)
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _START.format(path=sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"},
        )
        self._process, self._close = process, finalize(self, _close, process)
        eos_ids = list(tokenizer.eos_token_ids)
        facts = {"num_tokens": tokenizer.num_tokens, "name": tokenizer.name, "eos_token_ids": eos_ids}
        if not _asked(process, facts | {"document": document, "end": end}):
            self._ended(process)
            raise RunError(*_GONE)
        return process

    def _ended(self, process: subprocess.Popen[str]) -> int:
        """The exit code of a process that has ended or is about to; its pipes are closed."""
        code = process.wait()
        if self._close is not None:
            self._close()
        return code


def _asked(process: subprocess.Popen[str], message: dict[str, Any]) -> str:
    """The line that a process answers with; empty where it ended."""
    assert process.stdin is not None, "it is a pipe"
    assert process.stdout is not None, "it is a pipe"
    try:
        process.stdin.write(f"{json.dumps(message)}\n")
        process.stdin.flush()
    except BrokenPipeError:
        return ""
    return process.stdout.readline()


def _close(process: subprocess.Popen[str]) -> None:
    process.kill()
    with suppress(BrokenPipeError):
        process.communicate()


@dataclass(eq=False)
class _TrialTokenizer:
    """The parts of a tokenizer that a trial needs."""

    num_tokens: int
    name: str
    eos_token_ids: tuple[int, ...]
    hf: Any = None


def try_all() -> None:
    """Read the tokenizer from standard input, then try grammars, one a line; the whole life of the process."""
    import resource

    os.nice(_NICENESS)  # the engine's own threads go first
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    facts = json.loads(sys.stdin.readline())
    tokenizer = _TrialTokenizer(facts["num_tokens"], facts["name"], tuple(facts["eos_token_ids"]))
    know_tokenizer(tokenizer, facts["document"], facts["end"])
    answer = "ready"
    while True:
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()
        line = sys.stdin.readline()
        if not line:
            return
        try:
            answer = json.dumps({"refusal": _refusal(tokenizer, json.loads(line))})
        except MemoryError:
            os.abort()


def _refusal(tokenizer: TokenizerLike, request: dict[str, Any]) -> tuple[str, str | None] | None:
    """Message and hint of a grammar's error; beyond the limits this process ends."""
    import resource

    with suppress(OSError, ValueError):  # macOS has no limit of address space
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + request["bytes"]
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.setitimer(signal.ITIMER_PROF, request["seconds"])
    try:
        compile_grammar(request["kind"], request["source"], tokenizer)
    except (UsageError, RunError) as error:
        return error.message, error.hint
    except RecursionError:
        return f"`{request['kind']}` does not compile: it is nested too deep", "simplify it"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return None

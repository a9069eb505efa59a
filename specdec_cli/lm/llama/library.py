"""A library that the machine's own C++ compiler makes, once, and that the user's cache keeps.

The name of a file says what is in it: `NAME-PROCESSOR-COMPILER-BYTES.so` holds digests of the source and the processor
it is for, of the compiler, and of the file itself. So a file that is damaged, or another one under this name,
is noticed before it is loaded, and processes that build at the same time cannot spoil each other's.

Another user who can write into the cache could have this process run their code, because a digest does not stop them
from making a file that has it. So nothing is read or kept where others can write, and the library is built for one run
alone.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep, time

_SECONDS = 300
_PLACE = "building-"  # of the folders in which a build runs
_TEMPORARY = f"specdec-{_PLACE}"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded|terminated with signal 7")
_INSTALL = {
    "apt-get": "apt-get install g++",
    "dnf": "dnf install gcc-c++",
    "yum": "yum install gcc-c++",
    "zypper": "zypper install gcc-c++",
    "apk": "apk add g++",
    "pacman": "pacman -S gcc",
    "brew": "brew install gcc",  # Apple's compiler has no OpenMP
}
_OTHER_COMPILER = "name another compiler with CXX (g++ or clang++, with OpenMP)"
_log = logging.getLogger(__name__)


class BuildError(Exception):
    """There is no library.

    Args:
        reason: why, as half a sentence.
        remedy: what to do about it.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Library:
    """A library that is loaded.

    Args:
        calls: its functions.
        not_kept: why the next process has to build it again; None where it is kept.
    """

    calls: ctypes.CDLL
    not_kept: str | None


def load_library(
    source: str,
    command: Sequence[str],
    *,
    may_lack_compiler: bool,
    name: str,
    what: str = "a library for this CPU",
) -> Library:
    """Load what a source is compiled to; build it where that was not done before.

    Args:
        source: C++.
        command: the compiler and its options.
        may_lack_compiler: whether a library that was built for this processor will do where the compiler has gone.
        name: that its file begins with.
        what: the library in words, for the log.

    Raises:
        BuildError: it cannot be built or loaded.
    """
    stem = f"{name}-{_digest(source.encode(), ' '.join(command[1:]).encode(), processor().encode())}"
    try:
        # What the compiler defines before it reads a line names itself and the processor's instructions.
        defined = _output_of([*command, "-dM", "-E", os.devnull])
    except BuildError:
        kept = _kept(f"{stem}-*") if may_lack_compiler else None
        if kept is None:
            raise
        return _opened(kept)
    stem += f"-{_digest(defined, command[0].encode())}"
    with _alone(stem):
        kept = _kept(f"{stem}-*")
        if kept is not None:
            return _opened(kept)
        folder = cache_folder()
        try:
            return _opened(_build(_made(folder), stem, source, command, f"{what}, once"))
        except OSError as error:
            not_kept = f"`{folder}` ({error.strerror or error})"
    return _built_for_this_process(stem, source, command, what, not_kept)


def cache_folder() -> Path:
    """Where libraries are kept."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME", "").strip() or Path.home() / ".cache", "specdec")
    except RuntimeError:  # there is no home: nothing can be kept
        return Path(os.devnull, "specdec")


@functools.cache
def processor() -> str:
    """Identity of this processor, including its instruction sets."""
    with suppress(OSError):
        description = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
        keys = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features", "CPU part")
        lines = [line for line in description.splitlines() if line.partition(":")[0].strip() in keys]
        if lines:
            return "\n".join([platform.machine(), *lines])
    return f"{sys.platform} {platform.machine()} {platform.processor()}"


def _built_for_this_process(stem: str, source: str, command: Sequence[str], what: str, not_kept: str) -> Library:
    """Build and load in a folder that is gone afterwards."""
    try:
        with tempfile.TemporaryDirectory(prefix=_TEMPORARY) as folder:
            message = (
                f"{what}, for this run alone: it cannot be kept in {not_kept}, XDG_CACHE_HOME names another folder"
            )
            return Library(ctypes.CDLL(str(_build(Path(folder), stem, source, command, message))), not_kept)
    except OSError as error:
        reason = f"nothing can be built in {not_kept}, nor in a temporary folder: {error.strerror or error}"
        raise BuildError(reason, "make room there, or name another folder with XDG_CACHE_HOME") from error


def _opened(kept: Path) -> Library:
    """Load a library, from a folder of its own where programs may not run in the cache.

    Raises:
        BuildError: it does not load there either.
    """
    with suppress(OSError):
        return Library(ctypes.CDLL(str(kept)), None)
    try:
        with tempfile.TemporaryDirectory(prefix=_TEMPORARY) as folder:
            return Library(ctypes.CDLL(shutil.copy(kept, folder)), None)
    except OSError as error:
        reason = f"its own does not load: {error}"
        raise BuildError(reason, "name a folder where programs may run with XDG_CACHE_HOME") from error


def _kept(pattern: str) -> Path | None:
    """A library of the cache that is whole; others of that name are removed."""
    with suppress(OSError):
        for path in sorted(_made(cache_folder()).glob(f"{pattern}.so")):
            if _is_private(path) and path.stem.rpartition("-")[2] == _digest(path.read_bytes()):
                return path
            path.unlink()
    return None


def _build(folder: Path, stem: str, source: str, command: Sequence[str], what: str) -> Path:
    """Compile a source into a folder, and say so: it takes some seconds.

    Raises:
        OSError: there is no room, or nothing may be written.
        BuildError: it does not compile.
    """
    _remove_abandoned(folder, _PLACE)
    _remove_abandoned(Path(tempfile.gettempdir()), _TEMPORARY)
    with tempfile.TemporaryDirectory(dir=folder, prefix=_PLACE) as place:
        _log.info("compiling %s", what)
        made = Path(place, "made.so")
        _output_of([*command, "-shared", "-fPIC", "-", "-o", str(made)], source.encode(), place)
        if not made.is_file():
            raise BuildError(f"the C++ compiler `{command[0]}` made no library", _OTHER_COMPILER)
        made.chmod(0o700)
        return made.replace(folder / f"{stem}-{_digest(made.read_bytes())}.so")


def _remove_abandoned(folder: Path, prefix: str) -> None:
    """Remove our folders that a process left behind when a signal ended it; no build takes as long as they are old."""
    for place in folder.glob(f"{prefix}*"):
        with suppress(OSError, AttributeError):  # another process may be as quick; Windows knows no users
            status = place.lstat()
            is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if is_own and status.st_mtime < time() - 2 * _SECONDS:
                shutil.rmtree(place, ignore_errors=True)


def _output_of(command: Sequence[str], given: bytes = b"", temporary: str | None = None) -> bytes:
    """The standard output of a compiler, with its temporary files in a folder.

    Raises:
        OSError: it has no room.
        BuildError: it does not run, or refuses.
    """
    environment = os.environ | {"LC_ALL": "C"} | ({} if temporary is None else {"TMPDIR": temporary})
    try:
        done = _run(command, given, environment)
    except subprocess.TimeoutExpired as error:
        reason = f"the C++ compiler `{command[0]}` took more than {_SECONDS} s"
        raise BuildError(reason, _OTHER_COMPILER) from error
    except OSError as error:
        raise _cannot_run(command[0], error) from error
    if done.returncode == 0:
        return done.stdout
    message = done.stderr.decode(errors="replace")
    if _NO_SPACE.search(message):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if done.returncode < 0:
        reason = f"the C++ compiler `{command[0]}` was killed by signal {-done.returncode}"
        raise BuildError(reason, "it may have run out of memory: end other processes, or raise the container's limit")
    lines = [line.strip() for line in message.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
    reason = next((line for line in lines if "error" in line), lines[0])
    raise BuildError(f"its own does not compile: {reason}", _OTHER_COMPILER)


def _run(command: Sequence[str], given: bytes, environment: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
    """Run a compiler, whose own programs (`cc1plus`, `ld`) end with it, whatever ends it.

    Raises:
        OSError: it does not run.
        TimeoutExpired: it takes too long.
    """
    pipe, group = subprocess.PIPE, 0 if os.name == "posix" else None
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, process_group=group
    ) as process:
        try:
            output, errors = process.communicate(given, timeout=_SECONDS)
        except BaseException:
            if group is not None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def _cannot_run(compiler: str, error: OSError) -> BuildError:
    if shutil.which(compiler) is not None:
        return BuildError(f"the C++ compiler `{compiler}` does not run: {error.strerror or error}", _OTHER_COMPILER)
    install = next((words for tool, words in _INSTALL.items() if shutil.which(tool)), None)
    how = "install one" if install is None else f"install one (`{install}`)"
    return BuildError(f"no C++ compiler `{compiler}`", f"{how}, or name one with CXX")


def _made(folder: Path) -> Path:
    """A folder that no other user can write into or replace.

    Raises:
        OSError: there is none, or another user can.
    """
    for place in reversed([place for place in (folder, *folder.parents) if not place.exists()]):
        place.mkdir(mode=0o700, exist_ok=True)
    if not hasattr(os, "geteuid"):
        return folder
    folder = folder.resolve()
    if folder.stat().st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it belongs to another user")
    if folder.stat().st_mode & _OTHERS_WRITE:
        raise PermissionError(errno.EPERM, "others may write there")
    for parent in folder.parents:
        status = parent.stat()
        # A group with the number of its user is that user's alone: umask 002 lets it write.
        others = stat.S_IWOTH if status.st_gid == status.st_uid else _OTHERS_WRITE
        # In a sticky folder, such as /tmp, others cannot rename what is ours.
        if status.st_mode & others and not status.st_mode & stat.S_ISVTX:
            raise PermissionError(errno.EPERM, f"others may write into {parent}")
        if status.st_uid not in (0, os.geteuid()):
            raise PermissionError(errno.EPERM, f"{parent} belongs to another user")
    return folder


def _is_private(path: Path) -> bool:
    """Whether a file is no link, ours, and not writable by others."""
    if not hasattr(os, "geteuid"):
        return True
    status = path.lstat()
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_WRITE


@contextmanager
def _alone(stem: str) -> Iterator[None]:
    """Let one process of this user build a library, where the cache can hold a lock: a byte of one file for each."""
    lock = None
    with suppress(OSError, ImportError):
        import fcntl

        lock = (_made(cache_folder()) / "building.lock").open("w")
        end = monotonic() + _SECONDS
        while monotonic() < end:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, int(_digest(stem.encode())[:15], 16))
                break
            except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, by the system
                sleep(0.05)
    try:
        yield
    finally:
        if lock is not None:
            lock.close()


def _digest(*parts: bytes) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little") + part)
    return whole.hexdigest()[:16]

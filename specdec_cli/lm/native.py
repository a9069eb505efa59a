"""The compiled half of our own decoder: built for this machine's processor by its C++ compiler, once, and kept.

It is compiled where it runs and not when the package is made, because a processor's own instructions (AVX-512's
bfloat16 and whole-number products) are what it is for. That takes some seconds; the result lies in the user's cache,
under a name that follows from the source, the compiler and the processor.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(__file__).with_name("llama_step.cpp")
# Operations may not be joined as the compiler likes: it might join them in one copy of a loop and not in another.
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fopenmp")
_SECONDS = 300
# Looks at what is waited for, a fraction of a millisecond: AMD's processors take less for one than Intel's.
_SPINS, _SPINS_OF_ZEN = "5000", "20000"
# Linux lets a process use a processor's tiles (AMX) once it has asked: arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA).
_ARCH_PRCTL, _ASK, _TILES = 158, 0x1023, 18


def compiler() -> list[str]:
    """The command of the C++ compiler: what CXX names, else the system's usual one."""
    usual = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    return (os.environ.get("CXX", "").strip() or usual).split()


@functools.cache
def missing() -> str | None:
    """Why there is no compiled decoder on this machine; None where it was built and loaded."""
    try:
        library()
    except (OSError, subprocess.SubprocessError) as error:
        return f"no C++ compiler `{compiler()[0]}`" if shutil.which(compiler()[0]) is None else _reason(error)
    return None


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled decoder.

    Raises:
        OSError, subprocess.SubprocessError: it cannot be built or loaded; `missing` says it in words.
    """
    return load(SOURCE.read_text(encoding="utf-8"))


def load(source: str) -> ctypes.CDLL:
    """Build a source if that was not done before, and load it; errors as in `library`."""
    command = [*compiler(), *_FLAGS, *_without_tiles(), "-x", "c++"]
    # What the compiler defines before it reads a line names itself and the processor's instructions.
    defined = subprocess.run([*command, "-dM", "-E", os.devnull], capture_output=True, check=True, timeout=_SECONDS)
    name = hashlib.sha256(defined.stdout + " ".join(command).encode() + source.encode()).hexdigest()[:32]
    path = _folder() / f"llama-step-{name}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder, path.name)
            subprocess.run(
                [*command, "-shared", "-fPIC", "-", "-o", str(made)],
                input=source.encode(),
                capture_output=True,
                check=True,
                timeout=_SECONDS,
            )
            made.replace(path)
    with _short_spins(_SPINS_OF_ZEN if b"__znver" in defined.stdout else _SPINS):
        found = ctypes.CDLL(str(path))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    found.scratch_floats.argtypes, found.scratch_floats.restype = (pointer, pointer), number
    found.panel_outputs.argtypes, found.panel_outputs.restype = (), number
    found.forward.argtypes, found.forward.restype = (pointer, pointer), None
    found.guess.argtypes = (pointer, pointer, pointer, number, number, pointer, pointer, pointer, pointer)
    found.guess.restype = None
    return found


@contextmanager
def _short_spins(num: str) -> Iterator[None]:
    """Have threads that wait for each other sleep soon: GNU's OpenMP asks for it when it is loaded.

    By itself it lets them spin for so many milliseconds that beside busy processes most of a forward is spinning.
    """
    name = "GOMP_SPINCOUNT"
    is_set = name in os.environ
    os.environ.setdefault(name, num)
    try:
        yield
    finally:
        if not is_set:
            del os.environ[name]


@functools.cache
def _without_tiles() -> tuple[str, ...]:
    """What keeps the decoder from tiles where the system does not grant them."""
    is_linux = sys.platform == "linux" and platform.machine() == "x86_64"
    is_granted = is_linux and ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ASK, _TILES) == 0
    return () if is_granted else ("-U__AMX_TILE__",)


@functools.cache
def _folder() -> Path:
    """The user's cache, or where that cannot be written a folder of this process."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME", "").strip() or Path.home() / ".cache", "specdec")
        cache.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # the latter where there is no home
        return _temporary()
    return cache if os.access(cache, os.W_OK) else _temporary()


def _temporary() -> Path:
    return Path(tempfile.mkdtemp(prefix="specdec-"))


def _reason(error: Exception) -> str:
    """The compiler's own first complaint, else the error's first line."""
    said = error.stderr.decode(errors="replace") if isinstance(error, subprocess.CalledProcessError) else str(error)
    lines = [line.strip() for line in said.splitlines() if line.strip()] or [type(error).__name__]
    return f"its own does not compile: {next((line for line in lines if 'error' in line), lines[0])}"

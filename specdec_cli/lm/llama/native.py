"""The compiled half of our own decoder: built for this machine's processor by its C++ compiler, once, and kept.

It is compiled where it runs and not when the package is made, because a processor's own instructions (AVX-512's
bfloat16 and whole-number products) are what it is for. That takes some seconds; the user's cache keeps the result
(`library`).
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specdec_cli.lm.llama.library import BuildError, Library, load_library, processor

SOURCE = Path(__file__).with_name("llama_step.cpp")
# Operations may not be joined as the compiler likes: it might join them in one copy of a loop and not in another.
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fopenmp")
# Older processors by the names that torch gives them, and how to compile without the instructions that they lack.
_OLDER = {"avx2": ("-mno-avx512f",), "default": ("-mno-avx512f", "-mno-avx2", "-mno-fma")}
# Looks at what is waited for, a fraction of a millisecond: AMD's processors take less for one than Intel's.
_SPINS, _SPINS_OF_ZEN = "5000", "20000"
# Linux lets a process use a processor's tiles (AMX) once it has asked: arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA).
_ARCH_PRCTL, _ASK, _TILES = 158, 0x1023, 18


def compiler() -> list[str]:
    """The command of the C++ compiler: what CXX names, else the system's usual one."""
    usual = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    return (_named() or usual).split()


def missing() -> str | None:
    """Why there is no compiled decoder on this machine; None where it was built and loaded."""
    found = _built()
    return found.reason if isinstance(found, BuildError) else None


def remedy(obstacle: str | None) -> str | None:
    """The hint if this keeps our own decoder from running; None if it is missing for another reason."""
    if obstacle is None or not _built.cache_info().currsize:  # not requested yet, and a request would build it
        return None
    found = _built()
    return found.remedy if isinstance(found, BuildError) and found.reason == obstacle else None


def not_kept() -> str | None:
    """Why the decoder that was built has to be built again by the next process; None where it is kept."""
    found = _built()
    return found.not_kept if isinstance(found, Library) else None


def library() -> ctypes.CDLL:
    """The compiled decoder.

    Raises:
        BuildError: it cannot be built or loaded; `missing` says why.
    """
    found = _built()
    if isinstance(found, BuildError):
        raise found
    return found.calls


def source() -> str:
    """The whole source, with its headers in the places where they are included."""
    return with_headers(SOURCE.read_text(encoding="utf-8"))


def with_headers(source: str) -> str:
    """A source with each header of this folder in the place where it is included."""
    return re.sub(r'#include "(.+)"', lambda line: SOURCE.with_name(line[1]).read_text(encoding="utf-8"), source)


@functools.cache
def _built() -> Library | BuildError:
    try:
        return _load(source())
    except BuildError as error:
        return error


def load(source: str) -> ctypes.CDLL:
    """Build a source if that was not done before, and load it; errors as in `library`."""
    return _load(source).calls


def _load(source: str) -> Library:
    command = [*compiler(), *_FLAGS, *_without_tiles(), *_for_older_processor(), "-x", "c++"]
    with _short_spins(_SPINS_OF_ZEN if "AuthenticAMD" in processor() else _SPINS):
        found = load_library(source, command, may_lack_compiler=not _named())
    calls, pointer, number = found.calls, ctypes.c_void_p, ctypes.c_int64
    calls.block_panel_bytes.argtypes, calls.block_panel_bytes.restype = (number, number), number
    calls.fill_panels.argtypes = calls.read_rows.argtypes = (number, pointer, pointer, number, number, pointer, number)
    calls.fill_panels.restype, calls.read_rows.restype = number, None
    calls.scratch_floats.argtypes, calls.scratch_floats.restype = (pointer, pointer), number
    calls.panel_outputs.argtypes, calls.panel_outputs.restype = (), number
    calls.block_outputs.argtypes, calls.block_outputs.restype = (), number
    calls.forward.argtypes, calls.forward.restype = (pointer, pointer), None
    calls.move.argtypes, calls.move.restype = (pointer, pointer, pointer, number), None
    calls.plain_rows.argtypes, calls.plain_rows.restype = (pointer, pointer, pointer, number, pointer), None
    calls.head.argtypes, calls.head.restype = (pointer, pointer, pointer), None
    calls.guess.argtypes = (pointer, pointer, pointer, number, number, pointer, pointer, pointer, pointer)
    calls.guess.restype = None
    return found


def _named() -> str:
    return os.environ.get("CXX", "").strip()


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
    """The variable that keeps the decoder from using tiles if the system does not grant them."""
    is_linux = sys.platform == "linux" and platform.machine() == "x86_64"
    is_granted = is_linux and ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ASK, _TILES) == 0
    return () if is_granted else ("-U__AMX_TILE__",)


def _for_older_processor() -> tuple[str, ...]:
    """Options that leave out what ATEN_CPU_CAPABILITY, which torch's kernels follow, leaves out of x86-64."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return _OLDER.get(os.environ.get("ATEN_CPU_CAPABILITY", ""), ()) if is_x86 else ()

"""The compiled half of our own decoder: built for this machine's processor by its C++ compiler, once, and kept.

It is compiled where it runs and not when the package is made, because a processor's own instructions (AVX-512's
bfloat16 and whole-number products) are what it is for. That takes some seconds; the user's cache keeps the result
(`library`). Each kind of weights has a library of its own, and so has what lays weights out: a run waits for what it
needs.
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

from specdec_cli.errors import RunError
from specdec_cli.lm.llama.library import BuildError, Library, load_library, processor

STEP, LAYOUTS = "llama_step.cpp", "layouts.cpp"
"""The sources: of a forward, and of how weights lie in memory."""
_FOLDER = Path(__file__).parent
# Operations may not be joined as the compiler likes: it might join them in one copy of a loop and not in another.
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fopenmp")
# Older processors by the names that torch gives them, and how to compile without the instructions that they lack.
_OLDER: dict[str, tuple[str, ...]] = {"avx2": ("-mno-avx512f", "-U__AVXVNNI__", "-U__AMX_TILE__")}
_OLDER["default"] = (*_OLDER["avx2"], "-mno-avx2", "-mno-fma")
_WORDS = {
    "": "its layouts of weights",
    "Float32": "float32 weights",
    "BFloat16": "bfloat16 weights",
    "Int8": "int8 weights",
    "Blocks": "weights in blocks",
}
# Looks at what is waited for, a fraction of a millisecond: AMD's processors take less for one than Intel's.
_SPINS, _SPINS_OF_ZEN = "5000", "20000"
# Linux lets a process use a processor's tiles (AMX) once it has asked: arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA).
_ARCH_PRCTL, _ASK, _TILES = 158, 0x1023, 18


def compiler() -> list[str]:
    """The command of the C++ compiler: what CXX names, else the system's usual one."""
    usual = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    return (_named() or usual).split()


def flags() -> list[str]:
    """The compiler's options, with that for this processor's own instructions."""
    is_arm = platform.machine() in ("aarch64", "arm64")
    return [*_FLAGS, "-march=native" if not is_arm else _for_apple() if sys.platform == "darwin" else "-mcpu=native"]


def command() -> list[str]:
    """The compiler with the options that the decoder is built with; it reads the source from its input."""
    return [*compiler(), *flags(), *_without_tiles(), *_for_older_processor(), "-x", "c++"]


def missing() -> str | None:
    """Why there is no compiled decoder on this machine; None where its smallest library was built and loaded."""
    build_result = _built(LAYOUTS)
    return build_result.reason if isinstance(build_result, BuildError) else None


def remedy(obstacle: str | None) -> str | None:
    """The hint if this keeps our own decoder from running; None if it is missing for another reason."""
    if obstacle is None or not _built.cache_info().currsize:  # not requested yet, and a request would build it
        return None
    build_result = _built(LAYOUTS)
    return build_result.remedy if isinstance(build_result, BuildError) and build_result.reason == obstacle else None


def not_kept() -> str | None:
    """Why the decoder that was built has to be built again by the next process; None where it is kept."""
    build_result = _built(LAYOUTS)
    return build_result.not_kept if isinstance(build_result, Library) else None


def layouts() -> ctypes.CDLL:
    """The library that says how weights lie in memory, and puts those of a file there.

    Raises:
        RunError: it cannot be built or loaded; `missing` says why.
    """
    calls, pointer, number = _loaded(_built(LAYOUTS)), ctypes.c_void_p, ctypes.c_int64
    calls.block_panel_bytes.argtypes, calls.block_panel_bytes.restype = (number, number), number
    calls.fill_panels.argtypes = (number, pointer, pointer, number, number, pointer)
    calls.fill_panels.restype = number
    calls.broken_blocks.argtypes, calls.broken_blocks.restype = (number, pointer, number, number), number
    calls.quantize_rows.argtypes, calls.quantize_rows.restype = (number, pointer, number, number, pointer), None
    calls.panel_outputs.argtypes, calls.panel_outputs.restype = (), number
    calls.block_outputs.argtypes, calls.block_outputs.restype = (), number
    return calls


def step(weights: str, is_half: bool) -> ctypes.CDLL:
    """The compiled forward.

    Args:
        weights: kind of those of linear layers: Float32, BFloat16, Int8 or Blocks.
        is_half: whether keys, values and an embedding that is not in blocks are bfloat16; they are float32 else.

    Raises:
        RunError: it cannot be built or loaded.
    """
    build_result = _built(STEP, weights, "uint16_t" if is_half else "float")
    calls, pointer, number = _loaded(build_result), ctypes.c_void_p, ctypes.c_int64
    calls.scratch_floats.argtypes, calls.scratch_floats.restype = (pointer, pointer), number
    calls.forward.argtypes, calls.forward.restype = (pointer, pointer), None
    calls.move.argtypes, calls.move.restype = (pointer, pointer, pointer, number), None
    calls.plain_rows.argtypes, calls.plain_rows.restype = (pointer, pointer, pointer, number, pointer), None
    calls.head.argtypes, calls.head.restype = (pointer, pointer, pointer), None
    calls.guess.argtypes = (pointer, pointer, pointer, number, number, pointer, pointer, pointer, pointer)
    calls.guess.restype = None
    return calls


def source(name: str) -> str:
    """A whole source, with its headers in the places where they are included."""
    return with_headers((_FOLDER / name).read_text(encoding="utf-8"))


def with_headers(source: str) -> str:
    """A source with each header of this folder in the place where it is included."""
    return re.sub(r'#include "(.+)"', lambda line: (_FOLDER / line[1]).read_text(encoding="utf-8"), source)


@functools.cache
def _built(name: str, weights: str = "", numbers: str = "") -> Library | BuildError:
    """The library of a source; of a forward, for one kind of weights and of cached numbers."""
    options = [f"-DWEIGHTS={weights}", f"-DNUMBER={numbers}"] if weights else []
    what = f"our own decoder for this CPU, {_WORDS[weights]}"
    try:
        with _short_spins(_SPINS_OF_ZEN if "AuthenticAMD" in processor() else _SPINS):
            return load_library(
                source(name), [*command(), *options], may_lack_compiler=not _named(), name=Path(name).stem, what=what
            )
    except BuildError as error:
        return error


def _loaded(found: Library | BuildError) -> ctypes.CDLL:
    if isinstance(found, BuildError):
        raise RunError(f"our own decoder cannot run: {found.reason}", found.remedy) from found
    return found.calls


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


def _for_apple() -> str:
    """The option for Apple's processors, which not all compilers look up: all of them have dot products."""
    has_products, size = ctypes.c_int(), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    name = b"hw.optional.arm.FEAT_I8MM"  # an older system does not know it, and leaves 0
    ctypes.CDLL(None).sysctlbyname(name, ctypes.byref(has_products), ctypes.byref(size), None, ctypes.c_size_t(0))
    return f"-march=armv8.4-a+dotprod{'+i8mm' if has_products.value else ''}"


def _for_older_processor() -> tuple[str, ...]:
    """Options that leave out what ATEN_CPU_CAPABILITY, which torch's kernels follow, leaves out of x86-64."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return _OLDER.get(os.environ.get("ATEN_CPU_CAPABILITY", ""), ()) if is_x86 else ()

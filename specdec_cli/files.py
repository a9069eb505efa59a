"""Files named by the user: `~`, paths that are not files, text encodings and compression.

Compression and encoding are recognized by the first bytes, not by the name. A file, a pipe and what a packed file
unpacks to are read up to a limit, and refused as soon as they pass it.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import stat
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from specdec_cli.errors import UsageError

MAX_BYTES = 4 << 30
"""Most bytes that are read from a file, packed or not."""
_MAX_RATIO, _MIN_UNPACKED_BYTES = 32, 256 << 20  # what text unpacks to at most; prompts pack to a third or a tenth
_PIPE_SECONDS = 3.0
_BYTE_ORDER_MARKS = {b"\xff\xfe\0\0": "utf-32", b"\0\0\xfe\xff": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
_ARCHIVES = {b"PK\x03\x04": "a zip archive (so are office documents)", b"7z\xbc\xaf": "a 7z archive"}
_POINTER = b"version https://git-lfs.github.com/spec/"
_CHUNK = 1 << 24


def given_path(name: str | os.PathLike[str]) -> Path:
    """The path of a file named by the user, `~` expanded unless a file has exactly that name.

    Raises:
        UsageError: `~name` of a user without a home folder.
    """
    path = Path(name)
    if not os.fspath(name).startswith("~") or os.path.lexists(path):
        return path
    try:
        return path.expanduser()
    except RuntimeError:
        raise UsageError(f"`{name}` begins with a home folder that does not exist", "write the whole path") from None


def read_bytes(path: Path, what: str) -> bytes:
    """A file's bytes, unpacked where they are packed with gzip, bzip2, xz or Zstandard.

    Args:
        path: of a file or a pipe.
        what: names it in errors.

    Raises:
        UsageError: it is no file, cannot be read, is damaged, an archive, or a git-lfs pointer.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISFIFO(mode):
            data = _from_pipe(path, what)
        elif stat.S_ISSOCK(mode) or stat.S_ISBLK(mode) or (stat.S_ISCHR(mode) and not _is_harmless(path)):
            raise UsageError(f"{what} is a device or a socket, not a file", "name a file")
        else:
            with path.open("rb") as file:
                data = read_limited(file.read, what)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        hint = "name a file in it" if isinstance(error, IsADirectoryError) else "check the path and its permissions"
        raise UsageError(f"{what} cannot be read: {reason}", hint) from error
    return unpacked(data, what, path.suffix.lower())


def read_text(path: Path, what: str) -> str:
    """A file's text.

    Raises:
        UsageError: as `read_bytes`, or it is no text.
    """
    return decoded(read_bytes(path, what), what, path)


class RepeatedKeyError(Exception):
    """A JSON object has a key twice, the exception's text."""


def parse_json(text: str, **how: Any) -> Any:
    """The value of JSON text.

    Args:
        text: to read.
        how: further arguments of `json.loads`.

    Raises:
        RepeatedKeyError: an object has a key twice.
        ValueError, RecursionError: as `json.loads`.
    """
    return json.loads(text, object_pairs_hook=_unique, **how)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise RepeatedKeyError(next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1))
    return values


def encoding_of(data: bytes) -> str:
    """UTF-8, or what a byte-order mark says; the codec drops the mark."""
    return next((name for mark, name in _BYTE_ORDER_MARKS.items() if data.startswith(mark)), "utf-8-sig")


def decoded(data: bytes, what: str, path: Path | None = None) -> str:
    """Text in UTF-8, or in UTF-16 or UTF-32 with its byte-order mark, which is dropped.

    Args:
        data: the bytes.
        what: names their source in an error.
        path: their file, for a command that converts it.

    Raises:
        UsageError: the bytes are something else.
    """
    encoding = encoding_of(data)
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        if encoding == "utf-8-sig" and b"\0" in data:
            raise UsageError(f"{what} is no text but binary data", "name a file of text") from error
        name = "UTF-8" if encoding == "utf-8-sig" else encoding.upper()
        line = data.count(b"\n", 0, error.start) + 1
        hint = f"save it as UTF-8; what Excel or Windows wrote: {_conversion(path)}"
        raise UsageError(f"{what} is not valid {name}: byte `{error.start}`, in line {line}", hint) from error
    if "\0" in text:
        raise UsageError(
            f"{what} is no text: it holds a NUL byte at `{text.index(chr(0))}`",
            "save it as UTF-8; UTF-16 is read where it begins with a byte-order mark",
        )
    return text


def unpacked(data: bytes, what: str, suffix: str = "") -> bytes:
    """Bytes as they were before they were packed.

    Args:
        data: packed or not.
        what: names their source in an error.
        suffix: of the file's name, which may promise what the bytes do not keep.

    Raises:
        UsageError: they are damaged, an archive, a git-lfs pointer, or too many.
    """
    if data.startswith(_POINTER):
        raise UsageError(f"{what} is a git-lfs pointer, not the file itself", "fetch the file: git lfs pull")
    archive = next((name for magic, name in _ARCHIVES.items() if data.startswith(magic)), None)
    if archive is not None:
        raise UsageError(
            f"{what} is {archive}", "unpack it, or export a sheet as CSV, and name the file that comes out"
        )
    opener = next((opener for magic, opener in _OPENERS.items() if data.startswith(magic)), None)
    if opener is None:
        if data and suffix in _PACKED_SUFFIXES:
            raise UsageError(
                f"{what} is not packed as `{suffix}` says, or is damaged", "download it again, or rename it"
            )
        return data
    import lzma

    limit = min(max(_MAX_RATIO * len(data), _MIN_UNPACKED_BYTES), MAX_BYTES)
    try:
        with opener(data) as file:
            plain = _read_until(file.read, limit)
    except UsageError:
        raise
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
        raise UsageError(
            f"{what} cannot be unpacked: {reason}", "it is damaged or incomplete: download it again"
        ) from None
    if plain is None:
        times = f", {limit // len(data)} times its size" if limit < MAX_BYTES else ""
        hint = "check that it is the right file; unpack and shorten it first"
        raise UsageError(f"{what} unpacks to more than {limit >> 20} MiB{times}", hint)
    if plain[257:262] == b"ustar":
        raise UsageError(f"{what} is a tar archive", "unpack it, and name the file that comes out")
    return plain


def without_packing(name: str) -> str:
    """A file's name without the suffix of its packing: `rows.jsonl` of `rows.jsonl.gz`."""
    stem, dot, suffix = name.rpartition(".")
    return stem if f"{dot}{suffix}".lower() in _PACKED_SUFFIXES else name


def _gunzip(data: bytes) -> AbstractContextManager[Any]:
    import gzip

    return gzip.open(io.BytesIO(data))


def _bunzip2(data: bytes) -> AbstractContextManager[Any]:
    import bz2

    return bz2.open(io.BytesIO(data))


def _unxz(data: bytes) -> AbstractContextManager[Any]:
    import lzma

    return lzma.open(io.BytesIO(data))


def _unzstd(data: bytes) -> AbstractContextManager[Any]:
    import pyarrow

    if not pyarrow.Codec.is_available("zstd"):
        raise UsageError("this build of pyarrow reads no Zstandard", "unpack the file first: zstd -d FILE")
    opened: AbstractContextManager[Any] = pyarrow.CompressedInputStream(pyarrow.BufferReader(data), "zstd")
    return opened


def read_limited(read: Callable[[int], bytes | None], what: str, first: bytes = b"") -> bytes:
    """Everything that a source gives.

    Args:
        read: gives at most so many bytes, and none at the end.
        what: names the source in an error.
        first: what was read of it already.

    Raises:
        UsageError: there is too much.
    """
    data = _read_until(read, MAX_BYTES, first)
    if data is None:
        raise UsageError(f"{what} holds more than {MAX_BYTES >> 20} MiB", "shorten it first")
    return data


def _read_until(read: Callable[[int], bytes | None], limit: int, first: bytes = b"") -> bytes | None:
    """Everything that is read; None as soon as it is more than a limit."""
    whole = io.BytesIO()
    whole.write(first)
    while part := read(min(_CHUNK, limit + 1 - whole.tell())):
        if whole.write(part) and whole.tell() > limit:
            return None
    return whole.getvalue()


_OPENERS: dict[bytes, Callable[[bytes], AbstractContextManager[Any]]] = {
    b"\x1f\x8b": _gunzip,
    b"BZh": _bunzip2,
    b"\xfd7zXZ\0": _unxz,
    b"\x28\xb5\x2f\xfd": _unzstd,
}
_PACKED_SUFFIXES = (".gz", ".gzip", ".bz2", ".xz", ".zst", ".zstd")


def _is_harmless(path: Path) -> bool:
    """Whether a character device ends: the null device, or a terminal."""
    if path.samefile(os.devnull):
        return True
    with path.open("rb", buffering=0) as file:
        return file.isatty()


def _from_pipe(path: Path, what: str) -> bytes:
    """Everything that a pipe gives, whose writer may be late but must be there.

    Raises:
        UsageError: the pipe has no writer.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(handle, "rb", buffering=0) as file:
        end = monotonic() + _PIPE_SECONDS
        first: bytes | None = b""
        while first == b"" and monotonic() < end:
            first = file.read(_CHUNK)  # nothing without a writer, None while one is silent
            if first == b"":
                sleep(0.02)
        if first == b"":
            raise UsageError(f"{what} is a pipe without a writer", "start the writer first, or name a file")
        os.set_blocking(handle, True)
        return read_limited(file.read, what, first or b"")


def _conversion(path: Path | None) -> str:
    """The command that makes UTF-8 of a file in Windows' own encoding; its format's suffix stays."""
    convert = "iconv -f WINDOWS-1252 -t UTF-8"
    if path is None:
        return f"... | {convert}"
    plain = without_packing(path.name)
    source = shlex.quote(str(path))
    result = f"utf8{Path(plain).suffix or '.txt'}"
    unpack = {".gz": "gzip", ".gzip": "gzip", ".bz2": "bzip2", ".xz": "xz"}.get(path.suffix.lower(), "zstd")
    return f"{convert} {source} > {result}" if plain == path.name else f"{unpack} -dc {source} | {convert} > {result}"

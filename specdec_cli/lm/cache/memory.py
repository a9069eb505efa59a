"""Memory for what every step reads, weights and a small cache: in huge pages, where the system has them.

A page of 4 KiB has to be looked up every 4 KiB, and in a virtual machine that takes long; one of 2 MiB rarely.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import sys
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

_HUGE = 2 << 20
_CHUNK = 64 << 20
_ALIGNED = 64  # bytes: one vector, one cache line


@dataclass(slots=True)
class Arena:
    """Hands out pieces of large mappings; a mapping lives as long as a tensor in it."""

    _chunk: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    _begin: int = 0

    def zeros(self, num_bytes: int) -> Tensor:
        """Zeros [num_bytes] uint8, beside what was kept before."""
        if self._begin + num_bytes > len(self._chunk):
            self._chunk, self._begin = _mapped(max(num_bytes, _CHUNK)), 0
        piece = self._chunk[self._begin : self._begin + num_bytes]
        self._begin += -(-num_bytes // _ALIGNED) * _ALIGNED
        return piece


def zeros(shape: tuple[int, ...], dtype: torch.dtype, in_huge_pages: bool = True) -> Tensor:
    """Zeros; memory is taken as it is written, of many in small pages: they may never be all used.

    torch's own zeros are written at once.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    return _mapped(num_bytes, in_huge_pages and num_bytes <= _CHUNK)[:num_bytes].view(dtype).view(shape)


def return_freed_memory() -> None:
    """Give memory that was freed back to the system; glibc keeps pieces below 32 MB for later ones of their size.

    While weights move from one layout to another, that would be a second copy of all of them.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # musl has none, and no need of it
        trim(ctypes.c_size_t(0))


def _mapped(num_bytes: int, in_huge_pages: bool = True) -> Tensor:
    """Zeros [at least num_bytes] uint8 from a huge page's beginning on; memory is taken as it is written.

    Raises:
        MemoryError: a limit of the shell or the system is in the way.
    """
    size = -(-num_bytes // _HUGE) * _HUGE + _HUGE
    knows_huge_pages = hasattr(mmap, "MADV_HUGEPAGE")
    try:
        mapping = (
            mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) if knows_huge_pages else mmap.mmap(-1, size)
        )
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise MemoryError(f"{size:,} bytes cannot be mapped") from error
        raise
    if knows_huge_pages:
        with suppress(OSError):  # this Python knows of them, and the system does not
            mapping.madvise(mmap.MADV_HUGEPAGE if in_huge_pages else mmap.MADV_NOHUGEPAGE)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    return whole[-whole.data_ptr() % _HUGE :]

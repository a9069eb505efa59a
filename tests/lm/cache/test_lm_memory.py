"""Weights beside each other in large mappings: each is itself, and none overlaps another."""

import errno
import mmap
from pathlib import Path

import psutil
import pytest
import torch

from specdec_cli.lm.cache import memory
from specdec_cli.lm.cache.memory import Arena, zeros

HUGE = 2 << 20
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class Refusing(mmap.mmap):
    """What a kernel without huge pages says."""

    def madvise(self, *_) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")


@pytest.mark.parametrize("huge_pages", ["here", "unknown to Python", "unknown to the kernel"])
def test_what_is_kept_stays_what_it_was(monkeypatch: pytest.MonkeyPatch, huge_pages: str) -> None:
    if huge_pages == "unknown to Python":
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    elif huge_pages == "unknown to the kernel":
        monkeypatch.setattr(mmap, "mmap", Refusing)
    monkeypatch.setattr(memory, "_CHUNK", 1 << 16)
    arena = Arena()
    given = [
        torch.arange(n * 3, dtype=dtype).view(n, 3)
        for n, dtype in (
            (5, torch.float32),
            (7, torch.bfloat16),
            (9, torch.int8),
            (20_000, torch.float32),
            (4, torch.int8),
        )
    ]
    kept = [arena.zeros(one.nbytes).view(one.dtype).view(one.shape).copy_(one) for one in given]
    for one, its in zip(given, kept, strict=True):
        assert torch.equal(one, its)
        assert its.data_ptr() % 64 == 0
        assert its.is_contiguous()
    kept[1].zero_()
    assert torch.equal(kept[0], given[0])
    assert torch.equal(kept[2], given[2])


def test_a_mapping_begins_where_a_huge_page_does() -> None:
    assert Arena().zeros(3).data_ptr() % HUGE == 0
    assert zeros((2, 3), torch.bfloat16).data_ptr() % HUGE == 0


@pytest.mark.parametrize("shape", [(0, 4), (3, 5), (1 << 9, 1 << 16)])
def test_zeros_are_zeros(shape) -> None:
    found = zeros(shape, torch.bfloat16)
    assert found.shape == shape
    assert found.dtype == torch.bfloat16
    assert not found.any()


def test_more_than_can_be_mapped_is_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_, **__) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(MemoryError, match="bytes cannot be mapped"):
        zeros((1 << 20, 8), torch.float32)


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[madvise]" not in HUGE_PAGES.read_text(), reason="huge pages are not for who asks"
)
def test_many_zeros_take_memory_as_they_are_used() -> None:
    """A long text's cache that holds the beginning of one, a little in each of its parts."""
    before = psutil.Process().memory_info().rss
    found = zeros((64, HUGE), torch.int8)
    found[:, :64] = 1
    assert psutil.Process().memory_info().rss - before < len(found) * HUGE / 4

"""Limits of the control groups (cgroups, v1 and v2) of this process: a container's, a service's, a job's.

Groups are nested, and a process has to keep within the limits of its own group and of every group around it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit that this process is under.

    Args:
        name: who sets it.
        limit_bytes: the limit.
        used_bytes: what is taken of it, without page cache, which the kernel drops when memory is short.
    """

    name: str
    limit_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        """Memory that is still available."""
        return max(self.limit_bytes - self.used_bytes, 0)


def cgroup_limits(root: Path = _ROOT) -> list[MemoryLimit]:
    """The limits of this process's groups and of all groups around them; none where there are no groups.

    Swap is not counted: weights and keys are read at every step.
    """
    limits = []
    for mount, group, is_v2 in _mounts("memory", root):
        for folder in _upwards(mount, group, is_v2):
            limit = _limit_v2(folder) if is_v2 else _limit_v1(folder)
            if limit is not None:
                name = PurePosixPath("/", folder.relative_to(mount))
                limits.append(MemoryLimit(f"cgroup {name}", limit, _used(folder, is_v2)))
    return limits


def cpu_quota(root: Path = _ROOT) -> float | None:
    """Processors' time that this process's groups may use, in processors; None without a limit."""
    quotas = []
    for mount, group, is_v2 in _mounts("cpu", root):
        for path in (group, *group.parents) if group.parts else (group,):
            quota = _quota_v2(mount / path) if is_v2 else _quota_v1(mount / path)
            if quota is not None:
                quotas.append(quota)
    return min(quotas, default=None)


def _quota_v2(folder: Path) -> float | None:
    """`cpu.max` holds microseconds of each period and the period, or `max` and the period."""
    quota, period, *_ = [*" ".join(_lines(folder / "cpu.max")).split(), "", ""]
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) else None


def _quota_v1(folder: Path) -> float | None:
    """Without a limit the quota is -1, which is no number here."""
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota and period else None


def _mounts(controller: str, root: Path) -> Iterator[tuple[Path, PurePosixPath, bool]]:
    """Each mounted hierarchy of a controller: its folder, this process's group below it, whether it is v2."""
    groups = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "" or controller in controllers.split(","):
            groups[controllers == ""] = PurePosixPath(path)
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), (after.split() or [""])[0]
        is_v2 = kind == "cgroup2"
        is_its = is_v2 or (kind == "cgroup" and controller in after.split()[-1].split(","))
        if is_its and is_v2 in groups and len(fields) > 4:
            base, mount = (_unescaped(field) for field in fields[3:5])
            yield root / mount.lstrip("/"), _below(groups[is_v2], base), is_v2


def _below(group: PurePosixPath, base: str) -> PurePosixPath:
    """The group's path below what is mounted; the mounted group itself where it lies elsewhere or cannot be seen."""
    if ".." in group.parts or not group.is_relative_to(base):
        return PurePosixPath()
    return group.relative_to(base)


def _upwards(mount: Path, group: PurePosixPath, is_v2: bool) -> Iterator[Path]:
    """Folders of a group and those around it that limit it, innermost first."""
    for path in (group, *group.parents) if group.parts else (group,):
        folder = mount / path
        if not folder.is_dir():
            continue
        yield folder
        # v1 counts a group in the ones around it only where these say so.
        if not is_v2 and path.parts and _number(folder.parent / "memory.use_hierarchy") == 0:
            return


def _limit_v2(folder: Path) -> int | None:
    """The smaller of what kills (`max`) and what slows down to a crawl (`high`)."""
    given = [_number(folder / name) for name in ("memory.max", "memory.high")]
    return min((limit for limit in given if limit is not None), default=None)


def _limit_v1(folder: Path) -> int | None:
    """The group's limit, or a smaller one around it, which the kernel knows where this process cannot look."""
    given = [_number(folder / "memory.limit_in_bytes"), _stat(folder).get("hierarchical_memory_limit")]
    return min((limit for limit in given if limit is not None), default=None)


def _used(folder: Path, is_v2: bool) -> int:
    used = _number(folder / ("memory.current" if is_v2 else "memory.usage_in_bytes")) or 0
    stat, before = _stat(folder), "" if is_v2 else "total_"
    reclaimable = [stat.get(before + name, 0) for name in ("inactive_file", "active_file", "slab_reclaimable")]
    return max(used - sum(reclaimable), 0)


def _stat(folder: Path) -> dict[str, int]:
    pairs = (line.split() for line in _lines(folder / "memory.stat"))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _number(path: Path) -> int | None:
    """A file's number; None where it holds none (`max`) or cannot be read."""
    text = " ".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None


def _lines(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    return []


def _unescaped(field: str) -> str:
    r"""A path of `mountinfo`, which writes blanks as `\040`."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)

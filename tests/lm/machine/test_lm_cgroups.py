"""A container's share of the processors, on made-up trees of control groups; memory is in `test_lm_device_memory`."""

from pathlib import Path

import pytest

from specdec_cli.lm.machine.cgroups import cpu_quota


def tree(root, group, mount, files, controllers: str = ""):
    """This process in a group of a hierarchy, whose folders hold files."""
    proc = root / "proc/self"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text(f"{3 if controllers else 0}:{controllers}:{group}\n")
    kind = f"- cgroup cgroup rw,{controllers}" if controllers else "- cgroup2 cgroup2 rw"
    (proc / "mountinfo").write_text(f"31 22 0:28 / {mount} rw,relatime shared:9 {kind}\n")
    for name, text in files.items():
        path = root / mount.lstrip("/") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"a/cpu.max": "150000 100000"}, 1.5),
        ({"a/cpu.max": "max 100000"}, None),
        ({"a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000"}, 0.5),
        ({"a/b/cpu.max": "100000 100000", "a/cpu.max": "400000 100000"}, 1.0),
        ({"a/cpu.max": "nonsense"}, None),
        ({"a/cpu.max": "100000 0"}, None),
        ({}, None),
    ],
)
def test_the_smallest_quota_of_a_group_and_those_around_it_holds(tmp_path: Path, files, quota: float | None) -> None:
    assert cpu_quota(tree(tmp_path, "/a/b", "/sys/fs/cgroup", files)) == quota


@pytest.mark.parametrize(("quota_us", "quota"), [("250000", 2.5), ("-1", None), ("0", None)])
def test_a_group_of_the_first_version(tmp_path: Path, quota_us: str, quota: float | None) -> None:
    files = {"job/cpu.cfs_quota_us": quota_us, "job/cpu.cfs_period_us": "100000"}
    assert cpu_quota(tree(tmp_path, "/job", "/sys/fs/cgroup/cpu", files, "cpu,cpuacct")) == quota


def test_without_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None

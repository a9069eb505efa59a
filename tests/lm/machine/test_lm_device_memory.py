"""Memory within limits: made-up trees of control groups, the shell's limits, and everybody asks the same function."""

import ast
import resource
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tiny_models import make_tiny

from specdec_cli.errors import RunError
from specdec_cli.lm import load
from specdec_cli.lm.machine import device_memory as module
from specdec_cli.lm.machine.cgroups import MemoryLimit, cgroup_limits
from specdec_cli.lm.machine.device_memory import check_room, device_memory

PACKAGE = Path(module.__file__).parents[2]
CPU = torch.device("cpu")
GB = 10**9
UNLIMITED = 9223372036854771712  # what v1 writes for no limit


def tree(root: Path, groups: str, mounts: list[tuple[str, str, str]], folders: dict[str, dict[str, Any]]) -> Path:
    """A root with /proc of a process and its mounted groups.

    Args:
        root: made here.
        groups: /proc/self/cgroup.
        mounts: root of the mounted hierarchy, where it is mounted, and kind and options.
        folders: files of each group's folder.
    """
    proc = root / "proc/self"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text(groups)
    lines = ["22 28 0:20 / /sys rw,nosuid - sysfs sysfs rw"]
    for number, (base, mount, kind) in enumerate(mounts):
        name, _, options = kind.partition(" ")
        lines.append(f"{30 + number} 22 0:{number} {base} {mount} rw,relatime shared:9 - {name} {name} rw,{options}")
    (proc / "mountinfo").write_text("\n".join(lines) + "\n")
    for folder, files in folders.items():
        place = root / folder
        place.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            text = "".join(f"{key} {number}\n" for key, number in value.items()) if isinstance(value, dict) else value
            (place / name).write_text(f"{text}\n")
    return root


def v2(limit: Any, current: int = 0, high: Any = "max", **stat: int) -> dict[str, Any]:
    return {"memory.max": limit, "memory.high": high, "memory.current": current, "memory.stat": stat}


def v1(limit: int, usage: int = 0, hierarchy: int = 1, **stat: int) -> dict[str, Any]:
    return {
        "memory.limit_in_bytes": limit,
        "memory.usage_in_bytes": usage,
        "memory.use_hierarchy": hierarchy,
        "memory.stat": stat,
    }


def found(root: Path) -> list[tuple[str, int, int]]:
    return [(limit.name, limit.limit_bytes, limit.free_bytes) for limit in cgroup_limits(root)]


V2, V1 = "/sys/fs/cgroup", "/sys/fs/cgroup/memory"


def test_a_group_of_v2_without_its_page_cache(tmp_path: Path) -> None:
    stat = {"anon": 400, "inactive_file": 200, "active_file": 100, "slab_reclaimable": 50, "file": 300}
    root = tree(tmp_path, "0::/app\n", [("/", V2, "cgroup2")], {f".{V2}/app": v2(1000, 800, **stat)})
    assert found(root) == [("cgroup /app", 1000, 550)]


def test_a_container_of_v2_sees_itself_as_the_root(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/\n", [("/", V2, "cgroup2")], {f".{V2}": v2(2 << 30, 1 << 30)})
    assert found(root) == [("cgroup /", 2 << 30, 1 << 30)]


def test_groups_lie_in_each_other(tmp_path: Path) -> None:
    """A neighbour has taken most of what the outer group may have; the innermost has no limit at all."""
    folders = {
        f".{V2}/kube/pod/app": v2("max", 10),
        f".{V2}/kube/pod": v2(900, 100),
        f".{V2}/kube": v2(1000, 950),
        f".{V2}": {"memory.stat": {}},
    }
    root = tree(tmp_path, "0::/kube/pod/app\n", [("/", V2, "cgroup2")], folders)
    assert found(root) == [("cgroup /kube/pod", 900, 800), ("cgroup /kube", 1000, 50)]


def test_a_limit_that_slows_down_is_one(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/a\n", [("/", V2, "cgroup2")], {f".{V2}/a": v2(1000, 100, high=700)})
    assert found(root) == [("cgroup /a", 700, 600)]


def test_a_group_of_v1_and_its_hidden_parents(tmp_path: Path) -> None:
    """Without a namespace a container mounts its own folder, and only `memory.stat` knows the limits around it."""
    groups = "5:cpu,cpuacct:/x\n4:memory:/docker/ab\n1:name=systemd:/docker/ab\n"
    stat = {"hierarchical_memory_limit": 900, "total_inactive_file": 100, "total_active_file": 50, "inactive_file": 1}
    root = tree(tmp_path, groups, [("/docker/ab", V1, "cgroup memory")], {f".{V1}": v1(UNLIMITED, 300, **stat)})
    assert found(root) == [("cgroup /", 900, 750)]


def test_a_v1_group_counts_in_its_parents_where_they_say_so(tmp_path: Path) -> None:
    folders = {
        f".{V1}/slurm/job": v1(1000, 200),
        f".{V1}/slurm": v1(600, 500, hierarchy=1),
        f".{V1}": v1(100, hierarchy=0),
    }
    root = tree(tmp_path, "4:memory:/slurm/job\n", [("/", V1, "cgroup memory")], folders)
    assert found(root) == [("cgroup /slurm/job", 1000, 800), ("cgroup /slurm", 600, 100)]


def test_both_versions_may_be_mounted(tmp_path: Path) -> None:
    groups = "4:hugetlb,memory:/a b\n0::/init.scope\n"
    mounts = [
        ("/", "/sys/fs/cgroup/cpu", "cgroup cpu"),
        ("/", "/sys/fs/cgroup/hugetlb,memory", "cgroup hugetlb,memory"),
        ("/", "/sys/fs/cgroup/unified", "cgroup2 nsdelegate"),
    ]
    folders = {
        "sys/fs/cgroup/cpu/a b": v1(1),
        "sys/fs/cgroup/hugetlb,memory/a b": v1(500, 100),
        "sys/fs/cgroup/unified/init.scope": {"cgroup.procs": 1},
    }
    assert found(tree(tmp_path, groups, mounts, folders)) == [("cgroup /a b", 500, 400)]


def test_a_mount_point_with_a_blank(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/.a\n", [("/", "/my\\040groups", "cgroup2")], {"my groups/.a": v2(7)})
    assert found(root) == [("cgroup /.a", 7, 7)]


@pytest.mark.parametrize("group", ["/../other", "/elsewhere", "/"])
def test_a_group_that_cannot_be_seen_is_what_is_mounted(tmp_path: Path, group: str) -> None:
    root = tree(tmp_path, f"0::{group}\n", [("/mine", V2, "cgroup2")], {f".{V2}": v2(70)})
    assert found(root) == [("cgroup /", 70, 70)]


@pytest.mark.parametrize(
    "files",
    [
        {},
        v2("max"),
        v2("nonsense"),
        {"memory.max": "", "memory.high": "-1"},
        {"memory.limit_in_bytes": 5},
    ],
)
def test_no_limit_is_none(tmp_path: Path, files) -> None:
    assert found(tree(tmp_path, "0::/a\n", [("/", V2, "cgroup2")], {f".{V2}/a": files})) == []


def test_a_limit_without_a_count_is_free(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/a\n", [("/", V2, "cgroup2")], {f".{V2}/a": {"memory.max": 9, "memory.stat": "x y z"}})
    assert found(root) == [("cgroup /a", 9, 9)]


def test_more_taken_than_the_limit_leaves_nothing(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/a\n", [("/", V2, "cgroup2")], {f".{V2}/a": v2(100, 150)})
    assert found(root) == [("cgroup /a", 100, 0)]


@pytest.mark.parametrize("groups", ["", "nonsense\n", "0::\n", "4:memory:/gone\n", "0::/a\n" * 3])
def test_a_machine_without_groups_has_none(tmp_path: Path, groups: str) -> None:
    assert found(tree(tmp_path / "a", groups, [], {})) == []
    assert cgroup_limits(tmp_path / "nowhere") == []
    assert found(tree(tmp_path / "b", groups, [("/", V1, "cgroup memory")], {})) == []


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """A machine of 64 GB, 40 of them free, without limits; returns what sets some."""
    memory = psutil.virtual_memory()._replace(total=64 * GB, available=40 * GB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)

    def limits(groups=(), shell=(), mapped=0) -> None:
        monkeypatch.setattr(module, "cgroup_limits", lambda: list(groups))
        monkeypatch.setattr(module, "_shell_limits", lambda: iter(shell))
        monkeypatch.setattr(module, "_mapped_weights", lambda: mapped)

    limits()
    return limits


def test_a_machine_without_limits(machine) -> None:
    memory = device_memory(CPU)
    assert (memory.total_bytes, memory.free_bytes, memory.limit) == (64 * GB, 40 * GB, None)


def test_point_5_the_tightest_limit_holds(machine) -> None:
    small, empty = MemoryLimit("cgroup /a", 2 * GB, GB // 2), MemoryLimit("cgroup /", 8 * GB, 7 * GB)
    machine([small, empty], [MemoryLimit("ulimit -v", 30 * GB, 5 * GB)])
    memory = device_memory(CPU)
    assert (memory.total_bytes, memory.free_bytes, memory.limit) == (2 * GB, 1 * GB, small)


def test_a_limit_above_the_machine_is_none(machine) -> None:
    machine([MemoryLimit("cgroup /", UNLIMITED, GB)])
    assert device_memory(CPU).limit is None
    assert device_memory(CPU).free_bytes == 40 * GB


def test_mapped_weights_are_not_free(machine) -> None:
    machine([MemoryLimit("cgroup /a", 8 * GB, GB)], mapped=3 * GB)
    assert device_memory(CPU).free_bytes == 4 * GB
    machine([], [MemoryLimit("ulimit -v", 5 * GB, 4 * GB)], mapped=3 * GB)
    assert device_memory(CPU).free_bytes == GB, "what is mapped counts in the address space already"
    machine(mapped=50 * GB)
    assert device_memory(CPU).free_bytes == 0


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not keep to it")
@pytest.mark.parametrize(("name", "kind"), [("-v", "RLIMIT_AS"), ("-d", "RLIMIT_DATA")])
def test_the_shell_s_limits(name: str, kind: str) -> None:
    used = psutil.Process().memory_info()
    taken = used.vms if name == "-v" else used.data
    soft, hard = resource.getrlimit(getattr(resource, kind))
    resource.setrlimit(getattr(resource, kind), (taken + GB // 2, hard))
    try:
        memory = device_memory(CPU)
    finally:
        resource.setrlimit(getattr(resource, kind), (soft, hard))
    assert memory.free_bytes <= GB // 2
    assert memory.limit is not None
    assert memory.limit.name == f"ulimit {name}"


def test_weights_that_are_mapped_are_found(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(3 << 20))
    before = module._mapped_weights()
    storage = torch.UntypedStorage.from_file(str(path), False, 3 << 20)
    if Path("/proc/self/maps").exists():
        assert module._mapped_weights() - before == 3 << 20
    del storage


def test_weights_that_do_not_fit_name_the_limit(machine) -> None:
    machine([MemoryLimit("cgroup /a", 2 * GB, GB)])
    check_room("m", GB, "bfloat16", CPU, "hint")
    with pytest.raises(RunError, match=r"`m` in bfloat16 needs 2.0 GB .* `1.0` GB .* within the limit of cgroup /a"):
        check_room("m", 2 * GB, "bfloat16", CPU, "hint")


@pytest.mark.parametrize(
    ("options", "share", "fits"),
    [
        ({}, 0.9, False),
        ({}, 1.0, True),
        ({"dtype": "float32"}, 0.9, False),
        ({"dtype": "bfloat16"}, 0.6, True),
        ({"dtype": "bfloat16"}, 0.4, False),
        ({"quantize": "int8"}, 0.3, True),
        ({"quantize": "int8"}, 0.2, False),
    ],
)
def test_weights_that_do_not_fit_are_not_read(
    machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options, share: float, fits: bool
) -> None:
    folder = make_tiny("llama", tmp_path)
    size = (folder / "model.safetensors").stat().st_size
    machine([MemoryLimit("cgroup /a", int(share * size), 0)])

    class ReadError(Exception):
        """Weights are read."""

    def read(*_, **__) -> None:
        raise ReadError

    monkeypatch.setattr("specdec_cli.lm.from_files.model_from_files", read)
    with pytest.raises(RunError) as error:
        load.load_lm(str(folder), **options)
    assert ("within the limit of cgroup /a" in error.value.message) != fits
    assert (type(error.value.__cause__) is ReadError) == fits


def test_point_5_everybody_asks_one_function() -> None:
    asks = {}
    for path in PACKAGE.rglob("*.py"):
        names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        asks_memory = "getrlimit" in names and not names & {"RLIMIT_NOFILE", "RLIMIT_STACK"}
        if asks_memory or names & {"virtual_memory", "mem_get_info", "sysconf", "swap_memory"}:
            asks[path.name] = names
    assert list(asks) == ["device_memory.py"]

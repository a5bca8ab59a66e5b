"""Limits.read on laid-out trees: every kind of control group, resource limits, the kernel's estimate."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from streamload.memory import Limit, Limits

MiB = 1024 * 1024
GiB = 1024 * MiB

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
CPU_MOUNT = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct"
UNIFIED_MOUNT = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw"
V1_UNLIMITED = 9223372036854771712
MEMINFO = "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\n"


class Tree:
    """A file-system root below a temporary folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.put("proc/meminfo", MEMINFO)

    def put(self, path: str, text: object) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def process(self, groups: str, *mounts: str) -> None:
        self.put("proc/self/cgroup", groups)
        self.put("proc/self/mountinfo", "\n".join(mounts))

    def v2(self, group: str, limit: object, current: int, high: object = "max", **stat: int) -> None:
        folder = f"/sys/fs/cgroup{group}"
        self.put(f"{folder}/memory.max", limit)
        self.put(f"{folder}/memory.high", high)
        self.put(f"{folder}/memory.current", current)
        self.put(f"{folder}/memory.stat", "\n".join(f"{key} {value}" for key, value in stat.items()))

    def v1(self, group: str, limit: int, usage: int, **stat: int) -> None:
        folder = f"/sys/fs/cgroup/memory{group}"
        self.put(f"{folder}/memory.limit_in_bytes", limit)
        self.put(f"{folder}/memory.usage_in_bytes", usage)
        self.put(f"{folder}/memory.stat", "\n".join(f"{key} {value}" for key, value in stat.items()))

    def read(self) -> Limits:
        return Limits.read(str(self.root))

    def groups(self) -> dict[str, tuple[int, int]]:
        """Limits of control groups: file -> (limit, used)."""
        return {each.source: (each.limit, each.used) for each in self.read().limits if each.source.startswith("/sys")}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_no_control_group_at_all(tree: Tree):
    limits = tree.read()
    assert limits.limits == (Limit("/proc/meminfo MemAvailable", 16 * GiB, 8 * GiB),)
    assert limits.available == 8 * GiB


def test_nothing_told(tmp_path: Path):
    # Not Linux, or /proc is not mounted: nothing binds, and nobody crashes.
    limits = Limits.read(str(tmp_path))
    assert limits.limits == ()
    assert limits.binding is None
    assert limits.available == 1 << 60


def test_v2_root_has_no_limit_files(tree: Tree):
    tree.process("0::/", V2_MOUNT)
    tree.put("sys/fs/cgroup/memory.stat", "inactive_file 7")
    assert tree.groups() == {}
    assert tree.read().binding == Limit("/proc/meminfo MemAvailable", 16 * GiB, 8 * GiB)


def test_v2_nested_every_level_counts_and_high_binds(tree: Tree):
    tree.process("0::/system.slice/job.service/worker", V2_MOUNT)
    tree.v2("/system.slice/job.service/worker", "max", 100 * MiB)
    tree.v2("/system.slice/job.service", 4 * GiB, 300 * MiB, high=2 * GiB)
    tree.v2("/system.slice", 6 * GiB, 500 * MiB)
    tree.v2("/other.slice", 1 * MiB, 0)
    job = "/sys/fs/cgroup/system.slice/job.service"
    assert tree.groups() == {
        f"{job}/memory.max": (4 * GiB, 300 * MiB),
        f"{job}/memory.high": (2 * GiB, 300 * MiB),
        "/sys/fs/cgroup/system.slice/memory.max": (6 * GiB, 500 * MiB),
    }
    assert tree.read().binding == Limit(f"{job}/memory.high", 2 * GiB, 300 * MiB)
    assert tree.read().available == 2 * GiB - 300 * MiB


def test_v1_parent_limits_though_ours_is_unlimited(tree: Tree):
    tree.process("5:cpu,cpuacct:/jobs/a\n4:memory:/jobs/a\n1:name=systemd:/", CPU_MOUNT, V1_MOUNT)
    tree.v1("/jobs/a", V1_UNLIMITED, 10 * MiB)
    tree.v1("/jobs", 512 * MiB, 112 * MiB)
    tree.v1("", V1_UNLIMITED, 900 * MiB)
    source = "/sys/fs/cgroup/memory/jobs/memory.limit_in_bytes"
    assert tree.groups() == {source: (512 * MiB, 112 * MiB)}
    assert tree.read().binding == Limit(source, 512 * MiB, 112 * MiB)
    assert tree.read().available == 400 * MiB


def test_hybrid_takes_memory_from_v1(tree: Tree):
    # systemd's hybrid layout: the unified hierarchy is there, but memory is controlled by v1.
    tree.process("4:memory:/job\n0::/job", V1_MOUNT, UNIFIED_MOUNT)
    tree.v1("/job", 256 * MiB, 56 * MiB)
    tree.put("sys/fs/cgroup/unified/job/cgroup.procs", 1)
    assert tree.groups() == {"/sys/fs/cgroup/memory/job/memory.limit_in_bytes": (256 * MiB, 56 * MiB)}
    assert tree.read().available == 200 * MiB


@pytest.mark.parametrize(
    ("group", "mount_root", "folder"),
    [
        ("/", "/", ""),  # private namespace: the container's group is its root
        ("/docker/abc", "/docker/abc", ""),  # host namespace: the mount starts at the container's group
        ("/docker/abc/worker", "/docker/abc", "/worker"),
        ("/kubepods/pod1/gone", "/", ""),  # told from a root that we do not see: the mount point is what we have
        ("/../outside", "/", ""),  # moved out of its namespace
    ],
)
def test_v2_in_a_container(tree: Tree, group: str, mount_root: str, folder: str):
    tree.process(f"0::{group}", V2_MOUNT.replace(" / ", f" {mount_root} ", 1))
    tree.v2("", 3 * GiB, 1 * GiB)
    if folder:
        tree.v2(folder, 2 * GiB, 1 * GiB)
    source = f"/sys/fs/cgroup{folder}/memory.max"
    assert tree.read().binding == Limit(source, 2 * GiB if folder else 3 * GiB, 1 * GiB)
    assert tree.groups()["/sys/fs/cgroup/memory.max"] == (3 * GiB, 1 * GiB)


def test_v1_in_docker(tree: Tree):
    tree.process("4:memory:/docker/abc", V1_MOUNT.replace(" / ", " /docker/abc ", 1))
    tree.v1("", 1 * GiB, 24 * MiB)
    assert tree.groups() == {"/sys/fs/cgroup/memory/memory.limit_in_bytes": (1 * GiB, 24 * MiB)}
    assert tree.read().available == 1000 * MiB


def test_unlimited_everywhere(tree: Tree):
    tree.process("4:memory:/a\n0::/a", V1_MOUNT, V2_MOUNT)
    tree.v1("/a", V1_UNLIMITED, 10)
    tree.v2("/a", "max", 10)
    assert tree.groups() == {}
    assert tree.read().binding == Limit("/proc/meminfo MemAvailable", 16 * GiB, 8 * GiB)


def test_v2_file_cache_is_credited_and_shmem_is_not(tree: Tree):
    tree.process("0::/job", V2_MOUNT)
    stat = {
        "anon": 100 * MiB,
        "file": 450 * MiB,
        "inactive_file": 300 * MiB,
        "active_file": 50 * MiB,
        "shmem": 100 * MiB,
    }
    tree.v2("/job", 1 * GiB, 550 * MiB, **stat)
    assert tree.groups() == {"/sys/fs/cgroup/job/memory.max": (1 * GiB, 200 * MiB)}
    assert tree.read().available == 824 * MiB


def test_v1_file_cache_is_that_of_the_whole_branch(tree: Tree):
    # The plain keys are the group's own pages; usage_in_bytes counts its children too, as the total_ keys do.
    tree.process("4:memory:/job", V1_MOUNT)
    stat = {"inactive_file": 1, "active_file": 2, "total_inactive_file": 30 * MiB, "total_active_file": 10 * MiB}
    tree.v1("/job", 100 * MiB, 60 * MiB, **stat)
    assert tree.groups() == {"/sys/fs/cgroup/memory/job/memory.limit_in_bytes": (100 * MiB, 20 * MiB)}


def test_more_cache_than_usage_is_no_negative_use(tree: Tree):
    # The two files are read one after the other, so they need not agree.
    tree.process("0::/job", V2_MOUNT)
    tree.v2("/job", 1 * GiB, 10, inactive_file=20)
    assert tree.groups() == {"/sys/fs/cgroup/job/memory.max": (1 * GiB, 0)}


def test_a_group_over_its_limit_leaves_nothing(tree: Tree):
    tree.process("0::/job", V2_MOUNT)
    tree.v2("/job", 1 * GiB, 2 * GiB, high=512 * MiB)
    assert tree.read().available == 0


def test_meminfo_binds_when_the_group_allows_more(tree: Tree):
    tree.process("0::/job", V2_MOUNT)
    tree.v2("/job", 64 * GiB, 1 * GiB)
    assert len(tree.read().limits) == 2
    assert tree.read().binding == Limit("/proc/meminfo MemAvailable", 16 * GiB, 8 * GiB)


@pytest.mark.parametrize(
    "odd",
    [
        "24 23 0:9 / /mnt rw,relatime - tmpfs  rw",  # mounted with an empty source
        "24 23 0:9 / /mnt rw shared:1 master:2 propagate_from:3 - tmpfs none rw",
        "24 23 0:9 / /mnt\\040with\\040spaces rw - fuse.sshfs me@host:/x rw,user_id=0",
    ],
)
def test_odd_mounts_do_not_disturb(tree: Tree, odd: str):
    tree.process("0::/job", odd, V2_MOUNT)
    tree.v2("/job", 1 * GiB, 24 * MiB)
    assert tree.groups() == {"/sys/fs/cgroup/job/memory.max": (1 * GiB, 24 * MiB)}


def test_a_root_that_is_not_normal_is_walked_to_its_top(tree: Tree):
    tree.process("0::/a/b", V2_MOUNT)
    tree.v2("/a/b", "max", 1)
    tree.v2("", 1 * GiB, 24 * MiB)
    limits = Limits.read(f"{tree.root}/proc/..").limits
    assert [limit.limit for limit in limits] == [1 * GiB, 16 * GiB]


@pytest.mark.parametrize(("name", "key"), [("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")])
def test_resource_limits_bind(name: str, key: str):
    # In a process of its own: the limit cannot be lifted again.
    code = f"""
import resource
from streamload.memory import Limits
resource.setrlimit(resource.{name}, ({1 * GiB}, {1 * GiB}))
limit = Limits.read().binding
used = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("{key}:"))
print(limit.source, limit.limit, abs(limit.used - used) < {16 * MiB}, limit.available == limit.limit - limit.used)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [name, str(1 * GiB), "True", "True"]


def test_this_machine():
    limits = Limits.read()
    sources = [limit.source for limit in limits.limits]
    assert "/proc/meminfo MemAvailable" in sources
    assert len(sources) == len(set(sources))
    assert limits.binding in limits.limits
    assert limits.available == min(limit.available for limit in limits.limits)
    assert 64 * MiB < limits.available < 1 << 50
    assert all(limit.limit > 0 and limit.used >= 0 for limit in limits.limits)

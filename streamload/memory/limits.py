"""How much memory this process may still take, and what says so.

Read from control groups (v1 and v2, every level up to the mount), resource limits and the kernel's own estimate. Page
cache counts against a control group but is given back under pressure, so it is credited.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

_UNLIMITED = 1 << 60  # control groups v1 say "no limit" with a number near 2**63


class Limit(NamedTuple):
    """One limit on memory, in bytes."""

    source: str
    """The file or system call that says so."""
    limit: int
    used: int
    """Bytes that count against it and cannot be reclaimed."""

    @property
    def available(self) -> int:
        """Bytes that are left, never negative."""
        return max(0, self.limit - self.used)


@dataclass(frozen=True)
class Limits:
    """All limits on this process's memory at one moment."""

    limits: tuple[Limit, ...]

    @property
    def binding(self) -> Limit | None:
        """The limit that leaves least, or ``None`` on a system that tells of none."""
        return min(self.limits, key=lambda limit: limit.available, default=None)

    @property
    def available(self) -> int:
        """Bytes that the binding limit leaves."""
        return self.binding.available if self.binding else _UNLIMITED

    @classmethod
    def read(cls, root: str = "/") -> Limits:
        """Read the limits of this process below the file-system root ``root`` (tests lay trees of their own)."""
        found = [*_control_groups(root), *_resource_limits(root)]
        meminfo = _table(os.path.join(root, "proc/meminfo"))
        if "MemAvailable" in meminfo:
            total, free = meminfo.get("MemTotal", 0) * 1024, meminfo["MemAvailable"] * 1024
            found.append(Limit("/proc/meminfo MemAvailable", total, total - free))
        return cls(tuple(found))


def _control_groups(root: str) -> Iterator[Limit]:
    for version, folder, mount in _own_groups(root):
        while True:
            yield from _group_limits(version, folder, root)
            if folder == mount or len(folder) <= len(mount):
                break
            folder = os.path.dirname(folder)


def _own_groups(root: str) -> Iterator[tuple[int, str, str]]:
    """(version, folder of our own group, mount point) for each hierarchy that can limit memory."""
    paths: dict[int, str] = {}
    for line in _lines(os.path.join(root, "proc/self/cgroup")):
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            paths[1] = path
        elif number == "0" and not controllers:
            paths[2] = path
    for line in _lines(os.path.join(root, "proc/self/mountinfo")):
        left, _, right = line.partition(" - ")
        mount_root, mount = left.split()[3:5]
        kind, *_, options = right.split()  # what lies between, the source, may be empty
        version = 2 if kind == "cgroup2" else 1 if kind == "cgroup" and "memory" in options.split(",") else 0
        if version in paths:
            # Inside a container the path can be told from the host's root while the mount starts at the container's.
            path = paths[version].removeprefix(mount_root if mount_root != "/" else "")
            base = os.path.normpath(os.path.join(root, mount.lstrip("/")))
            folder = os.path.normpath(os.path.join(base, path.lstrip("/")))
            yield version, folder if os.path.isdir(folder) else base, base


def _group_limits(version: int, folder: str, root: str) -> Iterator[Limit]:
    files = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
    usage = _number(os.path.join(folder, "memory.current" if version == 2 else "memory.usage_in_bytes"))
    stat = _table(os.path.join(folder, "memory.stat"))
    prefix = "" if version == 2 else "total_"
    reclaimable = sum(stat.get(prefix + key, 0) for key in ("inactive_file", "active_file"))
    for name in files:
        path = os.path.join(folder, name)
        limit = _number(path)
        if limit is not None and usage is not None and limit < _UNLIMITED:
            yield Limit(path.removeprefix(root.rstrip("/")), limit, max(0, usage - reclaimable))


def _resource_limits(root: str) -> Iterator[Limit]:
    status = _table(os.path.join(root, "proc/self/status"))
    for name, number, key in (
        ("RLIMIT_AS", resource.RLIMIT_AS, "VmSize"),
        ("RLIMIT_DATA", resource.RLIMIT_DATA, "VmData"),
    ):
        soft = resource.getrlimit(number)[0]
        if soft != resource.RLIM_INFINITY and key in status:
            yield Limit(name, soft, status[key] * 1024)


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().splitlines()
    except OSError:
        return []  # not Linux, or not mounted: then this source of limits does not exist


def _number(path: str) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _table(path: str) -> dict[str, int]:
    """``Key: 12 kB`` or ``key 12`` lines, as numbers."""
    rows = (line.replace(":", " ").split() for line in _lines(path))
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}

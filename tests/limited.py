"""Run a command in a memory control group of its own, below the one we are in (v1 or v2; needs to be permitted)."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Outcome:
    code: int
    output: str
    peak: int
    """Bytes charged to the group at most: anonymous memory and page cache."""

    @property
    def killed(self) -> bool:
        return self.code == -9


def run_limited(command: list[str], limit: int, *, timeout: float = 120) -> Outcome:
    """Run ``command`` with at most ``limit`` bytes of memory and no swap. Skips the test where that is not permitted."""
    version, own = _own_group()
    group = own / f"streamload-test-{os.getpid()}-{time.monotonic_ns()}"
    try:
        group.mkdir()
        _write(group / ("memory.limit_in_bytes" if version == 1 else "memory.max"), limit)
        if version == 2:
            _write(group / "memory.swap.max", 0)
    except OSError as error:
        pytest.skip(f"no control group of our own: {error}")

    def enter() -> None:
        _write(group / "cgroup.procs", 0)

    try:
        done = subprocess.run(
            command, preexec_fn=enter, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout
        )
        peak = (group / ("memory.max_usage_in_bytes" if version == 1 else "memory.peak")).read_text()
        return Outcome(done.returncode, done.stdout, int(peak))
    finally:
        _remove(group)


def own_usage() -> int:
    """Bytes charged to our own group now, without page cache, which can be taken back."""
    version, own = _own_group()
    usage = int((own / ("memory.usage_in_bytes" if version == 1 else "memory.current")).read_text())
    stat = dict(line.split() for line in (own / "memory.stat").read_text().splitlines())
    return usage - int(stat["total_cache" if version == 1 else "file"])


def _own_group() -> tuple[int, Path]:
    paths = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            paths["cgroup"] = path
        elif number == "0":
            paths["cgroup2"] = path
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split()[:3]
        folder = Path(left.split()[4]) / paths.get(kind, "/").lstrip("/")
        if kind == "cgroup" and "memory" in options.split(",") and kind in paths:
            return 1, folder
        controllers = folder / "cgroup.controllers"
        if kind == "cgroup2" and controllers.exists() and "memory" in controllers.read_text().split():
            return 2, folder
    pytest.skip("no memory control group is mounted")


def _write(path: Path, value: int) -> None:
    path.write_text(str(value))


def _remove(group: Path) -> None:
    for _ in range(100):  # the kernel lets go of a group's last process a moment after it has ended
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.05)

"""A host with hardly any memory beyond the parameters, cold: we finish with every value right, others do not."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.big import write_big
from tests.limited import Outcome, run_limited

MiB = 1 << 20
SHAPES = {"embed.weight": (20000, 2048)} | {f"layers.{n}.weight": (4096, 4096) for n in range(20)}
PARAMS = sum(2 * rows * columns for rows, columns in SHAPES.values())

pytestmark = [pytest.mark.slow, pytest.mark.cgroup]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return write_big(tmp_path_factory.mktemp("constrained") / "model.safetensors", SHAPES)


@pytest.fixture(scope="module")
def base(checkpoint) -> int:
    """What Python, torch and this test take in a group of their own before anything is loaded."""
    outcome = run("none", checkpoint, 8 << 30)
    return json.loads(outcome.output)["usage"]


def run(way: str, path: str, limit: int, timeout: float = 120) -> Outcome:
    command = [sys.executable, "-m", "tests.loading.constrained", way, path]
    outcome = run_limited(command, limit, timeout=timeout)
    print(f"{way}: limit {limit / MiB:.0f} MiB, {'killed' if outcome.killed else outcome.output.strip()}")
    return outcome


def test_20_mib_to_spare(checkpoint, base):
    run("streamload", checkpoint, 8 << 30)  # its time is printed, to hold the others against
    ours = run("streamload", checkpoint, base + PARAMS + 20 * MiB)
    assert ours.code == 0, ours.output
    assert json.loads(ours.output)["wrong"] == []
    assert json.loads(ours.output)["peak"] <= PARAMS + 5 * MiB
    run("safe_open", checkpoint, base + PARAMS + 20 * MiB)


def test_we_finish_where_load_file_does_not(checkpoint, base):
    """Mapped pages can be taken back, so the kernel either kills such a load or takes them away as fast as it maps them."""
    for spare in (4, 3):
        limit = base + PARAMS + spare * MiB
        try:
            finished = not run("load_file", checkpoint, limit, timeout=15).killed
        except subprocess.TimeoutExpired:
            print("load_file: still at it after 15 s")
            finished = False
        if not finished:
            ours = run("streamload", checkpoint, limit)
            assert ours.code == 0, ours.output
            assert json.loads(ours.output)["wrong"] == []
            return
    pytest.fail("load_file always finished")


def test_a_model_larger_than_the_memory_shares_the_pages_of_its_file(checkpoint, base):
    limit = base + 150 * MiB
    assert limit < base + PARAMS / 4
    ours = run("shared", checkpoint, limit)
    assert ours.code == 0, ours.output
    assert json.loads(ours.output)["wrong"] == []
    assert json.loads(ours.output)["peak"] <= 4 * MiB
    assert run("streamload", checkpoint, limit).code != 0  # parameters of its own do not fit

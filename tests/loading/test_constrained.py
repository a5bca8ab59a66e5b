"""A host with hardly any memory beyond the parameters, cold: we finish with every value right, others do not."""

from __future__ import annotations

import json
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


def run(way: str, path: str, limit: int) -> Outcome:
    outcome = run_limited([sys.executable, "-m", "tests.loading.constrained", way, path], limit)
    print(f"{way}: limit {limit / MiB:.0f} MiB, {'killed' if outcome.killed else outcome.output.strip()}")
    return outcome


def test_20_mib_to_spare(checkpoint, base):
    run("streamload", checkpoint, 8 << 30)  # its time is printed, to hold the others against
    ours = run("streamload", checkpoint, base + PARAMS + 20 * MiB)
    assert ours.code == 0, ours.output
    assert json.loads(ours.output)["wrong"] == []
    assert json.loads(ours.output)["peak"] <= PARAMS + 5 * MiB
    run("safe_open", checkpoint, base + PARAMS + 20 * MiB)


def test_we_finish_where_load_file_is_killed(checkpoint, base):
    for spare in (4, 3, 2):
        limit = base + PARAMS + spare * MiB
        if run("load_file", checkpoint, limit).killed:
            ours = run("streamload", checkpoint, limit)
            assert ours.code == 0, ours.output
            assert json.loads(ours.output)["wrong"] == []
            return
    pytest.fail("load_file was never killed")

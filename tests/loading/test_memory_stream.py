"""2 GiB from a ring of one slot grow the process by the parameters and the budget, and by nothing else."""

import json
import subprocess
import sys

import pytest

from tests.loading.measured_stream import COUNT, ELEMENTS, ROOM

MiB = 1 << 20


@pytest.mark.slow
def test_a_ring_of_one_slot_over_two_gib():
    command = [sys.executable, "-m", "tests.loading.measured_stream"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for title, found in json.loads(done.stdout).items():
        print(title, f"{found['extra'] / MiB:.1f} MiB beyond")
        assert found["params"] == COUNT * ELEMENTS * 2
        assert found["wrong"] == []
        assert found["clones"] == 0
        assert found["extra"] <= ROOM, title

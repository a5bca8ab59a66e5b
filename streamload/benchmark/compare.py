"""Load a checkpoint in several ways, each in a fresh process, and compare what they take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from streamload.errors import LoadError

#: ``streamload``: our probe and loader; ``historic``: the probe as it used to be; ``list``: all tensors kept, then loaded.
WAYS = ("streamload", "historic", "list")


class Measured(NamedTuple):
    """What one way of loading took."""

    backend: str
    way: str
    beyond: int
    """Anonymous bytes beyond the parameters, at most."""
    clones: int
    clone_bytes: int
    seconds: float
    params: int
    """Bytes of the parameters."""


def compare(
    location: str | os.PathLike[str], backends: Sequence[str], ways: Sequence[str] = WAYS
) -> Iterator[Measured]:
    """Measure every way through every backend. Raises LoadError with what a process said that failed."""
    for backend in backends:
        for way in ways:
            command = [sys.executable, "-m", "streamload.benchmark.measured", os.fspath(location), backend, way]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
                raise LoadError(f"{backend}, {way}: {said[-1]}")
            yield Measured(backend, way, **json.loads(done.stdout.splitlines()[-1]))

"""Load a checkpoint in a process of its own and print, as JSON, what it took: ``python -m tests.loading.measured '{...}'``.

The peak is the kernel's own (``VmHWM``), not taken from the report, so that the report can be held against it.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch

from streamload import Checkpoint, load, plan, skeleton
from streamload.memory import resident
from streamload.testing import module_of
from tests.big import wrong_tensors
from tests.cache import evict, in_cache, warm


def peak_rss() -> int:
    """The largest resident set since the last ``reset_peak``, in bytes."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


def reset_peak() -> None:
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def main(path: str, memory_limit: int | str = "auto", dtype: str | None = None, cold: bool = True) -> None:
    checkpoint = Checkpoint.open(path)
    shapes = {name: spec.shape for name, spec in checkpoint.tensors.items()}
    with skeleton():
        module = module_of({name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes.items()})
    for file in checkpoint.files:
        (evict if cold else warm)(file)
    options = {"memory_limit": memory_limit, "dtype": dtype}
    was_cached = in_cache(path)
    forecast = plan(module, checkpoint, **options).forecast
    reset_peak()
    before, started = resident(), time.perf_counter()
    report = load(module, checkpoint, **options)
    seconds = time.perf_counter() - started
    after, peak = resident(), peak_rss()
    # Pages of libraries that were touched for the first time are in the peak too, but are no memory of the load.
    libraries = max(0, after.file - before.file)
    result = {
        "extra": peak - sum(before) - libraries - forecast.params_bytes,
        "left": after.anon - before.anon - forecast.params_bytes,
        "params": forecast.params_bytes,
        "staging": forecast.staging_bytes,
        "report_extra": report.peak_host_bytes - forecast.params_bytes,
        "read": report.bytes_read,
        "wanted": report.bytes_wanted,
        "seconds": seconds,
        "cached": [was_cached, in_cache(path)],
        "wrong": wrong_tensors(dict(module.named_parameters()), shapes),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    main(**json.loads(sys.argv[1]))

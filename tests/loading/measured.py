"""Load a checkpoint in a process of its own and print, as JSON, what it took: ``python -m tests.loading.measured '{...}'``.

The peak is sampled here, not taken from the report, so that the report can be held against it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

import torch

from streamload import Checkpoint, load, plan, skeleton
from streamload.memory import resident
from streamload.testing import module_of
from tests.big import wrong_tensors
from tests.cache import evict, warm


def main(path: str, memory_limit: int | str = "auto", dtype: str | None = None, cold: bool = True) -> None:
    checkpoint = Checkpoint.open(path)
    shapes = {name: spec.shape for name, spec in checkpoint.tensors.items()}
    with skeleton():
        module = module_of({name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes.items()})
    for file in checkpoint.files:
        (evict if cold else warm)(file)
    options = {"memory_limit": memory_limit, "dtype": dtype}
    forecast = plan(module, checkpoint, **options).forecast
    peak, done = 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, resident().anon)

    sampler = threading.Thread(target=sample)
    sampler.start()
    time.sleep(0.05)
    before, started = resident().anon, time.perf_counter()
    report = load(module, checkpoint, **options)
    seconds = time.perf_counter() - started
    done.set()
    sampler.join()
    result = {
        "extra": peak - before - forecast.params_bytes,
        "left": resident().anon - before - forecast.params_bytes,
        "params": forecast.params_bytes,
        "staging": forecast.staging_bytes,
        "report_extra": report.peak_host_bytes - forecast.params_bytes,
        "read": report.bytes_read,
        "wanted": report.bytes_wanted,
        "seconds": seconds,
        "wrong": wrong_tensors(dict(module.named_parameters()), shapes),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    main(**json.loads(sys.argv[1]))

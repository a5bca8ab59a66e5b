"""Our load beside safetensors' ways and beside raw reads, in one run, warm and cold, as ratios.

Every loader gets a module, whose parameters are allocated and touched before, and a path. The runs are interleaved, the
state of the page cache is made and checked before each, and medians are shown with their ranges. ``make bench`` prints the
table and writes docs/benchmarks.md; ``ARGS="--repeats 9"`` repeats more often.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # for tests.big and tests.cache

import safetensors
import safetensors.torch
import torch

import streamload
from streamload.loading.forecast import default_threads
from streamload.sources.direct import JOB
from streamload.sources.staging import WINDOW, StagingPool
from streamload.sources.system import O_DIRECT, copy_memory, read_at
from streamload.testing import module_of
from tests.big import write_big, wrong_tensors
from tests.cache import evict, in_cache, warm

Shapes = dict[str, tuple[int, ...]]

DENSE: Shapes = {"embed.weight": (64000, 2048)} | {
    f"layers.{n}.{name}": shape
    for n in range(40)
    for name, shape in {
        "q": (2048, 2048),
        "o": (2048, 2048),
        "up": (8192, 2048),
        "down": (2048, 8192),
        "norm": (2048,),
    }.items()
}
MANY: Shapes = {f"layers.{n // 100}.experts.{n % 100}.w": (100, 500) for n in range(20_000)}
OURS = "streamload.load"


@dataclass
class Work:
    """One checkpoint and the module that every loader fills."""

    title: str
    path: str
    shapes: Shapes
    seconds: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        write_big(self.path, self.shapes)
        self.nbytes = os.path.getsize(self.path)
        self.module = module_of({name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in self.shapes.items()})
        self.memory = torch.ones(self.nbytes, dtype=torch.uint8)

    def run(self, state: str, name: str, loader: Callable[[Work], object]) -> None:
        """Time ``loader`` once with the page cache in ``state``."""
        for _ in range(5):  # a neighbour can push pages out, or bring them in
            (warm if state == "warm" else evict)(self.path)
            if in_cache(self.path) is not (state == "cold"):
                break
        else:
            raise SystemExit(f"{self.path}: the page cache could not be made {state}")
        started = time.perf_counter()
        loader(self)
        self.seconds.setdefault((state, name), []).append(time.perf_counter() - started)

    def rate(self, state: str, name: str) -> float:
        """Median GB/s."""
        return self.nbytes / statistics.median(self.seconds[state, name]) / 1e9

    def span(self, state: str, name: str) -> str:
        """Lowest and highest GB/s."""
        rates = [self.nbytes / each / 1e9 for each in self.seconds[state, name]]
        return f"{min(rates):.2f}-{max(rates):.2f}"


def ours(work: Work) -> None:
    streamload.load(work.module, work.path)


def with_safe_open(work: Work) -> None:
    parameters = dict(work.module.named_parameters())
    with safetensors.safe_open(work.path, "pt") as file, torch.no_grad():
        for name in file.keys():  # noqa: SIM118  it is no dict
            parameters[name].copy_(file.get_tensor(name))


def with_load_file(work: Work) -> None:
    parameters = dict(work.module.named_parameters())
    tensors = safetensors.torch.load_file(work.path)
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)


def raw_preadv(work: Work) -> None:
    """The whole file into one piece of memory, from the page cache, with our threads and chunks."""
    _raw(work, JOB, os.O_RDONLY, straight=True)


def raw_direct(work: Work) -> None:
    """The whole file past the page cache, with our threads and windows, and copied to where it belongs."""
    _raw(work, WINDOW, os.O_RDONLY | O_DIRECT, straight=False)


def _raw(work: Work, chunk: int, flags: int, *, straight: bool) -> None:
    fd = os.open(work.path, flags)
    starts, lock = iter(range(0, work.nbytes, chunk)), threading.Lock()
    base = work.memory.data_ptr()

    def read(window: int) -> None:
        while True:
            with lock:
                start = next(starts, None)
            if start is None:
                return
            size = min(chunk, work.nbytes - start)
            if straight:
                read_at(fd, start, [base + start, size])
            else:
                read_at(fd, start, [window, chunk])
                copy_memory(base + start, window, size)

    with StagingPool(default_threads(), WINDOW) as pool:
        threads = [threading.Thread(target=read, args=(window.address,)) for window in pool.windows]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    os.close(fd)


LOADERS: dict[str, dict[str, Callable[[Work], None]]] = {
    "warm": {
        OURS: ours,
        "safe_open + copy_": with_safe_open,
        "load_file + copy_": with_load_file,
        "raw preadv": raw_preadv,
    },
    "cold": {
        OURS: ours,
        "safe_open + copy_": with_safe_open,
        "load_file + copy_": with_load_file,
        "raw O_DIRECT": raw_direct,
    },
}


def compare(work: Work, repeats: int) -> list[str]:
    """Run every loader ``repeats`` times, interleaved; returns the table's rows.

    The first reader of pages that have just been brought into the cache pays for the kernel's bookkeeping about them, so
    the loaders take turns at being first.
    """
    for turn in range(repeats):
        for state, loaders in LOADERS.items():
            names = list(loaders)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                work.run(state, name, loaders[name])
    if wrong := wrong_tensors(dict(work.module.named_parameters()), work.shapes):
        raise SystemExit(f"wrong values: {wrong[:3]}")
    rows = []
    for state, loaders in LOADERS.items():
        mine = work.rate(state, OURS)
        for name in loaders:
            ratio = "" if name == OURS else f"{mine / work.rate(state, name):.2f}"
            rows.append(f"| {state} | {name} | {work.rate(state, name):.2f} | {work.span(state, name)} | {ratio} |")
    return rows


def machine() -> str:
    """Where and with what this was measured."""
    cores, memory = len(os.sched_getaffinity(0)), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{cores} cores, {memory:.0f} GiB, Linux {platform.release()}, Python {platform.python_version()}, torch "
        f"{torch.__version__}, safetensors {safetensors.__version__}, {time.strftime('%Y-%m-%d')}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--folder", help="where the checkpoints (up to 4 GB) are made; a file system on a disk")
    options = parser.parse_args()
    lines = [
        "# Benchmarks",
        "",
        "Written by `make bench`: one module, its parameters touched before, filled from one file by each loader in turn, in",
        "one process. GB/s are medians with their ranges; the last column is our rate as a multiple of that row's. Raw reads",
        "put the file's bytes into one piece of memory with our number of threads and our chunks, and do nothing else.",
        "",
        f"{machine()}, {options.repeats} repeats.",
    ]
    for title, shapes in {"dense: 201 tensors": DENSE, "many: 20,000 tensors of 100 kB": MANY}.items():
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            work = Work(title, os.path.join(folder, "model.safetensors"), shapes)
            lines += ["", f"## {title}, {work.nbytes / 1e9:.2f} GB bf16", ""]
            lines += ["| page cache | loader | GB/s | range | ours / this |", "|---|---|---|---|---|"]
            lines += compare(work, options.repeats)
            del work
    text = "\n".join(lines) + "\n"
    print(text)
    (Path(__file__).parent.parent / "docs" / "benchmarks.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

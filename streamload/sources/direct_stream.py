"""The direct source: whole tensors, read ahead by a few threads into a ring of buffers that are lent out."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from queue import SimpleQueue
from typing import NamedTuple

from torch import Tensor

from streamload.checkpoint import TensorSpec
from streamload.checkpoint.spec import Stamp
from streamload.errors import BudgetError
from streamload.interrupts import postponed
from streamload.sources.batches import Batch, Read, batches
from streamload.sources.direct import JOB
from streamload.sources.file import File
from streamload.sources.ring import Place, Ring, Slot, arrange
from streamload.sources.source import CatalogSource, Tally
from streamload.sources.staging import FIXED_OVERHEAD, MIN_WINDOW, WINDOW, Staging, StagingPool
from streamload.sources.system import BLOCK

#: Small tensors share a slot of this size.
_SLOT = 8 * 1024 * 1024


class _Load(NamedTuple):
    """Tensors of one file that share a slot."""

    path: str
    places: list[Place]
    nbytes: int


class _Job(NamedTuple):
    number: int
    file: File
    batch: Batch
    slot: Slot
    """It owns the memory that is written to."""


class DirectSource(CatalogSource):
    """Tensors in the order of the files, each in host memory that is reused only when nobody holds a tensor in it any more.

    ``budget``: bytes of all buffers, within which tensors are read ahead. A consumer may keep tensors, which pins their
    buffers; when the budget leaves none, BudgetError names the first tensor kept. Raises BudgetError at once when two
    neighbouring tensors do not fit, and SourceError when a file cannot be read.
    """

    def __init__(
        self, specs: Sequence[TensorSpec], stamps: Mapping[str, Stamp | None], budget: int, threads: int
    ) -> None:
        super().__init__(specs, stamps)
        self._budget = budget
        self._windows, self._window = _windows(budget, threads)
        self.look_ahead_bytes = budget - self._windows * self._window - FIXED_OVERHEAD
        if self.look_ahead_bytes < (most := _most_at_once(self._loads())):
            largest = max(specs, key=lambda spec: spec.nbytes)
            raise BudgetError(
                f"memory_limit of {budget:,} bytes is too small to lend whole tensors: the largest, {largest.name!r}, has "
                f"{largest.nbytes:,} bytes, and with its neighbour and the reading "
                f"{most + budget - self.look_ahead_bytes:,} bytes are needed"
            )

    def _loads(self) -> list[_Load]:
        return _divided(self._specs, max(1, min(_SLOT, self.look_ahead_bytes // 4)))

    def _stream(self) -> _Reader:
        crew = _Crew(self._windows, self._window)
        return _Reader(self._loads(), self._stamps, Ring(self.look_ahead_bytes), crew, self._budget, self.tally)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of buffers that cannot be reused, because somebody holds a tensor in them."""
        return self._items.pinned_bytes if isinstance(self._items, _Reader) else 0


def needed(specs: Sequence[TensorSpec]) -> int:
    """A budget with which a DirectSource of ``specs`` is sure to work: the largest two neighbours, and windows."""
    room = max(_most_at_once(_divided(specs, _SLOT)), 4 * MIN_WINDOW)
    return room + max(room // 3, MIN_WINDOW) + 2 * FIXED_OVERHEAD


def _windows(budget: int, threads: int) -> tuple[int, int]:
    """How many windows for reading, and of how many bytes."""
    return min(threads, max(1, (budget // 4) // WINDOW)), max(
        MIN_WINDOW, min(WINDOW, budget // 8 - budget // 8 % BLOCK)
    )


class _Reader(Iterator["tuple[str, Tensor]"]):
    """Goes through ``loads``; what it has lent stays valid when it is closed."""

    def __init__(
        self,
        loads: list[_Load],
        stamps: Mapping[str, Stamp | None],
        ring: Ring,
        crew: _Crew,
        budget: int,
        tally: Tally,
    ) -> None:
        self._loads, self._stamps, self._ring, self._crew = loads, stamps, ring, crew
        self._budget, self._tally = budget, tally
        self._slots: dict[int, Slot] = {}
        self._next = self._submitted = 0
        self._left: dict[int, int] = {}
        self._waiting: deque[Place] = deque()
        self._current: Slot | None = None
        self._finalizer = weakref.finalize(self, _Crew.close, crew)

    def __next__(self) -> tuple[str, Tensor]:
        while not self._waiting:
            if not self._step():
                raise StopIteration
        place = self._waiting.popleft()
        assert self._current is not None
        tensor = self._current.lend(place)
        if not self._waiting:
            self._current.busy, self._current = False, None
        return place.spec.name, tensor

    def _step(self) -> bool:
        """Move on to the next slot; ``False`` at the end."""
        if self._next == len(self._loads):
            return False
        self._read_ahead()
        if self._submitted == self._next:
            held = self._ring.pinned
            kept = (
                f"{held[0][0]!r} and others, {len(held)} buffers of {self.pinned_bytes:,} bytes,"
                if held
                else "its buffers"
            )
            raise BudgetError(
                f"no buffer is free for {self._loads[self._next].places[0].spec.name!r}: {kept} are still held, and the budget "
                f"is {self._budget:,} bytes; clone what you keep (tensor.clone()) and let go of the tensor, or raise memory_limit"
            )
        while self._left[self._next]:
            number, nbytes, error = self._crew.done.get()
            if error is not None:
                raise error
            self._left[number] -= 1
            self._tally.bytes_read += nbytes
        del self._left[self._next]
        load = self._loads[self._next]
        self._current, self._waiting = self._slots.pop(self._next), deque(load.places)
        self._next += 1
        if self._next == len(self._loads) or self._loads[self._next].path != load.path:
            self._crew.forget(load.path)
        self._read_ahead()
        return True

    def _read_ahead(self) -> None:
        """Have as much read as there is room for."""
        while self._submitted < len(self._loads):
            load = self._loads[self._submitted]
            slot = self._ring.take(load.nbytes)
            if slot is None:
                return
            end = max(place.spec.offset + place.spec.span for place in load.places)
            reads = [
                Read(spec.offset, spec.span, slot.address + start, None, 0)
                for spec, start in load.places
                if spec.nbytes
            ]
            file = self._crew.file(load.path, end, self._stamps.get(load.path))
            jobs = [_Job(self._submitted, file, batch, slot) for batch in batches(reads, JOB // 4)]
            self._slots[self._submitted], self._left[self._submitted] = slot, len(jobs)
            self._submitted += 1
            self._crew.start(jobs)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of buffers that cannot be reused, because somebody holds a tensor in them."""
        return sum(nbytes for _, nbytes in self._ring.pinned)

    def close(self) -> None:
        """Stop reading; what the threads write to goes after them."""
        self._finalizer()
        self._waiting, self._current = deque(), None
        self._slots.clear()
        self._ring.clear()


class _Crew:
    """The reading threads and their open files. It knows nothing of the source, so that one which is dropped can be collected."""

    def __init__(self, threads: int, window: int) -> None:
        self._pool = StagingPool(threads, window)
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self.done: SimpleQueue[tuple[int, int, BaseException | None]] = SimpleQueue()
        self._stop = threading.Event()
        self._files: dict[str, File] = {}
        self._threads: list[threading.Thread] = []

    def file(self, path: str, end: int, stamp: Stamp | None) -> File:
        """The open file at ``path``, which has to reach to byte ``end``."""
        if path not in self._files:
            with postponed():  # a descriptor is a number until it is in its place
                self._files[path] = File(path, end, stamp)
        return self._files[path]

    def forget(self, path: str) -> None:
        """Close a file that was read to its end."""
        with postponed():
            if (file := self._files.pop(path, None)) is not None:
                file.close()

    def start(self, jobs: Sequence[_Job]) -> None:
        """Let the threads do ``jobs``."""
        if not self._threads:
            self._threads = [
                threading.Thread(target=_work, args=(self._jobs, self.done, window, self._stop), daemon=True)
                for window in self._pool.windows
            ]
            with postponed():
                for thread in self._threads:
                    thread.start()
        for job in jobs:
            self._jobs.put(job)

    def close(self) -> None:
        """Join the threads, close the files, give the windows back."""
        with postponed():
            self._stop.set()
            for _ in self._threads:
                self._jobs.put(None)
            for thread in self._threads:
                if thread.ident is not None:
                    thread.join()
            self._threads.clear()
            for path in list(self._files):
                self.forget(path)
            self._pool.__exit__()


def _work(
    jobs: SimpleQueue[_Job | None],
    done: SimpleQueue[tuple[int, int, BaseException | None]],
    window: Staging,
    stop: threading.Event,
) -> None:
    while (job := jobs.get()) is not None:
        nbytes, failure = 0, None
        if not stop.is_set():
            try:
                nbytes = job.file.read(job.batch, window, stop)
            except BaseException as error:
                failure = error
        done.put((job.number, nbytes, failure))
        del job


def _divided(specs: Sequence[TensorSpec], slot: int) -> list[_Load]:
    """``specs`` in groups that share a slot of about ``slot`` bytes; a larger tensor has one of its own."""
    loads: list[_Load] = []
    group: list[TensorSpec] = []
    size = 0

    def end() -> None:
        if group:
            loads.append(_Load(group[0].file, *arrange(group)))
            group.clear()

    for spec in specs:
        if group and (spec.file != group[0].file or size + spec.span > slot):
            end()
            size = 0
        group.append(spec)
        size += spec.span
    end()
    return loads


def _most_at_once(loads: Sequence[_Load]) -> int:
    """Bytes of two neighbours: a loop still holds the last tensor of the one when it asks for the other."""
    sizes = [load.nbytes for load in loads]
    return max([first + second for first, second in pairwise(sizes)] or sizes or [0])

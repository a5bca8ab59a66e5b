"""The direct source: whole tensors, read ahead by a few threads into a ring of buffers that are lent out."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
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
from streamload.sources.source import Source
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


class DirectSource(Source):
    """Tensors in the order of the files, each in host memory that is reused only when nobody holds a tensor in it any more.

    ``specs``: what to read; ``stamps``: what the files were when their headers were read. ``budget``: bytes of all buffers.
    Tensors are read ahead as far as the budget allows. A consumer may keep tensors, which pins their buffers; when the budget
    leaves none, BudgetError names the first tensor kept. Raises BudgetError at once when two neighbouring tensors do not fit,
    and SourceError when a file cannot be read.
    """

    def __init__(
        self, specs: Sequence[TensorSpec], stamps: Mapping[str, Stamp | None], budget: int, threads: int
    ) -> None:
        super().__init__()
        self.names = [spec.name for spec in specs]
        self._budget, self._stamps = budget, stamps
        windows = min(threads, max(1, (budget // 4) // WINDOW))
        window = max(MIN_WINDOW, min(WINDOW, budget // 8 - budget // 8 % BLOCK))
        room = budget - windows * window - FIXED_OVERHEAD
        self._loads = _divided(specs, max(1, min(_SLOT, room // 4)))
        most = _most_at_once(self._loads)
        if most > room:
            largest = max(specs, key=lambda spec: spec.nbytes)
            raise BudgetError(
                f"memory_limit of {budget:,} bytes is too small to lend whole tensors: the largest, {largest.name!r}, has "
                f"{largest.nbytes:,} bytes, and with its neighbour and the reading {most + budget - room:,} bytes are needed"
            )
        self.look_ahead_bytes = room
        self._ring = Ring(room)
        self._slots: dict[int, Slot] = {}
        self._next = self._submitted = 0
        self._left: dict[int, int] = {}
        self._waiting: deque[Place] = deque()
        self._current: Slot | None = None
        self._crew = _Crew(windows, window)
        self._finalizer = weakref.finalize(self, _Crew.close, self._crew)
        self.bytes_read = 0

    def __next__(self) -> tuple[str, Tensor]:
        if self.closed:
            raise StopIteration
        try:
            while not self._waiting:
                if not self._step():
                    self.close()
                    raise StopIteration
            place = self._waiting.popleft()
            assert self._current is not None
            tensor = self._current.lend(place)
            if not self._waiting:
                self._current.busy, self._current = False, None
            return place.spec.name, tensor
        except StopIteration:
            raise
        except BaseException:
            self.close()
            raise

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
            self.bytes_read += nbytes
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
            jobs = [_Job(self._submitted, file, batch) for batch in batches(reads, JOB // 4)]
            self._slots[self._submitted], self._left[self._submitted] = slot, len(jobs)
            self._submitted += 1
            self._crew.start(jobs)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of buffers that cannot be reused, because somebody holds a tensor in them."""
        return sum(nbytes for _, nbytes in self._ring.pinned)

    def close(self) -> None:
        """Stop reading. Tensors that somebody holds stay valid."""
        super().close()
        self._waiting, self._current = deque(), None
        self._slots.clear()
        self._ring.clear()
        self._finalizer()


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
            self._files[path] = File(path, end, stamp)
        return self._files[path]

    def forget(self, path: str) -> None:
        """Close a file that was read to its end."""
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
        self._stop.set()
        with postponed():
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

"""Read many pieces of many files straight to where they belong, with a few threads and little memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

from streamload.checkpoint.spec import Stamp
from streamload.interrupts import postponed
from streamload.sources.batches import Batch, Read, batches
from streamload.sources.file import File
from streamload.sources.staging import Staging

#: Bytes that a thread takes on at a time. Reads from the page cache need no memory, so this may exceed the window.
JOB = 8 * 1024 * 1024


def default_threads() -> int:
    """Reading threads: one for each core that this process may use, at least two and at most eight."""
    return min(8, max(2, len(os.sched_getaffinity(0))))


class FileReads(NamedTuple):
    """The reads wanted from one file, sorted by offset."""

    path: str
    end: int
    """Byte at which the last one ends."""
    reads: Iterable[Read]
    stamp: Stamp | None = None
    """What the file was when its header was read."""


class _Job(NamedTuple):
    file: File
    batch: Batch


def read_files(
    work: Iterable[FileReads],
    windows: list[Staging],
    on_done: Callable[[str, list[Read], int], None],
    *,
    pause: float = 0.0,
    keep: object = None,
) -> None:
    """Carry out ``work`` with one thread for each of the ``windows``.

    ``on_done(path, reads, bytes_read)`` is called in this thread for every batch whose bytes are in place; an exception
    in it cancels. With a ``pause`` it is called only every so many seconds, for all that was done meanwhile: where cores are
    few, waking up for every batch takes up to a tenth of the readers' time. However this ends, the threads are joined and
    the files closed; ``keep`` is what owns the memory that they write to. Raises SourceError when a file cannot be read or
    is shorter than its header said.
    """
    crew = _Crew(work, windows, keep)
    pressed: KeyboardInterrupt | None = None
    try:
        crew.run(on_done, pause)
    finally:
        while not crew.closed:
            try:
                with postponed():
                    crew.close()
            except KeyboardInterrupt as error:  # it came before it was postponed, or has been until now
                pressed = error
        if pressed is not None:
            raise pressed


class _Crew:
    def __init__(self, work: Iterable[FileReads], windows: list[Staging], keep: object) -> None:
        self.closed = False
        self._keep = keep
        self._lock = threading.Lock()
        self._stop = threading.Event()
        # The main thread waits at nothing but these: Ctrl-C can leave a lock of ``threading`` held for ever.
        self._done: SimpleQueue[tuple[_Job | None, int, BaseException | None]] = SimpleQueue()
        self._ending: SimpleQueue[None] = SimpleQueue()
        self._open: set[File] = set()
        self._jobs = self._cut(work)
        self._threads = [
            threading.Thread(target=self._work, args=(window,), name=f"streamload-read-{number}", daemon=True)
            for number, window in enumerate(windows)
        ]

    def _cut(self, work: Iterable[FileReads]) -> Iterator[_Job]:
        for path, end, reads, stamp in work:
            file = File(path, end, stamp)
            self._open.add(file)
            for batch in batches(reads, JOB):
                file.pending += 1
                yield _Job(file, batch)
            file.pending -= 1  # it starts at one, so that it stays open while it is cut
            self._close_if_done(file)

    def run(self, on_done: Callable[[str, list[Read], int], None], pause: float) -> None:
        with postponed():
            for thread in self._threads:
                thread.start()
        running = len(self._threads)
        failure: BaseException | None = None
        while running:
            if pause and self._done.empty():
                with suppress(Empty):
                    self._ending.get(timeout=pause)
            job, nbytes, error = self._done.get()
            if error is not None:
                failure = failure or error
            elif job is None:
                running -= 1
            elif failure is None:
                on_done(job.file.path, job.batch.reads, nbytes)
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Stop and join the threads and close the files. May be called again when it was interrupted."""
        self._stop.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        for file in self._open:
            file.close()
        self._jobs.close()  # type: ignore[attr-defined]
        self._threads.clear()
        self.closed = True

    def _work(self, window: Staging) -> None:
        try:
            while not self._stop.is_set():
                with self._lock:
                    job = next(self._jobs, None)
                if job is None:
                    break
                nbytes = job.file.read(job.batch, window, self._stop)
                with self._lock:
                    job.file.pending -= 1
                    self._close_if_done(job.file)
                self._done.put((job, nbytes, None))
        except BaseException as error:
            self._stop.set()
            self._done.put((None, 0, error))
        finally:
            self._done.put((None, 0, None))
            self._ending.put(None)

    def _close_if_done(self, file: File) -> None:
        if not file.pending:
            file.close()
            self._open.discard(file)

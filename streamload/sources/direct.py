"""Read many pieces of many files straight to where they belong, with a few threads and little memory.

What lies in the page cache is copied from there. What does not is read past the cache (``O_DIRECT``) through a small
aligned window, so that a load neither fills the cache nor waits for it to be emptied. Where that is refused (tmpfs, some
overlays and network file systems, old kernels) reads are buffered and their pages dropped again behind the reader.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import NamedTuple

from streamload.checkpoint.spec import Stamp, stamp_of
from streamload.errors import SourceError
from streamload.interrupts import postponed
from streamload.sources.batches import Batch, Read, batches
from streamload.sources.staging import Staging
from streamload.sources.system import BLOCK, DONTCACHE, O_DIRECT, cached, copy_memory, read_at, wholly_cached

#: Bytes that a thread takes on at a time. Reads from the page cache need no memory, so this may exceed the window.
JOB = 8 * 1024 * 1024

_REFUSED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}


class FileReads(NamedTuple):
    """The reads wanted from one file, sorted by offset."""

    path: str
    end: int
    """Byte at which the last one ends."""
    reads: Iterable[Read]
    stamp: Stamp | None = None
    """What the file was when its header was read."""


class _Job(NamedTuple):
    file: _File
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
    try:
        crew.run(on_done, pause)
    finally:
        while True:  # Ctrl-C can come before it is postponed
            try:
                with postponed():
                    crew.close()
                break
            except KeyboardInterrupt:
                crew.interrupted = True
    if crew.interrupted:
        raise KeyboardInterrupt


def file_in_cache(path: str) -> bool:
    """Whether the whole file lies in the page cache, so that reading it needs no staging."""
    try:
        with open(path, "rb", buffering=0) as file:
            return wholly_cached(file.fileno(), 0, os.fstat(file.fileno()).st_size) is True
    except OSError:
        return False  # reading it will tell why


class _Crew:
    def __init__(self, work: Iterable[FileReads], windows: list[Staging], keep: object) -> None:
        self.interrupted = False
        self._keep = keep
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._ending = threading.Event()
        self._done: SimpleQueue[tuple[_Job | None, int, BaseException | None]] = SimpleQueue()
        self._open: set[_File] = set()
        self._jobs = self._cut(work)
        self._started: list[threading.Thread] = []
        self._ended: set[threading.Thread] = set()
        self._threads = [
            threading.Thread(target=self._work, args=(window,), name=f"streamload-read-{number}", daemon=True)
            for number, window in enumerate(windows)
        ]

    def _cut(self, work: Iterable[FileReads]) -> Iterator[_Job]:
        for path, end, reads, stamp in work:
            file = _File(path, end, stamp)
            self._open.add(file)
            for batch in batches(reads, JOB):
                file.pending += 1
                yield _Job(file, batch)
            file.pending -= 1  # it starts at one, so that it stays open while it is cut
            self._close_if_done(file)

    def run(self, on_done: Callable[[str, list[Read], int], None], pause: float) -> None:
        with postponed():
            for thread in self._threads:
                self._started.append(thread)
                thread.start()
        running = len(self._threads)
        failure: BaseException | None = None
        while running:
            if pause and self._done.empty():
                self._ending.wait(pause)
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
        deadline = time.monotonic() + 1
        for thread in self._started:
            # One that Ctrl-C met while it was being started is not alive yet; one that could not be started never is.
            while thread.is_alive() or (thread not in self._ended and time.monotonic() < deadline):
                if thread.is_alive():
                    thread.join()
                else:
                    time.sleep(0.001)
        for file in self._open:
            file.close()
        self._jobs.close()  # type: ignore[attr-defined]
        self._threads.clear()
        self._started.clear()

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
            self._ending.set()
            self._ended.add(threading.current_thread())

    def _close_if_done(self, file: _File) -> None:
        if not file.pending:
            file.close()
            self._open.discard(file)


class _File:
    """One open file, and the fastest way of reading it that works."""

    def __init__(self, path: str, end: int, stamp: Stamp | None = None) -> None:
        self.path = path
        self.pending = 1
        self._past_cache = -1
        self._direct = False
        self._flags = DONTCACHE
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceError(f"{path}: cannot be opened: {error.strerror}", path=path) from error
        try:
            self._check_length(end)
            self._check_same(stamp)
            if O_DIRECT:
                self._past_cache = os.open(path, os.O_RDONLY | os.O_CLOEXEC | O_DIRECT)
                self._direct = True
        except OSError:
            pass  # the file system does without O_DIRECT, so reads are buffered
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for fd in (self._fd, self._past_cache):
            if fd >= 0:
                os.close(fd)
        self._fd = self._past_cache = -1

    def read(self, batch: Batch, window: Staging, stop: threading.Event) -> int:
        """Put the bytes of ``batch`` in place; returns the bytes that were read for it."""
        known = cached(self._fd, batch.start, batch.end - batch.start)
        if known or (known is None and batch.straight) or not self._direct:
            return self._read_buffered(batch, window, stop, drop=known is False)
        total = 0
        for part in batches(batch.reads, window.nbytes - 2 * BLOCK):
            if stop.is_set():
                break
            total += self._read_past_cache(part, window)
        return total

    def _read_past_cache(self, part: Batch, window: Staging) -> int:
        start, end = part.start - part.start % BLOCK, -(-part.end // BLOCK) * BLOCK
        if not self._direct:
            return self._read_window(part, window, 0)
        try:
            got = read_at(self._past_cache, start, [window.address, end - start])
        except OSError as error:
            if error.errno not in _REFUSED:
                raise self._failed(error, start) from error
            self._direct = False  # opened, but not meant; closed with the file, since other threads may be in it
            return self._read_window(part, window, 0)
        if start + got < part.end:
            raise self._too_short(part.end, start + got)
        self._deliver(part, window, start)
        return got

    def _read_buffered(self, batch: Batch, window: Staging, stop: threading.Event, *, drop: bool) -> int:
        flags = self._flags if drop else 0
        if batch.straight:
            total = self._call(batch.start, _scatter(batch, window), flags, batch.end)
        else:
            total = 0
            for part in batches(batch.reads, window.nbytes - 2 * BLOCK):
                if stop.is_set():
                    break
                total += self._read_window(part, window, flags)
        if drop and not self._flags:
            os.posix_fadvise(self._fd, batch.start, batch.end - batch.start, os.POSIX_FADV_DONTNEED)
        return total

    def _read_window(self, part: Batch, window: Staging, flags: int) -> int:
        got = self._call(part.start, [window.address, part.end - part.start], flags, part.end)
        self._deliver(part, window, part.start)
        return got

    def _call(self, start: int, buffers: list[int], flags: int, end: int) -> int:
        try:
            got = read_at(self._fd, start, buffers, flags=flags)
        except OSError as error:
            if not flags or error.errno not in _REFUSED:
                raise self._failed(error, start) from error
            self._flags = 0  # a kernel before 6.14, or a file system that cannot drop pages by itself
            return self._call(start, buffers, 0, end)
        if start + got < end:
            raise self._too_short(end, start + got)
        return got

    def _deliver(self, part: Batch, window: Staging, start: int) -> None:
        for offset, nbytes, address, sink, _ in part.reads:
            if sink is None:
                copy_memory(address, window.address + offset - start, nbytes)
            else:
                sink(window, offset - start)

    def _check_length(self, expected: int) -> None:
        found = os.fstat(self._fd).st_size
        if found < expected:
            raise self._too_short(expected, found)

    def _check_same(self, expected: Stamp | None) -> None:
        if expected is not None and stamp_of(self._fd) != expected:
            raise SourceError(
                f"{self.path}: has been replaced or changed since its header was read, so the tensors may lie elsewhere now; "
                "open the checkpoint again",
                path=self.path,
            )

    def _too_short(self, expected: int, found: int) -> SourceError:
        return SourceError(
            f"{self.path}: the file ends at byte {found:,}, but its header promises data up to byte {expected:,}; it was "
            "cut short after its header was read",
            path=self.path,
            offset=found,
        )

    def _failed(self, error: OSError, offset: int) -> SourceError:
        return SourceError(
            f"{self.path}: reading at byte {offset:,} failed: {error.strerror}", path=self.path, offset=offset
        )


def _scatter(batch: Batch, window: Staging) -> list[int]:
    """Addresses and lengths for one call that fills every read; gaps, shorter than a block, go into the window."""
    buffers: list[int] = []
    end = batch.start
    for offset, nbytes, address, _, _ in batch.reads:
        if offset > end:
            buffers += (window.address, offset - end)
        buffers += (address, nbytes)
        end = offset + nbytes
    return buffers

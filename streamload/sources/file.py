"""One open file, and the fastest way of reading it that works.

What lies in the page cache is copied from there. What does not is read past the cache (``O_DIRECT``) through a small
aligned window, so that a load neither fills the cache nor waits for it to be emptied. Where that is refused (tmpfs, some
overlays and network file systems, old kernels) reads are buffered and their pages dropped again behind the reader.
"""

from __future__ import annotations

import errno
import os
import threading

from streamload.checkpoint.spec import Stamp, stamp_of
from streamload.errors import SourceError
from streamload.sources.batches import Batch, batches
from streamload.sources.staging import Staging
from streamload.sources.system import BLOCK, DONTCACHE, O_DIRECT, cached, copy_memory, read_at, wholly_cached

_REFUSED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}


def file_in_cache(path: str) -> bool:
    """Whether the whole file lies in the page cache, so that reading it needs no staging."""
    try:
        with open(path, "rb", buffering=0) as file:
            return wholly_cached(file.fileno(), 0, os.fstat(file.fileno()).st_size) is True
    except OSError:
        return False  # reading it will tell why


def check_same(path: str, opened: int | str, expected: Stamp | None) -> None:
    """Raise SourceError when ``opened``, the file or its descriptor, is not the one at ``path`` whose header was read."""
    if expected is not None and stamp_of(opened) != expected:
        raise SourceError(
            f"{path}: has been replaced or changed since its header was read, so the tensors may lie elsewhere now; "
            "open the checkpoint again",
            path=path,
        )


class File:
    """See the top of this file. Several threads may read at the same time."""

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
            check_same(path, self._fd, stamp)
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

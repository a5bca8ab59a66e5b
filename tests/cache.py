"""Put files into the page cache, or out of it, and see which is true."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from streamload.sources.system import wholly_cached


def evict(path: Path | str) -> None:
    """Write the file back and drop its pages."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def warm(path: Path | str) -> None:
    """Read the file, so that its pages are in the cache."""
    buffer = bytearray(1 << 20)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def in_cache(path: Path | str) -> bool | None:
    """Whether all of the file is in the page cache; ``None`` where the kernel cannot tell."""
    with open(path, "rb") as file:
        return wholly_cached(file.fileno(), 0, os.path.getsize(path))


@contextlib.contextmanager
def kept(path: Path | str) -> Iterator[None]:
    """While in here the file stays in the page cache, where locking pages is allowed; some hosts evict idle ones."""
    mapped = np.memmap(path, dtype=np.uint8, mode="r")
    libc = ctypes.CDLL(None, use_errno=True)
    span = ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(mapped.nbytes)
    locked = libc.mlock(*span) == 0
    try:
        yield
    finally:
        if locked:
            libc.munlock(*span)

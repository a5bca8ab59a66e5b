"""What this process holds, by kind. Only anonymous memory is its own: file pages can be taken back."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from streamload.interrupts import postponed

PAGE = os.sysconf("SC_PAGE_SIZE")
_LOOK = 1024 * 1024
_STRETCH = 8 * _LOOK


class Resident(NamedTuple):
    """Resident bytes of a process by kind."""

    anon: int
    file: int
    shmem: int


def resident() -> Resident:
    """Resident bytes of this process (``RssAnon``, ``RssFile``, ``RssShmem`` of ``/proc/self/status``).

    Where the system does not tell the kinds apart, all of it counts as anonymous.
    """
    try:
        with open("/proc/self/status", "rb") as status:
            text = status.read()
    except OSError:
        import psutil

        return Resident(psutil.Process().memory_info().rss, 0, 0)
    return Resident(_kib(text, b"RssAnon:"), _kib(text, b"RssFile:"), _kib(text, b"RssShmem:"))


def _kib(text: bytes, key: bytes) -> int:
    start = text.find(key) + len(key)
    return int(text[start : text.index(b"kB", start)]) * 1024


class Meter:
    """Samples anonymous memory in a thread and keeps the peak: ``with Meter() as meter: ...; meter.peak``."""

    def __init__(self, interval: float = 0.01) -> None:
        self.start = self.peak = resident().anon
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_sample, args=(weakref.ref(self), self._stop, interval), name="streamload-meter", daemon=True
        )

    def sample(self) -> int:
        """Look now; returns the anonymous bytes."""
        anon = resident().anon
        self.peak = max(self.peak, anon)
        return anon

    @property
    def growth(self) -> int:
        """Bytes by which the peak lies above the start."""
        return self.peak - self.start

    def __enter__(self) -> Meter:
        with postponed():
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with postponed():
            self._stop.set()
            self.sample()
            self._thread.join()


def _sample(meter: weakref.ref[Meter], stop: threading.Event, interval: float) -> None:
    """Sample until told to stop, or until nobody holds the meter: Ctrl-C can come before it is entered."""
    while not stop.wait(interval):
        found = meter()
        if found is None:
            return
        found.sample()
        del found


def resident_bytes(ranges: Iterable[tuple[int, int]]) -> int:
    """How many bytes of the memory ranges ``(address, bytes)`` are resident, in whole pages.

    Memory that was allocated but never touched takes nothing yet; this tells how much of a model is really there. Asks
    ``mincore`` about the first of every 8 MiB: asking about all of 2 GiB would take 3 ms, and memory is touched in long
    stretches. Where that fails the range counts as resident.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
    seen = bytearray(_LOOK // PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(seen))
    total = 0
    for first, end in _page_runs(ranges):
        for start in range(first, end, _STRETCH):
            stretch = min(_STRETCH, end - start)
            look = min(_LOOK, stretch)
            failed = libc.mincore(start, look, address)
            there = look // PAGE - seen.count(0, 0, look // PAGE)
            total += stretch if failed else there * PAGE * stretch // look
    return total


def _page_runs(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The pages under ``ranges`` as (first, end) addresses; neighbours in one run, since each costs a system call."""
    first = end = 0
    for address, nbytes in sorted(ranges):
        if address >= end + PAGE:
            if end:
                yield first, end
            first = address - address % PAGE
        end = max(end, -(-(address + nbytes) // PAGE) * PAGE)
    if end:
        yield first, end


def trim() -> None:
    """Give freed memory back to the system (glibc keeps it otherwise); does nothing on other C libraries."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)

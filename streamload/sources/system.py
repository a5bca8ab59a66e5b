"""The system calls that Python does not offer as needed: reads to an address, and a look into the page cache.

Everything here works on file descriptors and addresses. All calls release the interpreter lock.
"""

from __future__ import annotations

import ctypes
import errno
import os
from array import array

#: Direct reads need offsets, lengths and addresses that are multiples of the device's block; 4096 suits them all.
BLOCK = 4096

#: The kernel takes at most this many buffers in one call (``IOV_MAX``).
MAX_BUFFERS = 1024

O_DIRECT = getattr(os, "O_DIRECT", 0)

_CACHESTAT = 451  # the number is the same on every architecture
_PROBE = 16 * BLOCK

_libc = ctypes.CDLL(None, use_errno=True)
_preadv2 = getattr(_libc, "preadv2", None)
if _preadv2 is not None:
    _preadv2.restype = ctypes.c_ssize_t
    _preadv2.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int]

#: Flag of ``preadv2`` since Linux 6.14: pages that this read brings into the cache are dropped right after.
DONTCACHE = 0x80 if _preadv2 is not None else 0

_preadv = _libc.preadv
_preadv.restype = ctypes.c_ssize_t
_preadv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
_libc.syscall.restype = ctypes.c_long


def copy_memory(target: int, source: int, nbytes: int) -> None:
    """Copy bytes between two addresses, which may overlap."""
    ctypes.memmove(target, source, nbytes)


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def cached(fd: int, offset: int, length: int) -> bool | None:
    """Whether the range of the file lies in the page cache, judged from its start, middle and end.

    ``None`` when the kernel cannot tell (before Linux 6.5). A whole range is not asked for: walking the pages of warm
    memory can cost a tenth of the time it takes to copy them, and a wrong answer only costs speed.
    """
    probes = {offset, offset + (length - _PROBE) // 2, offset + length - _PROBE}
    for start in (offset,) if length <= _PROBE else sorted(probes):
        known = wholly_cached(fd, start, min(_PROBE, offset + length - start))
        if not known:
            return known
    return True


def wholly_cached(fd: int, offset: int, length: int) -> bool | None:
    """Whether every page of the range lies in the page cache; ``None`` when the kernel cannot tell."""
    first = offset - offset % BLOCK
    size = -(-(offset + length - first) // BLOCK) * BLOCK
    wanted, found = _Range(first, size), _CacheStat()
    if _libc.syscall(_CACHESTAT, fd, ctypes.byref(wanted), ctypes.byref(found), 0):
        return None
    return bool(found.cached * BLOCK >= size)


def read_at(fd: int, offset: int, buffers: list[int], *, flags: int = 0) -> int:
    """Read from ``offset`` into ``buffers``, a flat list ``[address, bytes, address, bytes, ...]``.

    Returns the bytes read, fewer than asked for only at the end of the file. Raises OSError.
    """
    vector = array("Q", buffers)
    first, count, done = 0, len(buffers) // 2, 0
    while first < count:
        base = vector.buffer_info()[0] + 16 * first
        number = min(count - first, MAX_BUFFERS)
        if flags and _preadv2 is not None:
            got = _preadv2(fd, base, number, offset + done, flags)
        else:
            got = _preadv(fd, base, number, offset + done)
        if got < 0:
            code = ctypes.get_errno()
            if code == errno.EINTR:
                continue
            raise OSError(code, os.strerror(code))
        if got == 0:
            break
        done += got
        while got and got >= vector[2 * first + 1]:
            got -= vector[2 * first + 1]
            first += 1
        if got:  # a short read ends inside a buffer
            vector[2 * first] += got
            vector[2 * first + 1] -= got
    return done

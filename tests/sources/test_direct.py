"""Reads against real files: warm, cold, on tmpfs, without O_DIRECT, without DONTCACHE; what happens when they break off."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import threading

import pytest

from streamload.errors import BudgetError, SourceError
from streamload.sources.batches import Batch, Read
from streamload.sources.direct import FileReads, read_files
from streamload.sources.file import File, file_in_cache
from streamload.sources.staging import FIXED_OVERHEAD, MIN_WINDOW, WINDOW, StagingPool, split_budget
from streamload.sources.system import BLOCK, read_at
from tests.cache import evict, in_cache, warm

SIZE = 3_000_017  # neither a multiple of a block nor of a window
WINDOW_BYTES = 128 * 1024


@pytest.fixture(scope="module")
def content() -> bytes:
    return random.Random(1).randbytes(SIZE)


@pytest.fixture(params=["warm", "cold", "tmpfs", "no-direct", "no-direct-no-dontcache"])
def file(request, tmp_path, content, monkeypatch):
    """A file in each of the states that decide how it is read."""
    path = tmp_path / "data"
    if request.param == "tmpfs":
        path = f"/dev/shm/streamload-test-{os.getpid()}"
        request.addfinalizer(lambda: os.unlink(path))
    with open(path, "wb") as out:
        out.write(content)
    if request.param != "tmpfs":
        (warm if request.param == "warm" else evict)(path)
    if request.param.startswith("no-direct"):
        monkeypatch.setattr("streamload.sources.file.O_DIRECT", 0)
    if request.param.endswith("no-dontcache"):
        monkeypatch.setattr("streamload.sources.file.DONTCACHE", 0)
    return str(path)


class Into:
    """Copies what it is given into a bytearray, as a conversion would."""

    def __init__(self, target: bytearray, at: int, nbytes: int) -> None:
        self.target, self.at, self.wanted = target, at, nbytes

    def __call__(self, window, start):
        self.target[self.at : self.at + self.wanted] = ctypes.string_at(window.address + start, self.wanted)


def read_all(path: str, ranges, *, staged=lambda tag: False, threads=2):
    """Read ``ranges`` of ``path``; returns what arrived, by range, and the bytes that were read."""
    memory = bytearray(sum(nbytes for _, nbytes in ranges))
    base = ctypes.addressof((ctypes.c_char * len(memory)).from_buffer(memory))
    reads, at = [], 0
    for tag, (offset, nbytes) in enumerate(ranges):
        if staged(tag):
            reads.append(Read(offset, nbytes, 0, Into(memory, at, nbytes), tag))
        else:
            reads.append(Read(offset, nbytes, base + at, None, tag))
        at += nbytes
    booked = []
    with StagingPool(threads, WINDOW_BYTES) as pool:
        work = [FileReads(path, max(offset + nbytes for offset, nbytes in ranges), reads)]
        read_files(work, pool.windows, lambda _, done, nbytes: booked.append((done, nbytes)))
    assert sum(read.nbytes for done, _ in booked for read in done) == len(memory)
    return bytes(memory), sum(nbytes for _, nbytes in booked)


def test_the_whole_file(file, content):
    arrived, nbytes = read_all(file, [(0, SIZE)])
    assert arrived == content
    assert SIZE <= nbytes <= SIZE + 2 * BLOCK


def test_odd_ranges_straight_and_staged(file, content):
    ranges, offset, rng = [], 7, random.Random(2)
    while offset + 60_000 < SIZE:
        nbytes = rng.randint(1, 50_000)
        ranges.append((offset, nbytes))
        offset += nbytes + rng.choice([0, 0, 3, BLOCK, 40_000])
    for staged in (lambda tag: False, lambda tag: True, lambda tag: tag % 3 == 0):
        arrived, _ = read_all(file, ranges, staged=staged)
        assert arrived == b"".join(content[start : start + nbytes] for start, nbytes in ranges)


def test_half_of_the_file_is_half_of_the_bytes(file, content):
    ranges = [(offset, 100_000) for offset in range(0, SIZE - 100_000, 200_000)]
    arrived, nbytes = read_all(file, ranges)
    assert arrived == b"".join(content[start : start + length] for start, length in ranges)
    assert len(arrived) <= nbytes <= len(arrived) + 2 * BLOCK * len(ranges)


def test_a_cold_file_does_not_fill_the_page_cache(file):
    was = in_cache(file)
    read_all(file, [(0, SIZE)])
    assert in_cache(file) == was
    assert file_in_cache(file) is bool(was)


def test_a_shrunken_file_is_told_with_its_length(file):
    os.truncate(file, 2_000_000)
    with pytest.raises(SourceError, match=r"ends at byte 2,000,000.*promises data up to byte 3,000,017") as caught:
        read_all(file, [(0, SIZE)])
    assert (caught.value.path, caught.value.offset) == (file, 2_000_000)


@pytest.mark.parametrize("state", ["warm", "cold"])
def test_a_file_that_shrinks_under_the_reader(tmp_path, content, state):
    path = tmp_path / "data"
    path.write_bytes(content)
    (warm if state == "warm" else evict)(path)
    opened = File(str(path), SIZE)
    os.truncate(path, 1_000_000)
    target = ctypes.create_string_buffer(SIZE)
    batch = Batch(0, SIZE, [Read(0, SIZE, ctypes.addressof(target), None, 0)], True)
    with StagingPool(1, WINDOW_BYTES) as pool, pytest.raises(SourceError, match="ends at byte 1,000,000"):
        opened.read(batch, pool.windows[0], threading.Event())
    opened.close()


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(SourceError, match="gone: cannot be opened: No such file"):
        read_all(str(tmp_path / "gone"), [(0, 10)])


@pytest.mark.parametrize("failure", [ValueError("stop"), KeyboardInterrupt()])
def test_an_exception_in_the_callback_ends_threads_and_closes_files(file, failure):
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    target = ctypes.create_string_buffer(SIZE)
    reads = [Read(at, 1000, ctypes.addressof(target) + at, None, 0) for at in range(0, SIZE - 1000, 50_000)]

    def fail(path, done, nbytes):
        raise failure

    with StagingPool(2, WINDOW_BYTES) as pool, pytest.raises(type(failure)):
        read_files([FileReads(file, SIZE, reads)], pool.windows, fail)
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


def test_read_at_stops_at_the_end_of_the_file(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(range(100)))
    parts = [bytearray(size) for size in (1, 30, 40, 60)]
    assert _read(path, parts) == 100
    assert b"".join(parts) == bytes(range(100)) + bytes(31)


def test_read_at_takes_more_buffers_than_one_call(tmp_path, content):
    path = tmp_path / "data"
    path.write_bytes(content[:5000])
    parts = [bytearray(2) for _ in range(2500)]
    assert _read(path, parts) == 5000
    assert b"".join(parts) == content[:5000]


def _read(path, parts) -> int:
    buffers = [x for part in parts for x in (ctypes.addressof(ctypes.c_char.from_buffer(part)), len(part))]
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_at(fd, 0, buffers)
    finally:
        os.close(fd)


def test_read_at_tells_a_bad_descriptor():
    with pytest.raises(OSError, match="Bad file descriptor"):
        read_at(-1, 0, [1, 1])


def test_split_budget_keeps_within_the_budget():
    for budget in (FIXED_OVERHEAD + MIN_WINDOW, 2 << 20, 8 << 20, 128 << 20):
        for wanted in (1, 2, 8):
            threads, window = split_budget(budget, wanted)
            assert 1 <= threads <= wanted
            assert MIN_WINDOW <= window <= WINDOW
            assert window % BLOCK == 0
            assert threads * window + FIXED_OVERHEAD <= budget


def test_too_small_a_budget_is_refused_with_the_number():
    with pytest.raises(BudgetError, match=f"at least {FIXED_OVERHEAD + MIN_WINDOW:,} bytes"):
        split_budget(FIXED_OVERHEAD, 2)


def test_windows_do_not_overlap_and_go_back_to_the_system():
    pool = StagingPool(3, WINDOW_BYTES)
    addresses = sorted(window.address for window in pool.windows)
    assert all(address % BLOCK == 0 for address in addresses)
    assert all(b - a >= WINDOW_BYTES for a, b in itertools.pairwise(addresses))
    window = pool.windows[0]
    ctypes.memset(window.address, 7, 100)
    assert window.view(3, 8, 4).tolist() == [7] * 8
    with pool:
        pass
    assert ctypes.string_at(window.address, 4) == bytes(4)  # the pages are gone; touching them gives new ones

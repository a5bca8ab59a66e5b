"""Meters of this process's memory, by kind."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from pathlib import Path

import pytest
import torch

from streamload.memory import Meter, resident
from streamload.memory.meter import PAGE, resident_bytes, trim

MiB = 1024 * 1024
SLACK = 8 * MiB  # other threads, the allocator, huge pages


def test_resident_is_what_the_kernel_says():
    kinds = resident()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    told = [int(status[key].split()[0]) * 1024 for key in ("RssAnon", "RssFile", "RssShmem")]
    assert all(abs(mine - its) < SLACK for mine, its in zip(kinds, told, strict=True))
    assert kinds.anon > 10 * MiB  # torch is imported
    assert all(value % 1024 == 0 for value in kinds)


def test_kinds_are_told_apart(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(b"\1" * (64 * MiB))
    before = resident()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[at] for at in range(0, len(mapped), PAGE)) == len(mapped) // PAGE
        after = resident()
    # On a tmpfs the pages of a file count as shared memory.
    grown = after.file + after.shmem - before.file - before.shmem
    assert 64 * MiB - SLACK < grown < 64 * MiB + SLACK
    assert abs(after.anon - before.anon) < SLACK


def fresh(nbytes: int) -> mmap.mmap:
    """Memory from the system. The allocator of tensors could give some that was resident before."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def test_meter_sees_an_allocation():
    with Meter() as meter:
        held = fresh(64 * MiB)
        held.write(b"\1" * (64 * MiB - 1))
        assert meter.sample() - meter.start > 64 * MiB - SLACK
        held.close()
    assert 64 * MiB - SLACK < meter.growth < 64 * MiB + SLACK
    assert meter.peak == meter.start + meter.growth


def test_meter_sees_what_is_gone_before_it_stops():
    # Nobody calls sample() here: the thread has to see the memory while it is held.
    with Meter(interval=0.001) as meter:
        held = fresh(64 * MiB)
        held.write(b"\1" * (64 * MiB - 1))
        deadline = time.monotonic() + 30
        while meter.growth < 64 * MiB - SLACK and time.monotonic() < deadline:
            time.sleep(0.001)
        held.close()
    assert 64 * MiB - SLACK < meter.growth < 64 * MiB + SLACK


def test_meter_stops_its_thread_also_after_an_error():
    with pytest.raises(ZeroDivisionError), Meter():
        assert "streamload-meter" in [thread.name for thread in threading.enumerate()]
        1 / 0  # noqa: B018
    assert "streamload-meter" not in [thread.name for thread in threading.enumerate()]


def test_untouched_memory_is_not_resident():
    nbytes = 64 * MiB
    tensor = torch.frombuffer(fresh(nbytes), dtype=torch.uint8)
    where = [(tensor.data_ptr(), nbytes)]
    assert resident_bytes(where) < SLACK
    tensor[: nbytes // 2].fill_(1)
    assert nbytes // 2 <= resident_bytes(where) < nbytes // 2 + SLACK
    tensor.fill_(1)
    pages = -(-(tensor.data_ptr() + nbytes) // PAGE) - tensor.data_ptr() // PAGE
    assert resident_bytes(where) == pages * PAGE


def test_pages_between_two_ranges_do_not_count():
    memory = mmap.mmap(-1, 3 * PAGE)
    anchor = ctypes.c_char.from_buffer(memory)
    first = ctypes.addressof(anchor)
    memory[PAGE] = 1  # only the page in the middle is there
    assert resident_bytes([(first, 3 * PAGE)]) == PAGE
    assert resident_bytes([(first + 2 * PAGE, PAGE), (first, PAGE)]) == 0
    memory[2 * PAGE] = 1
    assert resident_bytes([(first + 2 * PAGE, 1), (first, PAGE)]) == PAGE
    del anchor
    memory.close()


def test_a_page_that_two_ranges_share_counts_once():
    memory = mmap.mmap(-1, 2 * PAGE)
    anchor = ctypes.c_char.from_buffer(memory)
    first = ctypes.addressof(anchor)
    memory[0] = memory[PAGE] = 1
    assert resident_bytes([(first, 10), (first + 10, 10), (first + 5, PAGE)]) == 2 * PAGE
    assert resident_bytes([]) == 0
    del anchor
    memory.close()


def test_trim_gives_back_what_was_freed():
    # Small pieces stay below glibc's threshold for mappings of their own, so that they come from the heap.
    held = [bytearray(b"\1" * 16384) for _ in range(4096)]
    full = resident().anon
    keeper = held[-1]
    held.clear()
    trim()
    assert full - resident().anon > 64 * MiB - SLACK
    assert keeper[0] == 1

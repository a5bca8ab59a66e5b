"""Staging buffers: the only host memory that reading takes beyond the parameters."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

from streamload.errors import BudgetError
from streamload.sources.system import BLOCK, copy_memory

if TYPE_CHECKING:
    from torch import Tensor

KiB = 1024
MiB = 1024 * KiB
_HUGE = 2 * MiB

#: A thread's window. Larger ones were not faster, see docs/benchmarks.md.
WINDOW = 2 * MiB
MIN_WINDOW = 64 * KiB

#: More readers than this gain nothing, and their stacks would have to be counted.
MAX_THREADS = 64

#: What a load takes besides windows: thread stacks, the allocator's arenas, the lists of batches under way.
FIXED_OVERHEAD = 1 * MiB


def split_budget(budget: int, threads: int) -> tuple[int, int]:
    """(threads, window bytes) within ``budget`` bytes; fewer threads when the budget does not allow a window for each.

    Raises BudgetError when not even one smallest window fits.
    """
    room = budget - FIXED_OVERHEAD
    if room < MIN_WINDOW:
        raise BudgetError(
            f"memory_limit of {budget:,} bytes is too small: reading takes at least {FIXED_OVERHEAD + MIN_WINDOW:,} bytes "
            "beyond the parameters"
        )
    threads = max(1, min(threads, MAX_THREADS, room // MIN_WINDOW))
    window = min(WINDOW, room // threads)
    return threads, window - window % BLOCK


class Staging:
    """One thread's window: memory aligned for direct reads, as an address and as a tensor of bytes."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.address = tensor.data_ptr()
        self.nbytes = tensor.numel()

    def view(self, start: int, nbytes: int, alignment: int) -> Tensor:
        """The ``nbytes`` bytes from ``start`` on as a uint8 tensor whose address is a multiple of ``alignment``.

        Bytes that lie askew are moved up to ``alignment - 1`` places down, over bytes that were delivered before.
        """
        askew = start % alignment
        if askew:
            copy_memory(self.address + start - askew, self.address + start, nbytes)
        return self._tensor[start - askew : start - askew + nbytes]


class StagingPool:
    """Windows for all threads in one piece of memory, given back to the system on leaving.

    Huge pages are asked for: a direct read into scattered 4 KiB pages makes the kernel send the device many small
    requests, which took two to three times as long where this was measured. ``pinned`` memory is for copies to a device.
    """

    def __init__(self, windows: int, window: int, *, pinned: bool = False) -> None:
        import torch

        self._map: mmap.mmap | None = None
        total = windows * window
        if pinned:
            memory = torch.empty(total + BLOCK, dtype=torch.uint8, pin_memory=True)
            start = -memory.data_ptr() % BLOCK
        else:
            alignment = _HUGE if total >= _HUGE else BLOCK
            self._map = anonymous(total + alignment)
            memory = torch.frombuffer(self._map, dtype=torch.uint8)
            start = -memory.data_ptr() % alignment
            if alignment == _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self.windows = [Staging(memory[start + i * window : start + (i + 1) * window]) for i in range(windows)]

    def __enter__(self) -> StagingPool:
        return self

    def __exit__(self, *_: object) -> None:
        """Give the memory back, even where an exception still holds a window."""
        self.windows.clear()
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
        self._map = None


def anonymous(nbytes: int) -> mmap.mmap:
    """Memory of our own. Raises BudgetError when the system has none."""
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError) as error:
        raise BudgetError(f"the system refuses {nbytes:,} bytes for reading: {error}") from error

"""The mapped source: tensors over pages of the files themselves, valid for as long as they are held."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from streamload.checkpoint import TensorSpec
from streamload.checkpoint.spec import Stamp
from streamload.errors import SourceError
from streamload.sources.dtypes import torch_dtype
from streamload.sources.file import check_same
from streamload.sources.source import CatalogSource, Tally
from streamload.sources.system import BLOCK

#: Of an entry of /proc/self/pagemap: the page is in memory or in swap, and it is one of a file.
_PRESENT, _OF_A_FILE = (0b11 << 62) - (1 << 64), 1 << 61  # signed: torch has no operations on unsigned numbers


#: Pages are given back in stretches of at least this many bytes.
_STRETCH = 4 * 1024 * 1024


class MappedFile:
    """A file in memory. Its pages are private: what is written to them is written to a copy, never to the file."""

    def __init__(self, path: str, end: int, stamp: Stamp | None) -> None:
        self.path = path
        try:
            with open(path, "rb", buffering=0) as file:
                check_same(path, file.fileno(), stamp)
                if os.fstat(file.fileno()).st_size < end:
                    raise SourceError(f"{path}: is shorter than the {end:,} bytes that its header promises", path=path)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise SourceError(f"{path}: cannot be mapped: {error}", path=path) from error
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def tensor(self, spec: TensorSpec) -> Tensor:
        """The tensor at its place in the file; a copy where that is not aligned for its dtype."""
        dtype = torch_dtype(spec.dtype)
        shape = (*spec.shape[:-1], spec.shape[-1] // 2) if spec.dtype == "F4" else spec.shape
        if not spec.nbytes:
            return torch.empty(shape, dtype=dtype)
        count = spec.span // dtype.itemsize
        if spec.offset % dtype.itemsize:
            flat = torch.empty(count, dtype=dtype)
            flat.view(torch.uint8).copy_(
                torch.frombuffer(self._map, dtype=torch.uint8, count=spec.span, offset=spec.offset)
            )
        else:
            flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=spec.offset)
        return flat.view(shape) if spec.strides is None else flat.as_strided(shape, spec.strides)

    def let_go(self, start: int, end: int) -> None:
        """Give back the pages from byte ``start`` to ``end`` that nobody has written to; when used again they are read again."""
        start, end = start - start % BLOCK, min(-(-end // BLOCK) * BLOCK, len(self._map))
        for first, last in self._untouched(start, end):
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)

    def _untouched(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Stretches of whole pages without one that was copied, because somebody wrote to it: to give that back would undo it."""
        count = -(-(end - start) // BLOCK)
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            entries = os.pread(pagemap.fileno(), 8 * count, (self._address + start) // BLOCK * 8)
        pages = torch.frombuffer(bytearray(entries), dtype=torch.int64)
        copied = ((pages & _PRESENT) != 0) & ((pages & _OF_A_FILE) == 0)
        at = 0
        for page in [*copied.nonzero().flatten().tolist(), len(pages)]:
            if page > at:
                yield start + at * BLOCK, min(start + page * BLOCK, end)
            at = page + 1


class MappedSource(CatalogSource):
    """Tensors over mapped files, in the order of the files; no byte is copied, and each stays valid for as long as it is held.

    The pages of a tensor are given back to the system soon after the next but one was asked for: from then on they are read again
    where they are used again. So resident memory stays small even if all tensors are kept, and none of it is anonymous
    except pages that somebody writes to. The mapping holds the file: when it is cut short while tensors are in use, the
    process gets SIGBUS, as with any mapping. A writer in another thread at the very moment at which pages are given back could
    lose what it writes first; write in the thread that reads, or clone.
    """

    def _stream(self) -> Iterator[tuple[str, Tensor]]:
        return _mapped(self._specs, self._stamps, self.tally)


def _mapped(
    specs: Sequence[TensorSpec], stamps: Mapping[str, Stamp | None], tally: Tally
) -> Iterator[tuple[str, Tensor]]:
    ends: dict[str, int] = {}
    for spec in specs:
        ends[spec.file] = max(ends.get(spec.file, 0), spec.offset + spec.span)
    behind: _Behind | None = None
    try:
        for spec in specs:
            if behind is None or behind.file.path != spec.file:
                if behind is not None:
                    behind.let_go()
                behind = _Behind(MappedFile(spec.file, ends[spec.file], stamps.get(spec.file)), spec.offset)
            behind.move_to(spec)
            tally.bytes_read += spec.nbytes
            yield spec.name, behind.file.tensor(spec)
    finally:
        if behind is not None:
            behind.let_go()


class _Behind:
    """The pages that the reader has left behind but not given back yet: small ones are cheaper to give back together."""

    def __init__(self, file: MappedFile, start: int) -> None:
        self.file = file
        self._start = self._end = self._latest = start

    def move_to(self, spec: TensorSpec) -> None:
        """The tensor before the latest is left behind."""
        if self._end - self._start >= _STRETCH:
            self.let_go()
        self._end, self._latest = self._latest, spec.offset + spec.span

    def let_go(self) -> None:
        """Give back what is behind."""
        with suppress(OSError):  # without /proc the pages stay until the system wants them: never wrong
            self.file.let_go(self._start, self._end)
        self._start = self._end

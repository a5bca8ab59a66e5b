"""Reads, and how they are put together into batches: few large calls, in file order, nothing read twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

from streamload.sources.system import BLOCK, MAX_BUFFERS

if TYPE_CHECKING:
    from streamload.sources.staging import Staging


class Sink(Protocol):
    """Takes the bytes of a read that cannot go straight to its place."""

    @property
    def wanted(self) -> int:
        """Bytes that it wants of the read's, which can span others between them."""

    def __call__(self, window: Staging, start: int) -> None:
        """Take them from ``window``, where they begin at byte ``start``."""


class Read(NamedTuple):
    """Bytes of a file and where they go: to a host address, or through a staging buffer into ``sink``."""

    offset: int
    nbytes: int
    address: int
    sink: Sink | None
    tag: int
    """Number of the placement that this serves."""


class Batch(NamedTuple):
    """Reads that follow each other in a file closely enough for one call."""

    start: int
    end: int
    reads: list[Read]
    straight: bool
    """Whether every read goes to an address."""


def batches(reads: Iterable[Read], limit: int) -> Iterator[Batch]:
    """Group ``reads``, which are sorted by offset, into batches of at most ``limit`` bytes.

    Reads that lie less than a block apart share a batch: their gap is in the same block anyway. A straight read that
    crosses the limit is cut there, on a block boundary; one with a sink never is and must not be longer than the limit.
    """
    batch: list[Read] = []
    start = end = 0
    straight = True
    for read in reads:
        offset, nbytes, address, sink, tag = read
        if batch and (
            not 0 <= offset - end < BLOCK
            or len(batch) >= MAX_BUFFERS // 2
            or offset - start >= limit
            or (sink is not None and offset + nbytes - start > limit)
        ):
            yield Batch(start, end, batch, straight)
            batch, straight = [], True
        if not batch:
            start = offset
        if sink is None:
            while offset + nbytes - start > limit:
                cut = start + limit - (start + limit) % BLOCK
                if cut > offset:
                    batch.append(Read(offset, cut - offset, address, None, tag))
                    address, nbytes, offset, end = address + cut - offset, nbytes - (cut - offset), cut, cut
                yield Batch(start, end, batch, straight)
                batch, start, straight = [], offset, True
            if batch or nbytes != read.nbytes:
                read = Read(offset, nbytes, address, None, tag)
        else:
            straight = False
        batch.append(read)
        end = offset + nbytes
    if batch:
        yield Batch(start, end, batch, straight)

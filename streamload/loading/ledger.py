"""The books of a load: how many bytes of every target have been written."""

from __future__ import annotations

from collections.abc import Iterable

from streamload.loading.placement import Placement
from streamload.sources.batches import Read


class Ledger:
    """Books what is in place, by placement. A target counts as written when every byte of its placements is."""

    def __init__(self, placements: Iterable[Placement]) -> None:
        self.placements: list[Placement] = []
        """All that is to be written, in the order of its numbers."""
        self._left: list[int] = []
        self.bytes_wanted = 0
        self.bytes_written = 0
        self.bytes_read = 0
        self.written = 0
        """Placements that are complete."""
        self.last = 0
        """Number of the placement that was written to last."""
        self.expect(placements)

    def expect(self, placements: Iterable[Placement]) -> None:
        """Open accounts for ``placements``, which are numbered on from those before."""
        added = list(placements)
        sizes = [placement.nbytes for placement in added]
        self.placements += added
        self._left += sizes
        self.bytes_wanted += sum(sizes)
        self.written += sizes.count(0)

    def book(self, reads: Iterable[Read], bytes_read: int) -> None:
        """Book a batch of reads whose bytes are in place."""
        left = self._left
        for _, nbytes, _, sink, tag in reads:
            if sink is not None:
                nbytes = sink.wanted
            left[tag] -= nbytes
            self.bytes_written += nbytes
            if left[tag] == 0:
                self.written += 1
            self.last = tag
        self.bytes_read += bytes_read

    def add(self, placement: Placement) -> None:
        """Book a placement that is complete already."""
        self.last = len(self.placements)
        self.placements.append(placement)
        self._left.append(0)
        self.written += 1
        self.bytes_wanted += placement.nbytes
        self.bytes_written += placement.nbytes
        self.bytes_read += placement.nbytes

    def unwritten(self) -> list[str]:
        """Names of targets of which a byte is still missing, or was written twice."""
        return [placement.target for placement, left in zip(self.placements, self._left, strict=True) if left]

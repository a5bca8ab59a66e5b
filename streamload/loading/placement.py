"""Placements: everything a load does is copying one rectangle of a stored tensor into one rectangle of a parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from streamload.checkpoint.dtypes import BITS
from streamload.checkpoint.spec import TensorSpec

#: (start, stop) in each dimension.
Region = tuple[tuple[int, int], ...]


class Placement(NamedTuple):
    """One source region into one target region; ``None`` stands for the whole tensor."""

    spec: TensorSpec
    target: str
    """Name of the parameter or buffer in the module."""
    source_region: Region | None = None
    target_region: Region | None = None

    @property
    def nbytes(self) -> int:
        """Bytes wanted from the file."""
        if self.source_region is None:
            return self.spec.nbytes
        return prod(stop - start for start, stop in self.source_region) * BITS[self.spec.dtype] // 8


class Piece(NamedTuple):
    """A part of a source region that lies densely enough in the file to be read at once."""

    offset: int
    """Bytes from the start of the file."""
    span: int
    """Bytes from the first element to the end of the last."""
    region: Region
    """Which part of the placement's region this is, counted from the region's own corner."""
    strides: tuple[int, ...]
    """Elements between neighbours in the file."""


def pieces(spec: TensorSpec, region: Region | None, limit: int, gap: int) -> Iterator[Piece]:
    """Cut the ``region`` of ``spec`` into pieces that span at most ``limit`` bytes.

    Elements further than ``gap`` bytes apart fall into different pieces, so that what lies between is not read. Only
    for dtypes whose elements take whole bytes.
    """
    item = BITS[spec.dtype] // 8
    strides = spec.strides if spec.strides is not None else row_major(spec.shape)
    corner = region if region is not None else tuple((0, size) for size in spec.shape)
    base = sum(start * stride for (start, _), stride in zip(corner, strides, strict=True))
    whole: Region = tuple((0, stop - start) for start, stop in corner)

    def cut(part: Region) -> Iterator[Piece]:
        sizes = [stop - start for start, stop in part]
        span = _span(sizes, strides) * item
        widest = max((d for d, size in enumerate(sizes) if size > 1), key=lambda d: strides[d], default=None)
        apart = 0
        if widest is not None:
            inner = _span([1 if d == widest else size for d, size in enumerate(sizes)], strides)
            apart = (strides[widest] - inner) * item
        if widest is None or (span <= limit and apart < gap):
            first = base + sum(start * stride for (start, _), stride in zip(part, strides, strict=True))
            yield Piece(spec.offset + first * item, span, part, strides)
            return
        size = sizes[widest]
        step = 1 if apart >= gap else max(1, min(size - 1, size * limit // span))
        start, stop = part[widest]
        for at in range(start, stop, step):
            yield from cut((*part[:widest], (at, min(at + step, stop)), *part[widest + 1 :]))

    if prod(stop - start for start, stop in whole):
        yield from cut(whole)


def run_of(shape: Sequence[int], region: Region | None) -> int | None:
    """The element at which ``region`` of a contiguous tensor begins, when it is one run of elements; else ``None``."""
    if region is None:
        return 0
    start, whole = 0, True
    for (first, last), size, stride in zip(reversed(region), reversed(shape), reversed(row_major(shape)), strict=True):
        if not whole and last - first != 1:
            return None
        whole = whole and last - first == size
        start += first * stride
    return start


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def _span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))

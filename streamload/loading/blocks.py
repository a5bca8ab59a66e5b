"""Rectangles of stored tensors: put together where they continue each other, cut where a reshape needs it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice, pairwise, product
from math import prod
from operator import mul
from typing import NamedTuple

from streamload.checkpoint.spec import TensorSpec
from streamload.loading.placement import Region, row_major

#: A tensor in more blocks than this is better computed than read in so many pieces.
MOST_BLOCKS = 65_536


class Untraceable(Exception):  # noqa: N818 - it is an answer, not a failure: whoever asked runs the function for real
    """The function does more than move elements; the message names what it did."""


class Block(NamedTuple):
    """A region of a traced tensor, and where its elements are stored."""

    region: Region
    spec: TensorSpec
    offset: int
    """Elements from the first one of the stored tensor to the first one of the region."""
    strides: tuple[int, ...]
    """Elements between neighbours in the file; of no meaning where the region is one element wide."""


def joined(blocks: Iterable[Block]) -> list[Block]:
    """``blocks``, with neighbours in the list made one where they continue each other."""
    result: list[Block] = []
    for block in blocks:
        one = _union(result[-1], block) if result and result[-1].spec is block.spec else None
        if one is None:
            result.append(block)
        else:
            result[-1] = one
    return result


def _union(first: Block, second: Block) -> Block | None:
    """Both as one block, where ``second`` goes on where ``first`` ends."""
    apart = [dim for dim, (own, other) in enumerate(zip(first.region, second.region, strict=True)) if own != other]
    if len(apart) != 1:
        return None
    dim = apart[0]
    (start, middle), (begin, stop) = first.region[dim], second.region[dim]
    step, rest = divmod(second.offset - first.offset, middle - start)
    if middle != begin or rest or step < 1:
        return None
    strides = (*first.strides[:dim], step, *first.strides[dim + 1 :])
    if not (_follows(first, strides) and _follows(second, strides)):
        return None
    return Block((*first.region[:dim], (start, stop), *first.region[dim + 1 :]), first.spec, first.offset, strides)


def _follows(block: Block, strides: tuple[int, ...]) -> bool:
    """Whether ``block`` has ``strides`` wherever it is more than one element wide."""
    sizes = [stop - start for start, stop in block.region]
    return all(size == 1 or own == other for size, own, other in zip(sizes, block.strides, strides, strict=True))


def reshaped(blocks: Sequence[Block], old: Sequence[int], new: Sequence[int]) -> Sequence[Block]:
    """``blocks`` of a tensor of shape ``old``, for the same elements in shape ``new``.

    By way of a shape that is finer than both: dimensions are cut first, and then put together. Where sizes do not divide each
    other, there is no such shape, and the way leads over dimensions that are put together first.
    """
    marks = sorted(_marks(old) | _marks(new))
    if any(high % low for low, high in pairwise(marks)):
        common = sorted(_marks(old) & _marks(new), reverse=True)
        coarse = [high // low for high, low in pairwise(common)]
        return reshaped(reshaped(blocks, old, coarse), coarse, new)
    cuts, joins = _fine(old, marks), _fine(new, marks)
    return limited(whole for block in blocks for part in _pieces(block, cuts) for whole in _wholes(part, joins))


def _marks(shape: Sequence[int]) -> set[int]:
    """How many elements lie within an index of each dimension, and in the whole."""
    return set(accumulate(reversed(shape), mul, initial=1))


def _fine(shape: Sequence[int], marks: Sequence[int]) -> list[tuple[int, ...]]:
    """For each dimension of ``shape``, the sizes that ``marks`` cut it into; none for a size of 1."""
    sizes = []
    for size, within in zip(shape, row_major(shape), strict=True):
        inner = [mark for mark in marks if within <= mark <= within * size]
        sizes.append(tuple([high // low for low, high in pairwise(inner)][::-1]))
    return sizes


class _Part(NamedTuple):
    """Some of a block in other dimensions."""

    region: Region
    offset: int
    """Elements after the first one of the block."""
    strides: tuple[int, ...]


def _pieces(block: Block, cuts: Sequence[tuple[int, ...]]) -> Iterator[Block]:
    """``block`` with each dimension cut into the sizes that ``cuts`` has for it."""
    return _combined(block, [_split_dim(*each) for each in zip(block.region, block.strides, cuts, strict=True)])


def _wholes(block: Block, joins: Sequence[tuple[int, ...]]) -> Iterator[Block]:
    """``block`` with dimensions put together, as many at a time as each of ``joins`` has sizes."""
    parts, at = [], 0
    for sizes in joins:
        to = at + len(sizes)
        parts.append(_join_dims(block.region[at:to], block.strides[at:to], sizes))
        at = to
    return _combined(block, parts)


def _combined(block: Block, parts: Sequence[Sequence[_Part]]) -> Iterator[Block]:
    """Every combination of ``parts``, which are of different dimensions."""
    check_count(prod(map(len, parts)))
    for chosen in product(*parts):
        region = tuple([each for part in chosen for each in part.region])
        strides = tuple([stride for part in chosen for stride in part.strides])
        yield Block(region, block.spec, block.offset + sum([part.offset for part in chosen]), strides)


def _split_dim(interval: tuple[int, int], stride: int, sizes: Sequence[int]) -> list[_Part]:
    """``interval`` of one dimension that becomes several of ``sizes``: whole rows together, what is left by itself."""
    if not sizes:
        return [_Part((), 0, ())]
    if len(sizes) == 1:
        return [_Part((interval,), 0, (stride,))]
    (start, stop), inner = interval, prod(sizes[1:])
    parts, at = [], start
    while at < stop:
        row, column = divmod(at, inner)
        rows = 1 if column else max(1, (stop - at) // inner)
        end = min(stop, (row + rows) * inner)
        below = (column, column + end - at) if rows == 1 else (0, inner)
        for region, offset, strides in _split_dim(below, stride, sizes[1:]):
            lies = (at - start) * stride + offset
            parts.append(_Part(((row, row + rows), *region), lies, (inner * stride, *strides)))
        at = end
    return parts


def _join_dims(region: Region, strides: Sequence[int], sizes: Sequence[int]) -> list[_Part]:
    """``region`` of several dimensions that become one: row by row where they do not lie evenly in the file."""
    if not sizes:
        return [_Part(((0, 1),), 0, (1,))]
    if len(sizes) == 1:
        return [_Part(region, 0, (strides[0],))]
    (start, stop), stride, inner = region[0], strides[0], prod(sizes[1:])
    below = _join_dims(region[1:], strides[1:], sizes[1:])
    (lies,), _, step = below[0].region, below[0].offset, below[0].strides
    if lies == (0, inner) and (stop - start == 1 or stride == inner * step[0]):
        return [_Part(((start * inner, stop * inner),), 0, step)]
    check_count((stop - start) * len(below))
    return [
        _Part(((row * inner + low, row * inner + high),), (row - start) * stride + offset, step)
        for row in range(start, stop)
        for ((low, high),), offset, step in below
    ]


def limited(blocks: Iterator[Block]) -> list[Block]:
    kept = list(islice(blocks, MOST_BLOCKS + 1))
    check_count(len(kept))
    return kept


def check_count(count: int) -> None:
    if count > MOST_BLOCKS:
        raise Untraceable(f"the elements lie in more than {MOST_BLOCKS:,} blocks")

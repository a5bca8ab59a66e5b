"""Turns a function that only moves elements into rectangles, by running it on tensors that know where theirs are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from streamload.checkpoint.dtypes import BITS, castable, narrows
from streamload.checkpoint.spec import TensorSpec
from streamload.errors import LoadError
from streamload.loading.blocks import Block, Untraceable, check_count, joined, reshaped
from streamload.loading.placement import Region, row_major
from streamload.sources.dtypes import dtype_code, torch_dtype


class Moved(NamedTuple):
    """A tensor put together from rectangles of stored ones."""

    shape: tuple[int, ...]
    dtype_code: str
    """What it is; where a block's differs, the function converted it from one float to another."""
    blocks: list[tuple[TensorSpec, Region]]
    """Views of stored tensors, and the region of this one that each fills. None when there is no element."""


class Traced(Tensor):
    """A tensor without memory whose every element is known to be an element of a stored tensor.

    Any use that needs a value raises Untraceable.
    """

    blocks: Sequence[Block]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type, shape: Any, strides: Any, dtype: torch.dtype, blocks: Sequence[Block]) -> Traced:
        self: Traced = Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=dtype)
        self.blocks = blocks
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Traced({list(self.shape)}, {self.dtype}, {len(self.blocks)} blocks)"

    @property
    def data(self) -> Tensor:
        """The tensor itself; setting it would exchange the shape under the blocks, and raises Untraceable."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise Untraceable("data of a tensor is set")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in _JOINS:
            return _JOINS[func](*args, **kwargs or {})
        if func in _MOVES:
            return _moved(func, args, kwargs or {})
        result = func.decompose(*args, **kwargs or {})
        if result is NotImplemented:
            raise Untraceable(f"{func} does more than move elements")
        return result


def trace(
    function: Callable[[dict[str, list[Tensor]]], Mapping[str, Tensor | list[Tensor]]],
    specs: Mapping[str, Sequence[TensorSpec]],
) -> dict[str, Moved]:
    """What ``function`` makes of the stored tensors ``specs``, as rectangles, without reading them.

    Raises Untraceable when it does anything but move elements or convert floats, and for whatever it raises itself.
    """
    inputs: dict[str, list[Tensor]] = {key: [_stored(spec) for spec in group] for key, group in specs.items()}
    try:
        outputs = function(inputs)
        return {name: _result(name, value) for name, value in outputs.items()}
    except Untraceable:
        raise
    except Exception as error:
        raise Untraceable(f"{type(error).__name__}: {error}") from error


def _stored(spec: TensorSpec) -> Traced:
    if BITS[spec.dtype] % 8:
        raise Untraceable(f"{spec.name}: elements of {spec.dtype} do not take whole bytes")
    try:
        dtype = torch_dtype(spec.dtype)
    except LoadError as error:
        raise Untraceable(f"{spec.name}: {error}") from error
    shape = spec.shape
    strides = row_major(shape) if spec.strides is None else spec.strides
    blocks = [Block(tuple([(0, size) for size in shape]), spec, 0, strides)] if 0 not in shape else []
    return Traced(shape, strides, dtype, blocks)


def _result(name: str, value: Tensor | list[Tensor]) -> Moved:
    tensor = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not isinstance(tensor, Traced):
        raise Untraceable(f"{name} is not made of stored elements alone")
    views = [(_view(block), block.region) for block in tensor.blocks]
    return Moved(tuple(tensor.shape), dtype_code(tensor.dtype), views)


def _view(block: Block) -> TensorSpec:
    """The stored elements of ``block`` as a stored tensor of their own."""
    region, spec, offset, strides = block
    item = BITS[spec.dtype] // 8
    shape = tuple([stop - start for start, stop in region])
    dense = all(size == 1 or own == step for size, own, step in zip(shape, strides, row_major(shape), strict=True))
    where = spec.offset + offset * item
    return TensorSpec(spec.name, spec.dtype, shape, spec.file, where, prod(shape) * item, None if dense else strides)


def _moved(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of ``func``: torch tells the shape and the strides on meta, the blocks follow."""
    first = args[0]
    if not isinstance(first, Traced):
        raise Untraceable(f"{func} looks up a stored value")
    meta = torch.empty_strided(first.shape, first.stride(), dtype=first.dtype, device="meta")
    result = func(meta, *args[1:], **kwargs)
    blocks = _MOVES[func](first, *args[1:], **kwargs)
    if isinstance(result, Tensor):
        return Traced(result.shape, result.stride(), result.dtype, blocks)
    return [Traced(one.shape, one.stride(), one.dtype, own) for one, own in zip(result, blocks, strict=True)]


def _same(tensor: Traced, **_: Any) -> Sequence[Block]:
    return tensor.blocks


def _cut(blocks: Sequence[Block], dim: int, wanted: range) -> list[Block]:
    """What ``wanted`` of dimension ``dim`` keeps."""
    first, step, kept = wanted.start, wanted.step, []
    for region, spec, offset, strides in blocks:
        start, stop = region[dim]
        low = max(0, -((first - start) // step))
        high = min(len(wanted), -((first - stop) // step))
        if low < high:
            offset += (first + low * step - start) * strides[dim]
            cut = (*region[:dim], (low, high), *region[dim + 1 :])
            kept.append(Block(cut, spec, offset, (*strides[:dim], strides[dim] * step, *strides[dim + 1 :])))
    return kept


def _slice(
    tensor: Traced, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Sequence[Block]:
    wanted = range(*slice(start, end, step).indices(tensor.shape[dim]))
    return _cut(tensor.blocks, dim % tensor.ndim, wanted)


def _narrow(tensor: Traced, dim: int, start: int, length: int) -> Sequence[Block]:
    start %= max(1, tensor.shape[dim])
    return _cut(tensor.blocks, dim % tensor.ndim, range(start, start + length))


def _select(tensor: Traced, dim: int, index: int) -> Sequence[Block]:
    index %= tensor.shape[dim]
    dim %= tensor.ndim
    return _without(_cut(tensor.blocks, dim, range(index, index + 1)), {dim})


def _unbind(tensor: Traced, dim: int = 0) -> list[Sequence[Block]]:
    return [_select(tensor, dim, index) for index in range(tensor.shape[dim])]


def _split(tensor: Traced, size: int, dim: int = 0) -> list[Sequence[Block]]:
    whole = tensor.shape[dim]
    starts = range(0, whole, size) if whole else [0]
    return [_slice(tensor, dim, start, start + size) for start in starts]


def _split_sizes(tensor: Traced, sizes: Sequence[int], dim: int = 0) -> list[Sequence[Block]]:
    stops = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return [_slice(tensor, dim, stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]


def _permute(tensor: Traced, dims: Sequence[int]) -> Sequence[Block]:
    order = [dim % tensor.ndim for dim in dims]
    return [
        Block(tuple([region[dim] for dim in order]), spec, offset, tuple([strides[dim] for dim in order]))
        for region, spec, offset, strides in tensor.blocks
    ]


def _transpose(tensor: Traced, dim0: int, dim1: int) -> Sequence[Block]:
    if not tensor.ndim:
        return tensor.blocks
    order = list(range(tensor.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(tensor, order)


def _t(tensor: Traced) -> Sequence[Block]:
    return tensor.blocks if tensor.ndim < 2 else _permute(tensor, (1, 0))


def _without(blocks: Sequence[Block], dims: set[int]) -> list[Block]:
    """``blocks`` without the dimensions ``dims``, in which they are one element wide."""
    return [
        Block(
            tuple([part for dim, part in enumerate(region) if dim not in dims]),
            spec,
            offset,
            tuple([stride for dim, stride in enumerate(strides) if dim not in dims]),
        )
        for region, spec, offset, strides in blocks
    ]


def _squeeze(tensor: Traced, dims: int | Sequence[int] | None = None) -> Sequence[Block]:
    chosen = range(tensor.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {dim % tensor.ndim for dim in chosen if tensor.ndim and tensor.shape[dim] == 1}
    return _without(tensor.blocks, gone)


def _with(blocks: Sequence[Block], dim: int, at: int = 0) -> list[Block]:
    """``blocks`` with another dimension ``dim``, at whose index ``at`` they lie."""
    row = ((at, at + 1),)
    return [
        Block(region[:dim] + row + region[dim:], spec, offset, (*strides[:dim], 1, *strides[dim:]))
        for region, spec, offset, strides in blocks
    ]


def _unsqueeze(tensor: Traced, dim: int) -> Sequence[Block]:
    return _with(tensor.blocks, dim % (tensor.ndim + 1))


def _expand(tensor: Traced, size: Sequence[int], **_: Any) -> Sequence[Block]:
    added = len(size) - tensor.ndim
    own = (1,) * added + tuple(tensor.shape)
    if any(new not in (old, -1) for old, new in zip(own, size, strict=True)):
        raise Untraceable("expand repeats elements")
    return reduce(lambda blocks, _: _with(blocks, 0), range(added), tensor.blocks)


def _index(tensor: Traced, indices: Sequence[Tensor | None]) -> Sequence[Block]:
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1:
        raise Untraceable("an index of several lists")
    return _pick(tensor, *given[0])


def _pick(tensor: Traced, dim: int, index: Tensor) -> Sequence[Block]:
    if index.ndim != 1 or index.dtype not in (torch.int32, torch.int64):
        raise Untraceable("an index that is not one list of integers")
    check_count(index.numel() * len(tensor.blocks))
    dim %= tensor.ndim
    rows = [range(tensor.shape[dim])[entry] for entry in index.tolist()]  # torch checks nothing on meta
    picked = [_shifted(_cut(tensor.blocks, dim, range(row, row + 1)), dim, at) for at, row in enumerate(rows)]
    return joined(chain.from_iterable(picked))


def _shifted(blocks: Sequence[Block], dim: int, by: int) -> Sequence[Block]:
    """``blocks`` further on by ``by`` in dimension ``dim``."""
    if not by:
        return blocks
    after = dim + 1
    return [
        Block((*region[:dim], (region[dim][0] + by, region[dim][1] + by), *region[after:]), spec, offset, strides)
        for region, spec, offset, strides in blocks
    ]


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Traced:
    traced, dtype = _alike(tensors)
    ndim = max(tensor.ndim for tensor in traced)
    traced = [tensor for tensor in traced if tensor.shape != (0,) or ndim == 1]  # torch lets these join anything
    shape, dim, at = list(traced[0].shape), dim % ndim, 0
    blocks: list[Block] = []
    for tensor in traced:
        size = tensor.shape[dim]
        if (*tensor.shape[:dim], *tensor.shape[dim + 1 :]) != (*shape[:dim], *shape[dim + 1 :]):
            raise Untraceable(f"cat of shapes {shape} and {list(tensor.shape)}")
        blocks += _shifted(_cast(tensor, dtype), dim, at)
        at += size
    shape[dim] = at
    return Traced(shape, row_major(shape), dtype, joined(blocks))


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Traced:
    traced, dtype = _alike(tensors)
    first = traced[0].shape
    dim %= len(first) + 1
    blocks: list[Block] = []
    for at, tensor in enumerate(traced):
        if tensor.shape != first:
            raise Untraceable(f"stack of shapes {list(first)} and {list(tensor.shape)}")
        blocks += _with(_cast(tensor, dtype), dim, at)
    shape = (*first[:dim], len(traced), *first[dim:])
    return Traced(shape, row_major(shape), dtype, joined(blocks))


def _alike(tensors: Sequence[Tensor]) -> tuple[list[Traced], torch.dtype]:
    """``tensors`` and the dtype that they have together."""
    traced = [tensor for tensor in tensors if isinstance(tensor, Traced)]
    if len(traced) != len(tensors):
        raise Untraceable("stored tensors are joined with computed ones")
    return traced, reduce(torch.promote_types, {tensor.dtype for tensor in traced})


def _to_copy(tensor: Traced, *, dtype: torch.dtype | None = None, memory_format: Any = None, **other: Any) -> Traced:
    """A conversion; where to does not matter to what moves."""
    if other.get("layout") not in (None, torch.strided):
        raise Untraceable(f"a tensor becomes {other['layout']}")
    dtype = dtype or tensor.dtype
    meta = torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
    strides = torch.clone(meta, memory_format=memory_format or torch.preserve_format).stride()
    return Traced(tensor.shape, strides, dtype, _cast(tensor, dtype))


def _cast(tensor: Traced, dtype: torch.dtype) -> Sequence[Block]:
    """The blocks of ``tensor`` when it becomes ``dtype``: as converting straight from the stored dtypes gives them."""
    if tensor.dtype == dtype:
        return tensor.blocks
    old, new = dtype_code(tensor.dtype), dtype_code(dtype)
    for stored in {block.spec.dtype for block in tensor.blocks} | {old}:
        if not castable(stored, new):
            raise Untraceable(f"{stored} becomes {new}")
        if narrows(stored, old):
            raise Untraceable(f"{stored} becomes {new} by way of {old}, which rounds it")
    return tensor.blocks


def _reshape(tensor: Traced, size: Sequence[int]) -> Sequence[Block]:
    known = -prod(size) if -1 in size else 0
    shape = [tensor.numel() // known if length == -1 and known else length for length in size]
    return joined(reshaped(tensor.blocks, tuple(tensor.shape), shape)) if tensor.blocks else ()


_aten = torch.ops.aten

#: What makes one tensor from several, or of another dtype.
_JOINS: dict[Any, Callable[..., Traced]] = {
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
    _aten._to_copy.default: _to_copy,
}

#: What gives the elements of one tensor another place: from the tensor and the arguments to blocks.
_MOVES: dict[Any, Callable[..., Sequence[Any]]] = {
    _aten.alias.default: _same,
    _aten.clone.default: _same,
    _aten.detach.default: _same,
    _aten.lift_fresh.default: _same,
    _aten.slice.Tensor: _slice,
    _aten.narrow_copy.default: _narrow,
    _aten.select.int: _select,
    _aten.unbind.int: _unbind,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split_sizes,
    _aten.permute.default: _permute,
    _aten.transpose.int: _transpose,
    _aten.t.default: _t,
    _aten.squeeze.default: _squeeze,
    _aten.squeeze.dim: _squeeze,
    _aten.squeeze.dims: _squeeze,
    _aten.unsqueeze.default: _unsqueeze,
    _aten.expand.default: _expand,
    _aten.index.Tensor: _index,
    _aten.index_select.default: _pick,
    _aten.view.default: _reshape,
    _aten._unsafe_view.default: _reshape,
}

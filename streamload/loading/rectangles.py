"""Rectangles of tensors that are in memory: look at one, copy it into a target, compare it."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from streamload.checkpoint import TensorSpec
from streamload.checkpoint.dtypes import BITS
from streamload.errors import LoadError
from streamload.loading.placement import Placement, Region, row_major
from streamload.sources.dtypes import dtype_code

#: Integers of the same width carry any dtype bit for bit, also those that torch cannot copy.
CARRIER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: Bytes that are compared at a time.
_PIECE = 4 << 20


def spec_of(name: str, tensor: Tensor, origin: str) -> TensorSpec:
    """``tensor`` as a stored one. Raises LoadError when it has no plain memory or a dtype that no checkpoint stores."""
    if tensor.is_nested or tensor.is_quantized:
        raise LoadError(
            f"{name!r} of {origin} is {'nested' if tensor.is_nested else 'quantized'}; expected a dense tensor"
        )
    if tensor.layout != torch.strided or tensor.is_meta:
        kind = "on the meta device, so it has no values" if tensor.is_meta else f"laid out as {tensor.layout}"
        raise LoadError(f"{name!r} of {origin} is {kind}; expected a dense tensor")
    try:
        dtype = dtype_code(tensor.dtype)
    except LoadError as error:
        raise LoadError(f"{name!r} of {origin}: {error}") from error
    shape = tuple(tensor.shape)
    if dtype == "F4" and not shape:
        raise LoadError(f"{name!r} of {origin} is a single byte of two F4 elements; expected at least one dimension")
    if dtype == "F4":  # torch counts bytes that hold two elements
        shape = (*shape[:-1], shape[-1] * 2)
    return TensorSpec(name, dtype, shape, origin, 0, prod(shape) * BITS[dtype] // 8)


def rectangle(tensor: Tensor, placement: Placement) -> Tensor:
    """The source region of ``placement`` as a view of ``tensor``, which is the stored tensor."""
    spec, region = placement.spec, placement.source_region
    tensor = tensor.detach()
    if tensor.is_complex() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if spec.dtype == "F4":
        return _cut(bits(tensor), _bytes_of_pairs(region))
    if spec.strides is not None or spec.offset or spec.numel != tensor.numel():  # a part of it
        flat = tensor.contiguous()
        strides = spec.strides if spec.strides is not None else row_major(spec.shape)
        tensor = flat.as_strided(spec.shape, strides, flat.storage_offset() + spec.offset * 8 // BITS[spec.dtype])
    elif tensor.shape != spec.shape:
        tensor = tensor.reshape(spec.shape)  # further dimensions of one element, mostly
    return _cut(tensor, region)


def copy_into(target: Tensor, placement: Placement, value: Tensor) -> None:
    """Copy ``value`` into the target region of ``placement``, converting where the dtypes differ."""
    target, value = _pair(target, placement, value)
    if value.dtype == target.dtype:
        target, value = (
            bits(target),
            bits(value),
        )  # integers carry any dtype bit for bit, also those that torch cannot copy
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        target.copy_(value)


def difference(target: Tensor, placement: Placement, value: Tensor) -> float | None:
    """The largest difference between ``value`` and what the target region holds; ``None`` when all bits are equal."""
    target, value = _pair(target, placement, value)
    found = [largest_difference(ours, theirs) for ours, theirs in _pieces(value, target)]
    return max((each for each in found if each is not None), default=None)


def largest_difference(ours: Tensor, theirs: Tensor) -> float | None:
    """By how much two tensors of one shape differ at most once ``ours`` has the dtype of ``theirs``; ``None`` when all bits are
    equal.
    """
    ours = ours.to(theirs.device, theirs.dtype)
    if torch.equal(bits(ours), bits(theirs)):  # so that NaN equals itself, and 2**53 not 2**53 + 1
        return None
    wide = torch.complex128 if theirs.is_complex() else torch.float64
    largest: float = (ours.to(wide) - theirs.to(wide)).abs().nan_to_num(nan=float("inf")).max().item()
    return largest


def bits(tensor: Tensor) -> Tensor:
    """The same bytes as integers."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(CARRIER[tensor.dtype.itemsize])


def _pair(target: Tensor, placement: Placement, value: Tensor) -> tuple[Tensor, Tensor]:
    """Both in one shape."""
    target, region = target.detach(), placement.target_region
    if placement.spec.dtype == "F4":
        target, region = bits(target), _bytes_of_pairs(region)
    target = _cut(target, region)
    return target if target.shape == value.shape else target.view(value.shape), value


def _pieces(value: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both in pieces, since a comparison works in double precision."""
    rows = value.shape[0] if value.ndim else 1
    step = max(1, rows * _PIECE // max(1, value.numel() * 16))
    if rows <= step or not value.ndim:
        yield value, target
        return
    for at in range(0, rows, step):
        yield value[at : at + step], target[at : at + step]


def _cut(tensor: Tensor, region: Region | None) -> Tensor:
    return tensor if region is None else tensor[tuple(slice(start, stop) for start, stop in region)]


def _bytes_of_pairs(region: Region | None) -> Region | None:
    """A region of elements that lie in pairs in a byte, counted in bytes."""
    if region is None:
        return None
    start, stop = region[-1]
    if start % 2 or stop % 2:
        raise LoadError(f"a region of F4 has to begin and end on whole bytes, found elements {start} to {stop}")
    return (*region[:-1], (start // 2, stop // 2))

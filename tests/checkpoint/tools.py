"""What the tests of the checkpoint room share."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import streamload
from streamload import Checkpoint, CheckpointError, LoadReport
from streamload.testing import module_of, tensor_bytes, write_raw

#: Every dtype that torch and the safetensors format have in common, and its code in the format.
CODES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.complex128: "C128",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
# These two came with torch 2.7 and 2.8.
CODES |= {
    getattr(torch, name): code
    for name, code in {"float8_e8m0fnu": "F8_E8M0", "float4_e2m1fn_x2": "F4"}.items()
    if hasattr(torch, name)
}


def patterned(dtype: torch.dtype, shape: Iterable[int], start: int = 1) -> Tensor:
    """A tensor whose bytes count up from ``start``, so that no two places hold the same."""
    shape = tuple(shape)
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = (torch.arange(start, start + count) % (2 if dtype == torch.bool else 251)).to(torch.uint8)
    return raw.view(dtype).reshape(shape)


def filled(tensor: Tensor) -> Tensor:
    """A row-major tensor of the same dtype and shape, with other bytes in it."""
    empty = torch.empty(tensor.shape, dtype=tensor.dtype)
    if empty.numel():
        flipped = [byte ^ 1 for byte in tensor_bytes(tensor)]
        empty.reshape(-1).view(torch.uint8).copy_(torch.tensor(flipped, dtype=torch.uint8))
    return empty


def assert_loads(location: str | os.PathLike[str] | Checkpoint, tensors: Mapping[str, Tensor]) -> LoadReport:
    """Load ``location`` into a module of the same names and compare every byte with ``tensors``."""
    module = module_of({name: filled(tensor) for name, tensor in tensors.items()})
    report = streamload.load(module, location)
    assert report.ok
    assert report.bytes_wanted == sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    loaded = dict(module.named_parameters())
    assert loaded.keys() == dict(tensors).keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert tensor_bytes(loaded[name]) == tensor_bytes(tensor), name
    return report


def refused(location: str | os.PathLike[str], *words: object, path: object = None, **options: Any) -> CheckpointError:
    """Opening ``location`` fails with a message that begins with the file at fault and has all ``words`` in it."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(location, **options)
    fault = os.fspath(location if path is None else path)  # type: ignore[call-overload]
    message = str(caught.value)
    assert message.startswith(f"{fault}: ")
    assert caught.value.path == fault
    assert "\n" not in message
    for word in words:
        assert str(word) in message
    return caught.value


def entry(dtype: str, shape: object, *offsets: object) -> dict[str, Any]:
    """One entry of a safetensors header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


def write_header(path: str | os.PathLike[str], header: object, data: bytes = b"") -> str:
    """Write a safetensors file whose header is ``header``: JSON as text, or something to make it of."""
    text = header if isinstance(header, str) else json.dumps(header)
    return write_raw(path, text.encode(), [data])


def write_index(folder: str | os.PathLike[str], content: object, name: str = "model.safetensors.index.json") -> str:
    """Write an index with this content (JSON as text, or something to make it of) and return its path."""
    path = os.path.join(folder, name)
    with open(path, "w", encoding="utf-8") as file:
        file.write(content if isinstance(content, str) else json.dumps(content))
    return path

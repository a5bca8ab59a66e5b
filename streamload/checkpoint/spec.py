"""One stored tensor, as its header describes it, and the file that it lies in."""

from __future__ import annotations

import os
from math import prod
from typing import NamedTuple

from streamload.checkpoint.dtypes import BITS


class Stamp(NamedTuple):
    """What tells one state of a file from another."""

    inode: int
    nbytes: int
    mtime_ns: int


def stamp_of(file: str | int) -> Stamp | None:
    """The stamp of a path or an open descriptor; ``None`` when it is not there."""
    try:
        found = os.stat(file)
    except OSError:
        return None  # reading it will tell why
    return Stamp(found.st_ino, found.st_size, found.st_mtime_ns)


class TensorSpec(NamedTuple):
    """Where one tensor lies and what it is.

    A named tuple rather than a dataclass: checkpoints of 100,000 tensors are common and this is made once for each.
    """

    name: str
    dtype: str
    """Code of the safetensors format, such as ``"BF16"``."""
    shape: tuple[int, ...]
    """Elements per dimension. F4 counts its elements, not the bytes that hold two of them."""
    file: str
    """Path of the shard, links not resolved."""
    offset: int
    """Bytes from the start of the file to the first element."""
    nbytes: int
    """Bytes of the elements, without gaps."""
    strides: tuple[int, ...] | None = None
    """Elements from one index to the next, for tensors that torch saved as views; ``None`` means row-major."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def span(self) -> int:
        """Bytes from the first element to the end of the last one, gaps included."""
        if self.strides is None or not self.nbytes:
            return self.nbytes
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * BITS[self.dtype] // 8

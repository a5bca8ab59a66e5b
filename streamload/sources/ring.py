"""Buffers that are lent out and reused, each only when nobody holds a tensor in it any more."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from streamload.checkpoint import TensorSpec
from streamload.sources.dtypes import torch_dtype
from streamload.sources.lent import Loan
from streamload.sources.staging import anonymous
from streamload.sources.system import BLOCK

_ALIGNMENT = 64


class Place(NamedTuple):
    """Where in a slot a tensor lies."""

    spec: TensorSpec
    start: int


def arrange(specs: Sequence[TensorSpec]) -> tuple[list[Place], int]:
    """Places for ``specs`` one after the other, aligned for any dtype, and the bytes that they take."""
    places, end = [], 0
    for spec in specs:
        places.append(Place(spec, end))
        end = -(-(end + spec.span) // _ALIGNMENT) * _ALIGNMENT
    return places, -(-end // BLOCK) * BLOCK


class Slot:
    """One buffer."""

    def __init__(self, nbytes: int) -> None:
        self._memory: mmap.mmap = anonymous(max(nbytes, BLOCK))
        self.nbytes = nbytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.busy = True
        """Whether it is being filled, or holds tensors that have not been lent yet."""
        self._loans: list[Loan] = []

    def lend(self, place: Place) -> Tensor:
        """The tensor at ``place``, whose bytes are there."""
        spec = place.spec
        dtype = torch_dtype(spec.dtype)
        shape = (*spec.shape[:-1], spec.shape[-1] // 2) if spec.dtype == "F4" else spec.shape
        if not spec.nbytes:
            return torch.empty(shape, dtype=dtype)
        tensor = torch.frombuffer(self._memory, dtype=dtype, count=spec.span // dtype.itemsize, offset=place.start)
        self._loans.append(Loan(spec.name, tensor.untyped_storage()))
        return tensor.view(shape) if spec.strides is None else tensor.as_strided(shape, spec.strides)

    def holder(self) -> str | None:
        """The first tensor in it that is still held; ``None`` when it is free."""
        self._loans = [loan for loan in self._loans if loan.is_held]
        return self._loans[0].name if self._loans else None


class Ring:
    """Slots of at most ``budget`` bytes together, those that others hold included."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._slots: list[Slot] = []

    def take(self, nbytes: int) -> Slot | None:
        """A slot of at least ``nbytes``, or ``None`` while there is no room for one."""
        free = sorted((slot for slot in self._slots if not slot.busy and slot.holder() is None), key=_size)
        found = next((slot for slot in free if slot.nbytes >= nbytes), None)
        while found is None and self.nbytes + nbytes > self._budget and free:
            self._slots.remove(free.pop(0))
        if found is None:
            if self.nbytes + nbytes > self._budget:
                return None
            found = Slot(nbytes)
            self._slots.append(found)
        found.busy = True
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(slot.nbytes for slot in self._slots)

    @property
    def pinned(self) -> list[tuple[str, int]]:
        """Slots that somebody holds, each by its first held tensor, in the order in which they were made."""
        return [(name, slot.nbytes) for slot in self._slots if not slot.busy and (name := slot.holder()) is not None]

    def clear(self) -> None:
        """Let go of all slots; those that somebody holds live on with their tensors."""
        self._slots.clear()


def _size(slot: Slot) -> int:
    return slot.nbytes

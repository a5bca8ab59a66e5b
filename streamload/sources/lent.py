"""Tensors over memory that somebody else owns, and whether anybody still holds them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy
import torch
from torch import Tensor

_use_count = torch._C._storage_Use_Count

#: numpy knows these widths, whatever the dtype is called.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def over_memory_of(tensor: Tensor, keeper: Callable[[Any], Any] | None = None) -> Tensor:
    """The same elements at the same place, in a storage object of their own, so that its holders can be counted.

    ``tensor`` is in host memory; it is kept for as long as the result, or a view of it, is held: by the ``keeper`` of its numpy
    array, if there is one.
    """
    plain = tensor.detach().resolve_conj().resolve_neg()
    carrier = plain.view(_CARRIERS[plain.dtype.itemsize]).numpy()
    return torch.from_numpy(carrier if keeper is None else numpy.asarray(keeper(carrier))).view(plain.dtype)


class Loan:
    """Watches the storage of tensors that were lent."""

    __slots__ = ("_storage", "name")

    def __init__(self, name: str, storage: torch.UntypedStorage) -> None:
        self.name = name
        """The first tensor that was lent from it."""
        self._storage: Any = storage

    @property
    def is_held(self) -> bool:
        """Whether anybody else holds the storage: through a tensor, a view, a Parameter, a numpy array."""
        return bool(_use_count(self._storage._cdata) > _alone())

    def poison(self) -> None:
        """Overwrite the memory with bytes 0xFF, which are NaN in most float dtypes."""
        torch.empty(0, dtype=torch.uint8).set_(self._storage).fill_(0xFF)


class Revocable:
    """A loan that ends at a moment that is not the borrower's: by then its tensor is empty, whoever still names it."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        lent = over_memory_of(tensor, _Unkept)
        self.name = name
        self._loan = Loan(name, lent.untyped_storage())
        self._lent: Tensor | None = lent
        self._seen = weakref.ref(lent)

    def hand(self) -> Tensor:
        """The tensor, once."""
        lent, self._lent = self._lent, None
        assert lent is not None
        return lent

    def revoke(self) -> None:
        """The memory is not the borrower's any more."""
        if (lent := self._seen()) is not None:
            with torch.no_grad():
                lent.set_()  # type: ignore[call-overload]

    @property
    def is_held(self) -> bool:
        """Whether the borrower still has the tensor, or a view of its memory."""
        return self._seen() is not None or self._loan.is_held


class _Unkept:
    """Memory by its address alone."""

    def __init__(self, carrier: Any) -> None:
        self.__array_interface__ = carrier.__array_interface__


@cache
def _alone() -> int:
    """The use count of a storage that only its Python object holds."""
    storage: Any = torch.empty(1).untyped_storage()
    return int(_use_count(storage._cdata))

"""Tensors over memory that somebody else owns, and whether anybody still holds them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import cache
from types import CellType, FrameType, GeneratorType
from typing import Any

import numpy
import torch
from torch import Tensor

from streamload.errors import BorrowError

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


#: How often a lender looks for who has a tensor that was taken back.
_SEARCHES = 64


class Revocable:
    """A loan that ends at a moment that is not the borrower's: by then its tensor is empty, whoever still names it."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        lent = over_memory_of(tensor, _Unkept)
        self.name = name
        self._owner: Tensor | None = tensor
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
        self._owner = None
        if (lent := self._seen()) is not None:
            with torch.no_grad():
                lent.set_()  # type: ignore[call-overload]

    @property
    def has_views(self) -> bool:
        """Whether the borrower has a view of the memory, once it was revoked."""
        return self._loan.is_held

    @property
    def is_named(self) -> bool:
        """Whether the borrower still has the tensor."""
        return self._seen() is not None

    @property
    def is_kept(self) -> bool:
        """Whether it has it in a container, not only in a variable."""
        lent = self._seen()
        found = _holders(lent) if lent is not None else []
        pairs = [each for each in found if isinstance(each, tuple)]  # (name, tensor), which may be a variable
        return len(found) > len(pairs) or any(_holders(pair, found, pairs) for pair in pairs)


class Lender:
    """Lends one tensor after the other to somebody whose loop still names the last when it asks for the next.

    What it still names then is emptied, so that the memory is free for others, however many come before its own next one. A
    tensor that is kept in a list, a dict or an object, or of which a view is, is told by BorrowError; a variable of a loop that
    another one, which filters, runs inside of is none. Tensors on an accelerator, and those without an element, are passed on as
    they are.
    """

    def __init__(self, borrower: str) -> None:
        self._borrower = borrower
        self._before: Revocable | None = None
        self._latest: Revocable | None = None
        self._searches = _SEARCHES

    def take_back(self) -> None:
        """The next one is asked for."""
        if self._latest is not None:
            self._latest.revoke()
        before, self._before, self._latest = self._before, self._latest, None
        if before is not None and (before.has_views or self._is_kept(before)):
            raise BorrowError(
                f"{self._borrower} still holds {before.name!r} when it asks for the next but one, but it was only lent: its "
                "memory is overwritten; copy what you keep (tensor.clone()), or load from files, which are mapped for it"
            )

    def _is_kept(self, loan: Revocable) -> bool:
        if not loan.is_named or not self._searches:
            return False
        self._searches -= 1  # each takes milliseconds, and the tensor is empty anyway
        return loan.is_kept

    def lend(self, name: str, tensor: Tensor) -> Tensor:
        """``tensor`` until ``take_back``."""
        if not tensor.is_cpu or not tensor.numel():
            return tensor
        self._latest = Revocable(name, tensor)
        return self._latest.hand()


def _holders(value: Any, *others: Any) -> list[Any]:
    """What refers to ``value``, but for the variables of running code."""
    skipped = (FrameType, GeneratorType, CellType)
    found = [each for each in gc.get_referrers(value) if not isinstance(each, skipped)]
    return [each for each in found if not any(each is other for other in others)]


class _Unkept:
    """Memory by its address alone."""

    def __init__(self, carrier: Any) -> None:
        self.__array_interface__ = carrier.__array_interface__


@cache
def _alone() -> int:
    """The use count of a storage that only its Python object holds."""
    storage: Any = torch.empty(1).untyped_storage()
    return int(_use_count(storage._cdata))

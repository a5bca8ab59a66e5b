"""Tensors over memory that somebody else owns, and whether anybody still holds them."""

from __future__ import annotations

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


@cache
def _alone() -> int:
    """The use count of a storage that only its Python object holds."""
    storage: Any = torch.empty(1).untyped_storage()
    return int(_use_count(storage._cdata))

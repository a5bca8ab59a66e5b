"""The stream that a module's own ``load_weights`` gets from a load, and what it may tell the load about it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from streamload.loading.keys import Keys
from streamload.sources.lent import Lender


class Handed(Iterator[tuple[str, Tensor]]):
    """The tensors of ``items``, each handed on by ``take``, and the books of the load in ``keys``."""

    current: ContextVar[Handed | None] = ContextVar("the stream of the load that is running", default=None)

    def __init__(
        self,
        items: Any,
        iterator: Iterator[Any],
        take: Callable[[Any], tuple[str, Tensor]],
        keys: Keys,
        budget: int,
        lender: Lender | None,
        stored: Callable[[str], str] = str,
    ) -> None:
        """``stored``: from a name that is handed on to the one that it is stored under, for the books."""
        self._items, self._iterator, self._take, self._keys = items, iterator, take, keys
        self._lender, self._stored = lender, stored
        self._skipped: frozenset[str] = frozenset()
        self.budget = budget
        """Bytes that may be cloned."""
        outer = Handed.current.get()
        self.decided: bool = outer is not None and outer.decided
        """Whether the spelling of the names has been found, here or by the module around the one that takes this in."""
        self.clones = 0
        self.clone_bytes = 0

    @property
    def names(self) -> Sequence[str] | None:
        """All names that will come, where the source knows them or everything is in memory already."""
        return names_of(self._items)

    def skip(self, dropped: Collection[str]) -> None:
        """``dropped`` are not needed: they are not read where that can be helped, and do not come."""
        self._skipped = frozenset(dropped)
        if (skip := getattr(self._items, "skip", None)) is not None:
            skip(dropped)

    def drop(self, name: str, rule: str) -> None:
        """Book ``name`` as dropped by ``rule``."""
        self._keys.dropped[self._stored(name)] = rule

    def lacks(self, name: str, why: str) -> None:
        """Say why the parameter ``name`` is missing."""
        self._keys.partly[name] = why

    def note(self, text: str) -> None:
        """Put ``text`` into the report."""
        self._keys.notes.append(text)

    def chose(self, prefix: str) -> None:
        """``prefix`` is put before the names."""
        self._keys.prefix = prefix

    def cloned(self, nbytes: int) -> None:
        """A tensor was cloned on the way."""
        self.clones += 1
        self.clone_bytes += nbytes

    def __next__(self) -> tuple[str, Tensor]:
        if self._lender is not None:
            self._lender.take_back()
        item = next(self._iterator)
        while self._skipped and isinstance(item, tuple) and item[0] in self._skipped:
            item = next(self._iterator)
        name, tensor = self._take(item)
        del item
        handed = [tensor if self._lender is None else self._lender.lend(name, tensor)]
        del tensor
        return name, handed.pop()


def names_of(items: Any) -> Sequence[str] | None:
    """The names of ``items``, where a source knows them or everything is in memory already; else ``None``."""
    known: Sequence[str] | None = getattr(items, "names", None)
    if known is None and isinstance(items, Mapping):
        return list(items)
    if known is None and isinstance(items, (list, tuple)) and all(isinstance(item, tuple) and item for item in items):
        return [item[0] for item in items]
    return known

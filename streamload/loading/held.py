"""Tensors of a stream that have to wait for others before their place is known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from streamload.errors import BudgetError


class Held:
    """Clones, which the source cannot overwrite, within a budget of ``budget`` bytes. Each is let go once nobody waits for it."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._tensors: dict[str, Tensor] = {}
        self._waiting: dict[str, set[str]] = {}
        self.nbytes = 0
        """Bytes held now."""
        self.count = 0
        """Clones made so far."""
        self.total = 0
        """Their bytes."""

    def keep(self, stored: str, tensor: Tensor, waiting: Iterable[str]) -> None:
        """Clone ``tensor`` until the targets ``waiting`` are served. Raises BudgetError when that is too much."""
        nbytes, targets = _size(tensor), set(waiting)
        if self.nbytes + nbytes > self._budget:
            first = f" since {next(iter(self._tensors))!r}" if self._tensors else ""
            raise BudgetError(
                f"{stored!r} cannot be put into {min(targets)} before other tensors have come, and the budget of "
                f"{self._budget:,} bytes does not let it be held ({nbytes:,} bytes, with {len(self._tensors)} other tensors of "
                f"{self.nbytes:,} bytes{first}); raise memory_limit, or load from files, where every place is known beforehand"
            )
        self._tensors[stored], self._waiting[stored] = tensor.detach().clone(), targets
        self.nbytes += nbytes
        self.total += nbytes
        self.count += 1

    def get(self, stored: str) -> Tensor | None:
        """The clone of ``stored``, if it is held."""
        return self._tensors.get(stored)

    def size(self, stored: str) -> int:
        """Bytes of the clone of ``stored``; 0 when it is not held."""
        return _size(self._tensors[stored]) if stored in self._tensors else 0

    def waiting(self) -> Iterator[tuple[str, str]]:
        """Who is held, and for which target, in the order in which they came."""
        yield from [(stored, target) for stored, targets in self._waiting.items() for target in sorted(targets)]

    def release(self, stored: str, target: str) -> None:
        """``target`` needs ``stored`` no more."""
        if (targets := self._waiting.get(stored)) is not None:
            targets.discard(target)
            if not targets:
                del self._waiting[stored]
                self.nbytes -= _size(self._tensors.pop(stored))

    def forget(self, target: str) -> None:
        """``target`` needs nothing more."""
        for stored in [stored for stored, targets in self._waiting.items() if target in targets]:
            self.release(stored, target)

    def move(self, stored: str, target: str, to: Iterable[str]) -> None:
        """What waited for ``target`` waits for others now."""
        if (targets := self._waiting.get(stored)) is not None:
            targets.update(to)
            self.release(stored, target)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()

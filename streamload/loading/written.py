"""What a stream has written: every element counted, tied parameters written once and compared."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from streamload.loading.ledger import Ledger
from streamload.loading.placement import Placement
from streamload.loading.planning import Copy, Difference, LoadPlan
from streamload.loading.rectangles import copy_into, difference, rectangle
from streamload.loading.room import make_room, untie
from streamload.loading.run import Teller
from streamload.loading.targets import Targets


class Written:
    """Writes rectangles into targets, which get their memory when the first one comes, and keeps the books."""

    def __init__(
        self,
        plan: LoadPlan,
        targets: Targets,
        device: torch.device | None,
        teller: Teller | None,
        *,
        may_untie: bool,
    ) -> None:
        self.ledger = Ledger([])
        self.differences: list[Difference] = []
        self.elements: dict[str, int] = {}
        """How many elements of each target have been written."""
        self.touched: set[str] = set()
        self._plan, self._targets, self._device, self._teller = plan, targets, device, teller
        self._may_untie = may_untie
        self._writers: dict[str, str] = {}
        """Of each target the name at which what fills it arrives: others that are tied to it bring copies."""
        self._served: set[str] = set()
        self._untied: set[str] = set()

    def is_complete(self, target: str) -> bool:
        """Whether every element has been written."""
        return self.elements.get(target, 0) == prod(self._targets.specs[target].shape)

    def put(self, target: str, placement: Placement, tensor: Tensor) -> bool:
        """Put a rectangle of ``tensor`` into its place; ``False`` when it has to be compared with what has not come yet."""
        first = self._targets.aliases.get(target, target)
        value = rectangle(tensor, placement)
        if self._writers.setdefault(first, target) != target:
            if not self.is_complete(first):
                return False
            copy = Copy(placement._replace(target=self._writers[first]), target)
            largest = difference(self._targets.tensors[first], placement, value)
            if largest is None or not self._may_untie:
                self._served.add(target)
                self._plan.copies.append(copy)
                self.differences += [Difference(copy, largest)] if largest is not None else []
                self.ledger.add(copy.placement)
                return True
            self._part(first, target)
            first = target
        self._served.add(target)
        self._room(first, whole=placement.target_region is None)
        copy_into(self._targets.tensors[first], placement, value)
        if first not in self._untied:
            self.elements[first] += value.numel() * (2 if placement.spec.dtype == "F4" else 1)
        self.ledger.add(placement._replace(target=first))
        if self._teller is not None:
            self._teller(self.ledger)
        return True

    def computed(self, target: str) -> None:
        """Make room for ``target``, all of which is about to be computed."""
        first = self._targets.first(target).name
        self._room(first, whole=True)
        self.elements[first] = prod(self._targets.specs[first].shape)

    def adopted(self, target: str, placement: Placement) -> None:
        """``target`` has taken over the tensor of ``placement``."""
        self.elements[target] = prod(self._targets.specs[target].shape)
        self._writers[target] = target
        self.touched.add(target)
        self.ledger.add(placement)
        if self._teller is not None:
            self._teller(self.ledger)

    def _part(self, first: str, target: str) -> None:
        """Undo the tie of ``target``, which has the values of ``first`` so far, all of which have been written.

        Where it is the first name itself that gets other values, the others that have come keep those that are there.
        """
        aliases = self._targets.aliases
        served = {alias for alias, other in aliases.items() if other == first and alias in self._served}
        for alias in [target] if target != first else sorted(served):
            self._plan.notes.append(untie(self._targets, alias, keep=True))
            self.elements[alias] = prod(self._targets.specs[alias].shape)
            self._writers[alias] = alias
            self._untied.add(alias)
        parted = {target, *(served if target == first else ())}
        self._plan.copies[:] = [
            copy for copy in self._plan.copies if copy.alias not in parted
        ]  # these are none any more
        self._untied.add(first)
        if target == first:
            self._writers[first] = first

    def _room(self, target: str, *, whole: bool) -> None:
        if target not in self.elements:
            make_room(self._targets, [target], self._device, keep=() if whole else (target,))
            self.elements[target] = 0
            self.touched.add(target)
        self._targets.touched = True

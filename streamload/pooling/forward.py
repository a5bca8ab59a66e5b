"""The stream that a class's own ``load_weights`` gets once the spelling of the names is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from streamload.errors import LoadError
from streamload.loading.adapting import ADAPTER, Adapter, Rows
from streamload.loading.handed import Handed
from streamload.loading.naming import Router
from streamload.loading.targets import module_targets
from streamload.memory.budget import AUTO_MAX
from streamload.pooling.probe import Probe, Prober, Spelling


class Forwarded(Iterator[tuple[str, Tensor]]):
    """The stream that the original class's ``load_weights`` gets: every name once, in the order in which it comes."""

    def __init__(self, model: Any, weights: Any) -> None:
        self._model = model
        self._adapter: Adapter = model.__dict__[ADAPTER]
        targets = module_targets(model, None)
        targets.loaders.clear()  # it is the class that calls them; a name is at home only where there is a parameter
        self._prober = Prober(self._adapter, Router(targets, None))
        self._targets = targets
        self._handed = Handed.current.get()
        nested = weights is not self._handed  # inside a class that loads itself, which gives this one its share
        decided = self._handed is not None and self._handed.decided
        self.tried = ""
        names = weights.names if isinstance(weights, Handed) else None
        self._loaded: set[str] = set()
        self._rows = Rows({"": self._adapter})
        items: Iterator[tuple[str, Tensor]] = iter(weights.items() if hasattr(weights, "items") else weights)
        self._spelling: Spelling | None = None
        if names is not None:
            self._spelling = self._from_names(weights, names)
            self._items = items
        elif decided:  # by the module around this one, whose names lead to this one's
            self._items = items
        else:
            budget = self._handed.budget if self._handed is not None else AUTO_MAX
            probe = Probe(self._prober, items, budget, drop=self._drop_lent, cloned=self._cloned)
            self._spelling = probe.decide()
            self._items = probe.tensors()
        self._say(nested)

    def _from_names(self, weights: Handed, names: Sequence[str]) -> Spelling | None:
        spelling = next(filter(None, map(self._prober.decide, names)), None)
        if spelling is None:
            self._prober.seen += names
        needed = {source for each in self._adapter.derivations for source in each.sources}
        dropped = {name: rule for name in names if (rule := self._prober.dropped(name, spelling))}
        for name, rule in dropped.items():
            self._drop(name, rule)
        weights.skip({name for name in dropped if self._adapter.head_of(name) not in needed})
        return spelling

    def _say(self, nested: bool) -> None:
        if self._handed is not None and not nested:
            self._handed.decided = self._spelling is not None
        if self._spelling is None:
            if self._prober.seen:
                self.tried = self._prober.tried(self._targets.known())
        elif self._handed is not None and not nested and self._spelling.kind == "add":
            self._handed.chose(self._spelling.prefix)
        if self._handed is not None and (self.tried or (self._spelling and self._spelling.kind != "none")):
            self._handed.note(self.tried or str(self._spelling))

    def _drop(self, name: str, rule: str) -> None:
        if self._handed is not None:
            self._handed.drop(name, rule)

    def _drop_lent(self, name: str, rule: str, tensor: Tensor) -> None:
        self._keep_rows(name, tensor)
        self._drop(name, rule)

    def _cloned(self, nbytes: int) -> None:
        if self._handed is not None:
            self._handed.cloned(nbytes)

    def __next__(self) -> tuple[str, Tensor]:
        while True:
            name, tensor = next(self._items)
            self._keep_rows(name, tensor)
            if self._take_own(name, tensor):
                continue
            if rule := self._prober.dropped(name, self._spelling):
                self._drop(name, rule)
                continue
            handed = [tensor]
            del tensor
            return self._prober.spell(self._spelling, name) if self._spelling else name, handed.pop()

    def _keep_rows(self, name: str, tensor: Tensor) -> None:
        """Keep the rows of a head from which a parameter may have to be made."""
        if self._adapter.derivations:
            for nbytes in self._rows.keep(self._prober.stands_for(name), tensor):
                self._cloned(nbytes)

    def _take_own(self, name: str, tensor: Tensor) -> bool:
        """Load what the original class knows nothing of."""
        own = next((form for form in self._adapter.forms(name) if form in self._model.own_parameters()), None)
        if own is None:
            return False
        parameter = self._model.get_parameter(own)
        if parameter.shape != tensor.shape:
            raise LoadError(f"{name}: expected shape {list(parameter.shape)} for {own}, found {list(tensor.shape)}")
        parameter.data.copy_(tensor)
        self._loaded.add(own)
        return True

    def finish(self) -> set[str]:
        """Make what was not stored; returns what was loaded beside the original class."""
        for target, derivation in self._rows.missing(self._loaded):
            if (value := derivation.value()) is not None:
                self._model.get_parameter(target).data.copy_(value)
                self._loaded.add(target)
            elif self._handed is not None:
                self._handed.lacks(target, derivation.nothing())
        self._rows.forget()
        return self._loaded

"""The probe: how the names of a one-pass stream are spelled, found out from its first tensors and no more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from difflib import get_close_matches
from itertools import chain
from typing import NamedTuple

from torch import Tensor

from streamload.errors import BudgetError
from streamload.loading.adapting import Adapter, left_out
from streamload.loading.naming import Router

#: So many misses may be looked at.
BOUND = 256


class Spelling(NamedTuple):
    """How stored names become those that the module's own loader expects."""

    kind: str
    """``"none"``, ``"add"`` or ``"strip"``."""
    prefix: str

    def __call__(self, name: str) -> str:
        """``name`` in this spelling."""
        if self.kind == "add":
            return self.prefix + name
        return name.removeprefix(self.prefix) if self.kind == "strip" else name

    def __str__(self) -> str:
        if self.kind == "none":
            return "names stay as they are"
        return f"prefix {self.prefix!r} {'added to' if self.kind == 'add' else 'taken off'} the names"


class Prober:
    """Decides for one module, asking its own mapper through ``router``."""

    def __init__(self, adapter: Adapter, router: Router) -> None:
        self._adapter, self._router = adapter, router
        self.seen: list[str] = []
        """Names that were looked at in vain."""

    def _lands(self, name: str) -> list[str]:
        """The parameters and buffers at which ``name`` arrives in just this spelling."""
        route = self._router.own_route(name)
        return [route.group] if route.group else [place.name for place in route.places if self._router.lands(place)]

    def stands_for(self, name: str) -> list[str]:
        """The parameters that ``name`` is for, in whatever spelling, those of heads that were left out included."""
        at_home = next(filter(None, map(self._lands, self._adapter.forms(name))), [])
        route = self._router.own_route(name)
        heads = map(self._adapter.head_of, [name, *(place.name for place in route.places)])
        return [*at_home, *filter(None, heads)]

    def dropped(self, name: str, spelling: Spelling | None = None) -> str:
        """The rule under which ``name`` is dropped; an empty string when it is not. ``spelling``: the one that was found."""
        if any(map(self._lands, self._adapter.forms(name))):
            return ""
        route = self._router.own_route(name)
        if head := next(filter(None, map(self._adapter.head_of, [name, *(place.name for place in route.places)])), ""):
            return left_out(self._adapter, head)
        if spelling is not None and (route.places or route.group):
            route = self._router.own_route(spelling(name))
        return "" if route.places or route.group else f"the module's mapper: {route.rule}"

    def decide(self, name: str) -> Spelling | None:
        """The spelling in which ``name`` arrives at a parameter or a buffer, if there is one that may decide."""
        prefix = self._adapter.prefix
        for kind, form in zip(("none", "add", "strip"), self._adapter.forms(name), strict=False):
            places = self._lands(form)
            if places and (not self._adapter.has_base or any(place.startswith(prefix) for place in places)):
                return Spelling(kind, prefix)
        return None

    def spell(self, spelling: Spelling, name: str) -> str:
        """``name`` for the module's own loader. One that is at home as it is, such as a head's, stays as it is."""
        return name if spelling.kind == "none" or self._lands(name) else spelling(name)

    def tried(self, known: Collection[str]) -> str:
        """What was looked at in vain, for a message; ``known``: the module's names."""
        lines = []
        for name in self.seen[:3]:
            forms = [f"{form} -> {self._mapped(form)}" for form in self._adapter.forms(name)]
            close = get_close_matches(name, known, n=1, cutoff=0.3)
            lines.append(f"{name}: tried {'; '.join(forms)}" + (f"; closest parameter {close[0]}" if close else ""))
        return f"probe: none of the first {len(self.seen)} names is at home in any spelling. {' / '.join(lines)}"

    def _mapped(self, name: str) -> str:
        route = self._router.own_route(name)
        return ", ".join(place.name for place in route.places) or route.group or "dropped"


class Probe:
    """Looks at the first tensors of ``items`` until a name is at home.

    Only misses are cloned, since the stream may reuse its memory; a name that is dropped is neither cloned nor counted.
    Stops cloning after ``BOUND`` misses, or ``budget`` bytes of them.
    """

    def __init__(
        self,
        prober: Prober,
        items: Iterable[tuple[str, Tensor]],
        budget: int,
        *,
        drop: Callable[[str, str, Tensor], None],
        cloned: Callable[[int], None],
    ) -> None:
        self._prober, self._rest = prober, iter(items)
        self._budget, self._drop, self._cloned = budget, drop, cloned
        self._misses: deque[tuple[str, Tensor]] = deque()
        self._current: deque[tuple[str, Tensor]] = deque()

    def decide(self) -> Spelling | None:
        """The spelling, or ``None`` when none was found. The stream goes on in ``tensors``."""
        held = 0
        for name, tensor in self._rest:
            if rule := self._prober.dropped(name):
                self._drop(name, rule, tensor)
                continue
            found = self._prober.decide(name)
            nbytes = tensor.nbytes
            if found is None:
                self._prober.seen.append(name)
                if nbytes > self._budget:
                    raise BudgetError(
                        f"{name!r} has no place in any spelling, and its {nbytes:,} bytes are more than the "
                        f"{self._budget:,} bytes that may be kept while the spelling of the names is looked for; "
                        "raise memory_limit, give a mapper that drops it, or load from files, whose names are known"
                    )
                if len(self._misses) < BOUND and held + nbytes <= self._budget:
                    self._misses.append((name, tensor.detach().clone()))
                    self._cloned(nbytes)
                    held += nbytes
                    continue
            self._current.append((name, tensor))
            return found
        return None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors in their order, each once: those that were kept, that at which the probe stopped, the rest."""
        return chain(_drained(self._misses), _drained(self._current), self._rest)


def _drained(kept: deque[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Each is let go as it is handed on: ``chain`` keeps what it was given until its end."""
    while kept:
        yield kept.popleft()

"""Find the mapper of a module and ask it where stored tensors go: every mapper once, at its own level."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from streamload.checkpoint import TensorSpec
from streamload.errors import MappingError
from streamload.loading.adapting import Adapter, left_out
from streamload.loading.keys import Incomplete, Mismatch
from streamload.loading.operation import Operation
from streamload.loading.targets import Targets
from streamload.loading.tracing import Moved
from streamload.mapping.composed import Named, named
from streamload.mapping.rules import AtHome, Place, Stacked, Step

#: Libraries whose models bring conversions of their own: package -> where to ask for them.
_INTEGRATIONS = {"transformers": ("streamload.integrations.conversions", "conversions_of")}


class Route(NamedTuple):
    """Where a stored tensor goes."""

    places: Sequence[Place] = ()
    rule: str = ""
    """The rule that drops it; or those that renamed it, and why others that match did not fire."""
    group: str = ""
    """The group of tensors that are converted together, where it belongs to one; ``places`` is empty then."""
    head: tuple[str, str] = ("", "")
    """The dotted prefix of a module made for pooling, and which parameter of its heads that were left out this was for."""


class Conversions(Protocol):
    """What a library knows about the layouts of its models' checkpoints."""

    def sort(self, names: Sequence[str]) -> list[str]:
        """The order in which tensors are to be converted."""

    def route(self, name: str) -> Route:
        """Where the stored tensor ``name`` goes."""

    def lands(self, name: str) -> bool:
        """Whether ``name`` finds its place."""

    def convert(
        self, group: str, specs: Mapping[str, TensorSpec]
    ) -> dict[str, Moved] | Operation | Incomplete | Mismatch:
        """Where the tensors of a group go: moves of rectangles, or an operation to be run; or what is wrong with them."""

    def foresee(self, group: str, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec] | None:
        """All tensors of a group in order, when those that have come tell them; else ``None``."""

    def allow_missing(self, name: str) -> str | None:
        """The rule under which the parameter ``name`` may be missing."""

    @property
    def prefix(self) -> str:
        """What was put before the names."""

    def notes(self) -> list[str]:
        """What there is to say about the names that were asked for."""


class Router:
    """Says where every stored tensor goes."""

    def __init__(self, targets: Targets, mapper: Any) -> None:
        self._targets = targets
        self._adapters = targets.adapters
        self.spelled: Counter[tuple[str, str, str]] = Counter()
        self.conversions: Conversions | None = None
        module = targets.module
        self.library = _library_of(module)
        """The one that the module comes from, if it may have conversions of its own."""
        self.overridden = mapper is not None and bool(self.library)
        """Whether a mapper was given in place of them."""
        if mapper is None and module is not None:
            mapper = getattr(module, "hf_to_vllm_mapper", None)
            if mapper is None and self.library:
                self.conversions = _conversions_of(module, self.library, targets)
        root = named(mapper) if mapper is not None else None
        self._root = self.conversions.route if self.conversions is not None else _ask(root, self.at_home)
        below = {dotted: named(own) for dotted, own in targets.mappers if dotted}
        self._below = {
            dotted: own for dotted, own in below.items() if own is not root and targets.loader_of(dotted) is None
        }
        mappers = [*([root] if root is not None else []), *self._below.values()]
        self.stacked_rules: list[Stacked] = [rule for mapper in mappers for rule in mapper.stacked_rules]
        """Those of all mappers."""

    def at_home(self, name: str) -> bool:
        """Whether the module has ``name``; one that is handed to a module inside, which maps it itself, is not looked up."""
        return self._targets.at_home(name) and (not self._targets.loaders or self._targets.loader_of(name) is None)

    @property
    def trivial(self) -> bool:
        """Whether every name stays as it is."""
        return (
            self._root is None
            and not self._below
            and not (self._targets.loaders or self._targets.writers or self._adapters)
        )

    def route(self, name: str) -> Route:
        """Where the stored tensor ``name`` goes."""
        found = self.own_route(name)
        return self._adapted(name, found) if self._adapters else found

    def _adapted(self, name: str, found: Route) -> Route:
        """``found`` where it is at home, else where another spelling is, or nowhere when it was for a head that was left out."""
        if found.group or (found.places and all(self.lands(place) for place in found.places)):
            return found
        for dotted, adapter in self._adapters.items():
            if not dotted and self.conversions is None:
                others = [form for form in adapter.forms(name) if form != name]
                routes = iter([(form, self.own_route(form)) for form in others])
            else:
                routes = self._spelled_below(dotted, adapter, found)
            for form, route in routes:
                if route.places and all(self.lands(place) for place in route.places):
                    self.spelled[(dotted, adapter.prefix, "add" if len(form) > len(name) else "strip")] += 1
                    return route
            mapped = [place.name.removeprefix(dotted) for place in found.places if place.name.startswith(dotted)]
            for head in map(adapter.head_of, [*([] if dotted else [name]), *mapped]):
                if head:
                    return Route((), left_out(adapter, head, dotted), head=(dotted, head))
        return found

    def _spelled_below(self, dotted: str, adapter: Adapter, found: Route) -> Iterator[tuple[str, Route]]:
        """Other spellings of a name that goes into a module inside."""
        if len(found.places) != 1 or not dotted or not found.places[0].name.startswith(dotted):
            return
        [place] = found.places
        rest = place.name[len(dotted) :]
        for form in adapter.forms(rest):
            if form != rest:
                yield dotted + form, found._replace(places=[place._replace(name=dotted + form)])

    def dropped(self, names: Sequence[str]) -> dict[str, str]:
        """Those of ``names`` that need not be read -> the rule that drops them."""
        needed = {
            (dotted, source)
            for dotted, adapter in self._adapters.items()
            for derivation in adapter.derivations
            for source in derivation.sources
        }
        counted, found = self.spelled.copy(), {}
        for name in names:
            # A library counts what it is asked for, and may think otherwise of a name once it has seen others.
            route = self.route(name) if self.conversions is None else self._adapted(name, Route([Place(name)]))
            if not route.places and not route.group and route.head not in needed:
                found[name] = route.rule
        self.spelled = counted
        return found

    def lands(self, place: Place) -> bool:
        """Whether the module has it, or hands it to a module inside."""
        return self._targets.at_home(place.name) or self._targets.loader_of(place.name) is not None

    def notes(self) -> list[str]:
        """Which prefixes were added or taken off because a module was made of another."""
        verbs = {"add": "added to", "strip": "taken off"}
        return [
            f"prefix {dotted + prefix!r} {verbs[kind]} {count} names"
            for (dotted, prefix, kind), count in self.spelled.items()
        ]

    @property
    def prefix(self) -> str:
        """What was put before names, because the module was made of another."""
        return next((prefix for dotted, prefix, kind in self.spelled if not dotted and kind == "add"), "")

    def own_route(self, name: str) -> Route:
        """Where the mappers let the stored tensor ``name`` go, in just this spelling."""
        found = self._root(name) if self._root is not None else Route([Place(name)])
        if not self._below or not found.places or all(self.at_home(place.name) for place in found.places):
            return found
        return self._descend(name, found)

    def _descend(self, name: str, route: Route) -> Route:
        """Ask the mappers of the modules that the tensor passes on its way, from the outermost in."""
        for dotted, mapper in self._below.items():
            [place, *others] = route.places
            if others or self.at_home(place.name) or not place.name.startswith(dotted):
                continue
            rest = place.name[len(dotted) :]
            found = _ask(mapper, lambda inner, dotted=dotted: self.at_home(dotted + inner))(rest)  # type: ignore[misc]
            if not found.places:
                return found
            if place.shard is not None and any(each.shard is not None for each in found.places):
                raise MappingError(
                    f"{name!r} is put into part {place.shard!r} by the model's mapper and into another part by that of "
                    f"{dotted.rstrip('.')!r}; a tensor can be fused once"
                )
            places = [
                each._replace(
                    name=dotted + each.name,
                    shard=each.shard if place.shard is None else place.shard,
                    transposed=each.transposed != place.transposed,
                )
                for each in found.places
            ]
            places = [each._replace(among=tuple(dotted + other for other in each.among)) for each in places]
            route = Route(places, found.rule or route.rule)
        return route


def _ask(mapper: Named | None, at_home: AtHome) -> Callable[[str], Route] | None:
    return None if mapper is None else lambda name: _route_of(*mapper.places(name, at_home))


def _route_of(places: Sequence[Place], steps: Sequence[Step]) -> Route:
    fired = [f"{step.stage} rule {step.rule}" for step in steps if step.after != step.before]
    if not places:
        return Route(places, fired[-1] if fired else "")
    held = [f"{step.stage} rule {step.rule} does not fire: {step.why}" for step in steps if step.why]
    return Route(places, "; ".join([*([" and ".join(fired)] if fired else []), *held]))


def _library_of(module: Any) -> str:
    """The package that the module comes from, when an integration knows it."""
    packages = {each.__module__.partition(".")[0] for each in type(module).__mro__}
    return next((package for package in _INTEGRATIONS if package in packages), "")


def _conversions_of(module: Any, library: str, targets: Targets) -> Conversions | None:
    room, function = _INTEGRATIONS[library]
    found: Conversions | None = getattr(import_module(room), function)(module, targets)
    return found

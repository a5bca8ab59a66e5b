"""Match stored tensors with the targets at which they arrive."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

from streamload.checkpoint import TensorSpec
from streamload.errors import LoadError, MappingError
from streamload.loading.fused import Fused, sizes_of
from streamload.loading.ignore import Ignore
from streamload.loading.keys import Incomplete, Keys, Mismatch
from streamload.loading.naming import Route, Router
from streamload.loading.operation import Operation
from streamload.loading.placement import row_major
from streamload.loading.targets import Targets
from streamload.loading.tracing import Moved
from streamload.loading.wrappers import taken_off, wrapper_prefix
from streamload.mapping.rules import Place

#: Rule under which a tensor is dropped that the module holds as a non-persistent buffer.
RECOMPUTED = "recomputed buffer"


class Cut(NamedTuple):
    """A stored tensor that is spread over several targets."""

    spec: TensorSpec
    place: Place


class Blocks(NamedTuple):
    """Rectangles of stored tensors that a library's conversion puts together."""

    spec: TensorSpec
    """The first of them."""
    moved: Moved


Arrival: TypeAlias = "TensorSpec | Cut | Fused | Blocks | Operation"
"""What arrives at one target; a TensorSpec fills it whole."""


class Matched:
    """What arrives at every target, by name. Problems go into ``keys``."""

    def __init__(self, keys: Keys, targets: Targets, router: Router, unexpected: Ignore) -> None:
        self._keys, self._targets, self._router, self._unexpected = keys, targets, router, unexpected
        self.arrived: dict[str, Arrival] = {}
        """By the name that it arrived at, which can be an alias."""
        self.groups: dict[str, dict[str, TensorSpec]] = defaultdict(dict)
        """Stored tensors that a library converts together, by the name of the group."""
        self._made_of: dict[str, list[str]] = {}
        self._broken: dict[str, Incomplete | Mismatch] = {}
        self.handed: dict[str, str] = {}
        """Stored tensors that a hook takes -> the dotted prefix of its module, or the parameter that it belongs to."""
        self.hooked: set[str] = set()
        """Targets that hooks fill; it is not known beforehand with what."""
        self._hooks: set[str] = set()
        self._parts: dict[tuple[str, str], str] = {}
        self.operations: list[Operation] = []
        self.headed: dict[tuple[str, str], TensorSpec] = {}
        """Stored tensors of heads that a module does without, by its dotted prefix and the head's parameter."""

    def names(self) -> Iterator[str]:
        """The targets at which something has arrived in full, or in a wrong shape."""
        for name, arrival in self.arrived.items():
            if not isinstance(arrival, Fused) or arrival.incomplete() is None:
                yield name
        yield from (name for name, what in self._broken.items() if isinstance(what, Mismatch))
        yield from self.hooked

    def lacking(self) -> dict[str, Incomplete]:
        """Targets of which some parts have arrived but not all."""
        found = {name: what for name, what in self._broken.items() if isinstance(what, Incomplete)}
        for arrival in self.arrived.values():
            if isinstance(arrival, Fused) and (what := arrival.incomplete()) is not None:
                found[arrival.target.name] = what
        return found

    def take(self, catalog: Mapping[str, TensorSpec]) -> None:
        """Take in every tensor of ``catalog``."""
        at_home, arrived = self._targets.at_home, self.arrived
        prefix = wrapper_prefix(catalog.keys(), self.lands)
        self._keys.notes += taken_off(prefix)
        if self._router.trivial:
            for stored, spec in catalog.items():
                name = stored.removeprefix(prefix)
                if at_home(name) and name not in self._targets.recomputed:
                    arrived[name] = spec
                else:
                    self._book(name, spec, Route([Place(name)]))
            return
        own = self.in_order({name.removeprefix(prefix): spec for name, spec in catalog.items()})
        for name, spec in own.items():
            self.arrive(name, spec)
        for group, specs in self.groups.items():
            self.convert(group, specs)
        self._untie_heads()
        self._derive()

    def _untie_heads(self) -> None:
        """A head that was left out, when it is stored in place of the parameter that it was tied to, is that parameter."""
        for dotted, adapter in self._targets.adapters.items():
            for head, first in adapter.tied.items():
                spec = self.headed.get((dotted, head))
                if spec is not None and self._targets.at_home(dotted + first) and dotted + first not in self.arrived:
                    self.arrived[dotted + first] = spec
                    del self._keys.dropped[spec.name]
                    self._keys.notes.append(f"{spec.name}: stored in place of {dotted + first}, to which it is tied")

    def _derive(self) -> None:
        """Compute what is not stored from rows of what is."""
        for dotted, adapter in self._targets.adapters.items():
            for derivation in adapter.derivations:
                target = dotted + derivation.target
                if target in self.arrived:
                    continue
                found = ((source, self.source_of(dotted, source)) for source in derivation.sources)
                source, spec = next(((source, spec) for source, spec in found if spec is not None), ("", None))
                if spec is None:
                    self._keys.partly[target] = derivation.nothing()
                else:
                    made = derivation.operation(source, spec, target, self._targets.first(target).shape)
                    self.arrived[target] = made
                    self.operations.append(made)
                    self._keys.notes.append(f"{made.title}: computed in fp32")

    def source_of(self, dotted: str, source: str) -> TensorSpec | None:
        """The stored tensor of ``source``, a parameter or one of a head that was left out."""
        if (spec := self.headed.get((dotted, source))) is not None:
            return spec
        arrival = self.arrived.get(dotted + source)
        return arrival if isinstance(arrival, TensorSpec) else None

    def in_order(self, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        """``specs`` in the order in which a library that converts them wants to see them."""
        conversions = self._router.conversions
        return specs if conversions is None else {name: specs[name] for name in conversions.sort([*specs])}

    def lands(self, name: str) -> bool:
        """Whether ``name`` finds its place; one that is dropped does not."""
        if self._targets.at_home(name) or self._targets.loader_of(name) is not None:
            return True
        if self._router.conversions is not None:
            return self._router.conversions.lands(name)
        places = self._router.route(name).places
        return bool(places) and all(self._targets.at_home(place.name) for place in places)

    def arrive(self, name: str, spec: TensorSpec) -> Route:
        """Book ``spec``, whose name without a wrapper's prefix is ``name``; says where it went."""
        route = self._router.route(name)
        self._book(name, spec, route)
        return route

    def _book(self, name: str, spec: TensorSpec, route: Route) -> None:
        if route.group:
            self.groups[route.group][name] = spec
        elif not route.places:
            self._keys.dropped[spec.name] = route.rule
            if route.head[1]:
                self.headed[route.head] = spec
        for place in route.places:
            if (loader := self._targets.loader_of(place.name)) is not None:
                self._hand(spec, loader)
            elif place.name in self._targets.writers:
                self._hand_part(spec, place)
            elif not self._targets.at_home(place.name):
                self._left_over(spec, place, route.rule)
            elif place.name in self._targets.recomputed:
                self._keys.dropped[spec.name] = RECOMPUTED
            else:
                self._put(transposed(spec) if place.transposed else spec, place)

    def _hand(self, spec: TensorSpec, hook: str) -> None:
        self.handed[spec.name] = hook
        if hook not in self._hooks:
            self._hooks.add(hook)
            own = hook in self._targets.loaders
            self.hooked.update(
                [name for name in self._targets.specs if name.startswith(hook)]
                if own
                else [self._targets.first(hook).name]
            )

    def _hand_part(self, spec: TensorSpec, place: Place) -> None:
        """Hand a tensor to the ``weight_loader`` of its parameter, which can be called several times, but once for a part."""
        part = (place.name, repr(place.shard))
        if (first := self._parts.setdefault(part, spec.name)) != spec.name:
            raise MappingError(
                f"{first!r} and {spec.name!r} both map to {place.name!r}"
                + (f" part {place.shard!r}" if place.shard is not None else "")
                + "; one of them has to be renamed or dropped"
            )
        self._hand(spec, place.name)

    def hook_notes(self) -> list[str]:
        """How many tensors every hook takes."""
        counts = Counter(self.handed.values())
        loaders = {
            f"{hook.rstrip('.') or 'the module'}: its own load_weights takes {count} tensors"
            for hook, count in counts.items()
            if hook in self._targets.loaders
        }
        parts = sum(count for hook, count in counts.items() if hook not in self._targets.loaders)
        return sorted(loaders) + ([f"weight_loader of parameters takes {parts} tensors"] if parts else [])

    def _left_over(self, spec: TensorSpec, place: Place, rule: str) -> None:
        if dropped := self._unexpected.match(spec.name) or self._unexpected.match(place.name):
            self._keys.dropped[spec.name] = dropped
            return
        self._keys.unexpected_keys.append(spec.name)
        if place.name != spec.name:
            self._keys.renamed[spec.name] = f"becomes {place.name} by {rule}, and the module has no such parameter"
        elif rule:
            self._keys.renamed[spec.name] = rule

    def _put(self, spec: TensorSpec, place: Place) -> None:
        there = self.arrived.get(place.name)
        if place.shard is not None and (there is None or isinstance(there, Fused)):
            if there is None:
                sizes = sizes_of(self._targets.module, place.name)
                there = Fused(self._targets.first(place.name), self._router.stacked_rules, sizes, place.name)
                self.arrived[place.name] = there
            there.add(spec, place.shard)
        else:
            self._set(place.name, Cut(spec, place) if place.among else spec, spec.name)

    def _set(self, name: str, arrival: Arrival, source: str) -> None:
        """Let ``arrival``, which comes from ``source``, fill ``name``. Raises MappingError when something does already."""
        if (there := self.arrived.get(name)) is not None:
            raise MappingError(
                f"{_source_of(there)!r} and {source!r} both map to {name!r}; one of them has to be renamed or dropped"
            )
        self.arrived[name] = arrival

    def made_of(self, group: str) -> list[str]:
        """The targets that the tensors of ``group`` fill together."""
        return self._made_of.get(group, [])

    def take_back(self, group: str, specs: Mapping[str, TensorSpec]) -> None:
        """Of the tensors of ``group`` only ``specs`` have come: its targets are not filled after all."""
        for name in self._made_of.pop(group, []):
            self.arrived.pop(name, None)
        self.convert(group, self.in_order(specs))

    def think_again(self) -> None:
        """Look again at what was left over, now that all names are known: it can be a head that the module does without."""
        for name in [*self._keys.unexpected_keys]:
            route = self._router.route(name)
            if not route.places and not route.group:
                self._keys.unexpected_keys.remove(name)
                self._keys.renamed.pop(name, None)
                self._keys.dropped[name] = route.rule

    def convert(self, group: str, specs: Mapping[str, TensorSpec]) -> None:
        """Ask the library what becomes of ``specs``."""
        assert self._router.conversions is not None
        made = self._router.conversions.convert(group, specs)
        if isinstance(made, (Incomplete, Mismatch)):
            self._broken[group] = made
            self._keys.mismatched_keys += [made] if isinstance(made, Mismatch) else []
        elif isinstance(made, Operation):
            for name in made.targets:
                if not self._targets.at_home(name):
                    raise LoadError(f"{made.title}: makes {name}, which the module does not have")
                self._set(name, made, _source_of(made))
            self._made_of[group] = list(made.targets)[:1]  # for all of them it is run once
            self.operations.append(made)
            self._keys.notes.append(f"{made.title}: computed, with its {len(specs)} stored tensors in memory at once")
        else:
            self._move(group, made, next(iter(specs.values())))

    def _move(self, group: str, made: Mapping[str, Moved], first: TensorSpec) -> None:
        """Book rectangles that the conversion of ``group`` makes, the first of them from ``first``."""
        self._made_of[group] = [name for name in made if self._targets.at_home(name)]
        for name, moved in made.items():
            if not self._targets.at_home(name) or name in self._targets.recomputed:
                self._left_over(first, Place(name), f"the conversion of {group}")
            else:
                self._set(name, Blocks(first, moved), first.name)


def _source_of(arrival: Arrival) -> str:
    """The stored tensor that ``arrival`` comes from, or the first of them."""
    if isinstance(arrival, TensorSpec):
        return arrival.name
    if isinstance(arrival, Fused):
        return arrival.arrivals[0].spec.name
    return next(iter(arrival.sources.values())).name if isinstance(arrival, Operation) else arrival.spec.name


def transposed(spec: TensorSpec) -> TensorSpec:
    """``spec`` with its last two dimensions swapped; the bytes stay where they are."""
    if len(spec.shape) < 2:
        return spec
    if spec.dtype == "F4":
        raise LoadError(f"{spec.name}: F4 packs two elements into a byte, so it cannot be transposed on the way")
    strides = spec.strides if spec.strides is not None else row_major(spec.shape)
    shape = (*spec.shape[:-2], spec.shape[-1], spec.shape[-2])
    return spec._replace(shape=shape, strides=(*strides[:-2], strides[-1], strides[-2]))

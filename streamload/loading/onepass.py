"""Fill a module from a one-pass stream of ``(name, tensor)``: every tensor as it comes, wherever its place is known."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamload.checkpoint import TensorSpec
from streamload.checkpoint.dtypes import BITS, castable
from streamload.errors import LoadError
from streamload.loading.adapting import Rows
from streamload.loading.fitting import Fitter
from streamload.loading.forecast import needed_by
from streamload.loading.fused import Fused
from streamload.loading.handed import names_of
from streamload.loading.held import Held
from streamload.loading.hooks import Hooks
from streamload.loading.ignore import Ignore
from streamload.loading.keys import Mismatch
from streamload.loading.matching import Blocks, Matched
from streamload.loading.naming import Router
from streamload.loading.operation import Operation, compute
from streamload.loading.placement import Placement
from streamload.loading.planning import Copy, LoadPlan, conclude
from streamload.loading.rectangles import spec_of
from streamload.loading.room import to_meta
from streamload.loading.run import Teller
from streamload.loading.targets import Targets
from streamload.loading.wrappers import Unwrapper, taken_off
from streamload.loading.written import Written
from streamload.mapping.rules import Place
from streamload.memory import Meter
from streamload.sources.dtypes import CODES
from streamload.sources.source import Source

#: Where a stream's tensors are said to come from.
ORIGIN = "the stream"

#: What waits for a group whose conversion is not known yet, whose name can be that of a target.
_GROUP = "the group of "


@dataclass
class Order:
    """What a stream is to be loaded into, and how."""

    targets: Targets
    router: Router
    unexpected: Ignore
    missing: Ignore
    device: torch.device | None
    budget: int
    """Bytes of clones."""
    untie: bool
    teller: Teller | None


class OnePass:
    """Takes a stream in. Tensors are written as they come; those whose place depends on others are cloned until then."""

    def __init__(self, items: Iterable[Any], plan: LoadPlan, order: Order, origin: Any = None) -> None:
        """``origin``: what ``items`` were made of, which may know its names."""
        self.plan, self.targets = plan, order.targets
        self.spoilt: list[str] = []
        self._items, self._order = items, order
        self._origin = items if origin is None else origin
        self._matched = Matched(plan, order.targets, order.router, order.unexpected)
        self._fitter = Fitter(plan, order.targets)
        self._unwrap = Unwrapper(self._matched.lands)
        self._held = Held(order.budget)
        self._seen: set[str] = set()
        self._foreseen: dict[str, Mapping[str, TensorSpec]] = {}
        self._blocks: dict[str, dict[str, list[Placement]]] = {}
        self._done: dict[str, set[Placement]] = defaultdict(set)
        lends = bool(getattr(items, "lends", False) or getattr(self._origin, "lends", False))
        self._hooks = Hooks(order.targets, order.device, plan, order.budget, lends=lends)
        self._written = Written(plan, order.targets, order.device, order.teller, may_untie=order.untie)
        self.ledger, self.differences = self._written.ledger, self._written.differences
        self._from_meta = {name for name, tensor in order.targets.tensors.items() if tensor.is_meta}
        self._foreign: BaseException | None = None
        self._rows = Rows(order.targets.adapters)

    @property
    def clones(self) -> int:
        """Tensors that were cloned because their place was not known when they came."""
        return self._held.count

    @property
    def clone_bytes(self) -> int:
        """Bytes of those, all together."""
        return self._held.total

    def names(self) -> Collection[str]:
        """The targets that are being filled; once the stream has ended, those that are complete."""
        return self._written.elements.keys()

    def touched(self) -> set[str]:
        """The targets that have been written to."""
        return {*self._written.touched, *self._hooks.touched}

    def passes_on(self, error: BaseException) -> bool:
        """Whether ``error`` came out of the stream, or out of a hook."""
        return error is self._foreign or error is self._hooks.raised

    def untie(self, copies: Sequence[Copy]) -> None:
        """Ties come apart while the stream passes, if they may."""

    def run(self, meter: Meter) -> None:
        """Take in every tensor of the stream, then see what has waited in vain."""
        iterator = iter(self._items)
        try:
            if "" not in self.targets.loaders and (names := names_of(self._origin)) is not None:
                self._look_ahead(names)
            if "" in self.targets.loaders:
                self._hooks.run(self._origin, self._guarded(iterator), self._hand_on)
            for item in self._guarded(iterator):
                self._take(*_checked(item))
                del item  # a source that reuses its memory looks whether anybody holds it
            self._hooks.finish()
            count, nbytes = self._hooks.clones
            self._held.count += count
            self._held.total += nbytes
        finally:
            self._hooks.close()
            if (close := getattr(iterator, "close", None)) is not None:
                close()
        self._finish()
        meter.sample()

    def _look_ahead(self, names: Sequence[str]) -> None:
        """All names are known beforehand: those that are dropped need not be read."""
        router = self._order.router
        dropped = router.dropped(names)
        if isinstance(self._origin, Source):
            self._origin.skip(dropped)
            self.plan.dropped |= dropped
        if self.targets.loaders and router.conversions is None:
            counted = router.spelled.copy()
            routes = [router.route(name) for name in names if name not in dropped]
            self._hooks.expect(place.name for route in routes for place in route.places)
            router.spelled = counted

    def _hand_on(self, item: Any) -> tuple[str, Tensor]:
        """Book an item that the module's own ``load_weights`` has asked for."""
        name, tensor = _checked(item)
        self._see(name)
        spec = spec_of(name, tensor, ORIGIN)
        self._matched.arrive(name, spec)
        self.ledger.add(Placement(spec, name))
        if self._order.teller is not None:
            self._order.teller(self.ledger)
        return name, tensor

    def _see(self, stored: str) -> None:
        if stored in self._seen:
            raise LoadError(f"{stored!r} comes twice in {ORIGIN}")
        self._seen.add(stored)

    def _guarded(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """The items; remembers an exception that the stream itself raises."""
        while True:
            try:
                item = next(iterator)
            except StopIteration:
                return
            except BaseException as error:
                self._foreign = error
                raise
            yield item
            del item

    def _take(self, stored: str, tensor: Tensor) -> None:
        self._see(stored)
        name, spec = self._unwrap(stored), spec_of(stored, tensor, ORIGIN)
        route = self._matched.arrive(name, spec)
        if route.group:
            targets = self._arrived_in(route.group, name, spec)
        else:
            targets = [place.name for place in route.places if place.name in self._matched.arrived]
            if stored in self._matched.handed:
                self._hand(route.places, spec, tensor)
        for nbytes in self._rows.keep({"".join(route.head), *(place.name for place in route.places)}, tensor):
            self._held.count += 1
            self._held.total += nbytes
        waiting = [target for target in targets if not self._serve(target, stored, tensor)]
        if waiting:
            self._held.keep(stored, tensor, waiting)

    def _derive(self) -> None:
        """Make what has not come from the rows that were kept."""
        for target, derivation in self._rows.missing(self._matched.arrived):
            value = derivation.value()
            if value is None:
                self.plan.partly[target] = derivation.nothing()
            else:
                spec = spec_of(f"{target} ({derivation.setting})", value, "rows of a head")
                self._matched.arrived[target] = spec
                self._serve(target, spec.name, value)
        self._rows.forget()

    def _hand(self, places: Sequence[Place], spec: TensorSpec, tensor: Tensor) -> None:
        """Hand a tensor to those hooks that it belongs to."""
        for place in places:
            if self.targets.loader_of(place.name) is not None or place.name in self.targets.writers:
                self.ledger.add(Placement(spec, place.name))
                self._hooks.give(place, spec.name, tensor)
                if self._order.teller is not None:
                    self._order.teller(self.ledger)

    def _arrived_in(self, group: str, name: str, spec: TensorSpec) -> list[str]:
        """The targets of a group that a library converts together; the group itself while they are not known."""
        specs, conversions = self._matched.groups[group], self._order.router.conversions
        assert conversions is not None
        if group not in self._foreseen:
            whole = conversions.foresee(group, specs)
            if whole is None:
                return [_GROUP + group]
            self._foreseen[group] = whole
            self._convert(group, whole)
        foreseen = self._foreseen[group].get(spec.name)
        targets = self._matched.made_of(group)
        own = self.targets.first(group).dtype
        if (
            foreseen is None
            or foreseen.shape != spec.shape
            or not (foreseen.dtype == spec.dtype or (castable(spec.dtype, own) and castable(foreseen.dtype, own)))
        ):
            like = "" if foreseen is None else f"{foreseen.dtype} {list(foreseen.shape)}, as others like it have"
            found = f"{spec.name}: {spec.dtype} {list(spec.shape)}"
            for target in targets:
                self._fitter.refuse(Mismatch(target, like or "no further tensor to be merged into it", found, ORIGIN))
        return targets

    def _convert(self, group: str, specs: Mapping[str, TensorSpec]) -> None:
        """Let the library say where ``specs`` go, and serve the targets with those that were held until it could."""
        self._matched.convert(group, specs)
        targets = self._matched.made_of(group)
        waiting = _GROUP + group
        for stored in [stored for stored, target in self._held.waiting() if target == waiting]:
            tensor = self._held.get(stored)
            assert tensor is not None
            self._held.move(stored, waiting, [each for each in targets if not self._serve(each, stored, tensor)])

    def _serve(self, target: str, stored: str, tensor: Tensor) -> bool:
        """Write what is known of ``target``; whether it needs ``stored`` no more."""
        if target.startswith(_GROUP):
            return False
        arrival = self._matched.arrived.get(target)
        if arrival is None:
            return True
        if self._fitter.refuses(target):
            self._held.forget(target)
            return True
        if isinstance(arrival, Operation):
            return self._compute(target, arrival, stored, tensor)
        if isinstance(arrival, Blocks):
            if target not in self._blocks:
                self._blocks[target] = _by_source(self._fitter.fit(target, arrival))
            placements = [_of_dtype(each, tensor) for each in self._blocks[target].get(stored, [])]
            if placements and not self._fitter.may_cast(self.targets.first(target), placements[0].spec, target):
                return True
        else:
            placements = self._fitter.fit(target, arrival, latest=True)
        done, own = self._done[target], 0
        if isinstance(arrival, TensorSpec):
            return not placements or self._written.put(target, placements[0], tensor)
        for placement in placements:
            source = tensor if placement.spec.name == stored else self._held.get(placement.spec.name)
            if placement not in done:
                if source is None or not self._written.put(target, placement, source):
                    continue
                done.add(placement)
            own += placement.spec.name == stored
        for held in {placement.spec.name for placement in placements if placement in done} - {stored}:
            if self._is_served(target, held):
                self._held.release(held, target)
        return self._fitter.refuses(target) or own == self._expected(target, stored)

    def _is_served(self, target: str, stored: str) -> bool:
        return sum(each.spec.name == stored for each in self._done[target]) == self._expected(target, stored)

    def _expected(self, target: str, stored: str) -> int:
        arrival = self._matched.arrived[target]
        if isinstance(arrival, Fused):
            return arrival.expects(stored)
        return len(self._blocks[target].get(stored, [])) if isinstance(arrival, Blocks) else 1  # of a spread one

    def _compute(self, target: str, operation: Operation, stored: str, tensor: Tensor) -> bool:
        """Run ``operation`` once the last of its tensors has come; whether it has run."""
        tensors = {
            name: tensor if spec.name == stored else self._held.get(spec.name)
            for name, spec in operation.sources.items()
        }
        if any(each is None for each in tensors.values()):
            return False
        others = self._held.nbytes - sum(self._held.size(spec.name) for spec in operation.sources.values())
        needed_by(operation, self.targets, self._order.budget - others, others)
        for each in operation.targets:
            self._fitter.fit(each, operation)
            if self._fitter.refuses(each):
                return True
            self._written.computed(each)
        compute(operation, {name: each for name, each in tensors.items() if each is not None}, self.targets)
        for name, spec in operation.sources.items():
            self.ledger.add(Placement(spec, name))
            self._held.release(spec.name, target)
        return True

    def _finish(self) -> None:
        """The stream has ended: serve what still waits, and say what does not fit."""
        plan, targets, matched, router = self.plan, self.targets, self._matched, self._order.router
        for group, specs in matched.groups.items():
            if group not in self._foreseen:
                self._convert(group, matched.in_order(specs))
            elif len(specs) < len(self._foreseen[group]):
                matched.take_back(group, specs)
        self._derive()
        # Copies of tied parameters that came before the first had all its parts.
        for stored, target in self._held.waiting():
            if target in matched.arrived and (tensor := self._held.get(stored)) is not None:
                self._serve(target, stored, tensor)
        fused = [each for each in matched.arrived.values() if isinstance(each, Fused)]
        self._fitter.compare(fused)
        for each in fused:
            self._fitter.fit(each.target.name, each)
        self._fitter.publish()
        plan.notes += taken_off(self._unwrap.prefix)
        matched.think_again()
        written = self._written
        self._hooks.conclude(plan, written.elements)
        matched.hooked = {name for name in matched.hooked if written.is_complete(name)}
        incomplete = {name for name in targets.specs if not written.is_complete(name)}
        misfits = {targets.aliases.get(each.name, each.name) for each in plan.mismatched_keys}
        for name in (incomplete | misfits) & self._from_meta & self.touched():
            to_meta(targets, name)  # what nobody wrote would be raw memory
        conclude(plan, targets, matched, router, (self._order.unexpected, self._order.missing))
        explained = {*plan.missing_keys, *plan.dropped}
        if lost := sorted(incomplete - misfits - {targets.aliases.get(name, name) for name in explained}):
            raise LoadError(f"not every byte of {lost[0]} was written once, which is a fault of streamload")
        for name in incomplete | misfits:
            written.elements.pop(name, None)
        self.spoilt = sorted((misfits & written.touched) - self._from_meta)
        plan.notes += [f"{name}: written to before the stream showed that it does not fit" for name in self.spoilt]
        plan.tied = {alias: first for alias, first in targets.aliases.items() if first in written.elements}


def _by_source(placements: Iterable[Placement]) -> dict[str, list[Placement]]:
    found: dict[str, list[Placement]] = defaultdict(list)
    for placement in placements:
        found[placement.spec.name].append(placement)
    return found


def _of_dtype(placement: Placement, tensor: Tensor) -> Placement:
    """``placement``, which was worked out from others like ``tensor``, for the dtype that this one has."""
    spec, dtype = placement.spec, CODES.get(tensor.dtype, "")
    if dtype == spec.dtype or dtype not in BITS:
        return placement
    scaled = [number * BITS[dtype] // BITS[spec.dtype] for number in (spec.offset, spec.nbytes)]
    return placement._replace(spec=spec._replace(dtype=dtype, offset=scaled[0], nbytes=scaled[1]))


def _checked(item: Any) -> tuple[str, Tensor]:
    if isinstance(item, (tuple, list)) and len(item) == 2:
        name, tensor = item
        if isinstance(name, str) and isinstance(tensor, Tensor):
            return name, tensor
    shown = ", ".join(type(each).__name__ for each in item) if isinstance(item, (tuple, list)) else ""
    raise LoadError(
        f"weights: expected (name, tensor) pairs, found {type(item).__name__}{f' of {shown}' if shown else ''}"
    )

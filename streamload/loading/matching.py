"""Match stored tensors with the targets that they fill."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from streamload.checkpoint import TensorSpec
from streamload.checkpoint.dtypes import castable, narrows
from streamload.errors import LoadError, MappingError
from streamload.loading.fused import Fused, cut, sizes_of
from streamload.loading.ignore import Ignore
from streamload.loading.keys import Cast, Incomplete, Keys, Mismatch
from streamload.loading.naming import Route, Router
from streamload.loading.operation import Operation
from streamload.loading.partitions import cut_otherwise, notes_on_sizes
from streamload.loading.placement import Placement, row_major
from streamload.loading.targets import Target, Targets
from streamload.loading.tracing import Moved
from streamload.loading.wrappers import wrapper_prefix
from streamload.mapping.rules import Place

#: Rule under which a tensor is dropped that the module holds as a non-persistent buffer.
RECOMPUTED = "recomputed buffer"


class Matched:
    """What arrives at every target, by name. Problems go into ``keys``."""

    def __init__(self, keys: Keys, targets: Targets, router: Router, unexpected: Ignore) -> None:
        self._keys, self._targets, self._router, self._unexpected = keys, targets, router, unexpected
        self._whole: dict[str, TensorSpec] = {}
        self._cuts: dict[str, tuple[TensorSpec, Place]] = {}
        self._fused: dict[str, Fused] = {}
        self._moved: dict[str, tuple[TensorSpec, Moved]] = {}
        self._groups: dict[str, dict[str, TensorSpec]] = defaultdict(dict)
        self._broken: dict[str, Incomplete | Mismatch] = {}
        self.operations: list[Operation] = []

    def names(self) -> Iterator[str]:
        """The targets at which something has arrived in full, or in a wrong shape."""
        yield from self._whole
        yield from self._cuts
        yield from (name for name, fused in self._fused.items() if fused.incomplete() is None)
        yield from self._moved
        yield from (name for operation in self.operations for name in operation.targets)
        yield from (name for name, what in self._broken.items() if isinstance(what, Mismatch))

    def lacking(self) -> dict[str, Incomplete]:
        """Targets of which some parts have arrived but not all."""
        found = {name: what for name, what in self._broken.items() if isinstance(what, Incomplete)}
        for fused in self._fused.values():
            if (what := fused.incomplete()) is not None:
                found[fused.target.name] = what
        return found

    def take(self, catalog: Mapping[str, TensorSpec]) -> None:
        """Take in every tensor of ``catalog``."""
        at_home, whole = self._targets.at_home, self._whole
        prefix = wrapper_prefix(catalog.keys(), self._lands)
        if prefix:
            self._keys.notes.append(
                f"{prefix!r} taken off every name: it is the prefix of a wrapper, not of the module"
            )
        if self._router.trivial:
            for stored, spec in catalog.items():
                name = stored.removeprefix(prefix)
                if at_home(name) and name not in self._targets.recomputed:
                    whole[name] = spec
                else:
                    self._arrive(name, spec, Route([Place(name)]))
            return
        conversions = self._router.conversions
        own = {name.removeprefix(prefix): spec for name, spec in catalog.items()}
        for name in conversions.sort([*own]) if conversions is not None else own:
            self._arrive(name, own[name], self._router.route(name))
        for group, specs in self._groups.items():
            self._convert(group, specs)

    def _lands(self, name: str) -> bool:
        """Whether ``name`` finds its place, or is dropped on purpose."""
        if self._targets.at_home(name) or self._router.conversions is not None:
            return self._targets.at_home(name)
        places = self._router.route(name).places
        return all(self._targets.at_home(place.name) for place in places)

    def _arrive(self, name: str, spec: TensorSpec, route: Route) -> None:
        """Book ``spec``, whose name without a wrapper's prefix is ``name``."""
        if route.group:
            self._groups[route.group][name] = spec
        elif not route.places:
            self._keys.dropped[spec.name] = route.rule
        for place in route.places:
            if not self._targets.at_home(place.name):
                self._left_over(spec, place, route.rule)
            elif place.name in self._targets.recomputed:
                self._keys.dropped[spec.name] = RECOMPUTED
            else:
                self._put(spec, place)

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
        if place.transposed:
            spec = transposed(spec)
        if place.shard is not None:
            self._refuse_second(place.name, spec, (self._whole, self._cuts, self._moved))
            if place.name not in self._fused:
                target = self._target(place.name)
                sizes = sizes_of(self._targets.module, place.name)
                self._fused[place.name] = Fused(target, self._router.stacked_rules, sizes)
            self._fused[place.name].add(spec, place.shard)
            return
        self._refuse_second(place.name, spec, (self._whole, self._cuts, self._fused, self._moved))
        if place.among:
            self._cuts[place.name] = (spec, place)
        else:
            self._whole[place.name] = spec

    def _refuse_second(self, name: str, spec: TensorSpec, tables: tuple[Mapping[str, object], ...]) -> None:
        for table in tables:
            if name in table:
                raise MappingError(
                    f"{self._first(name)!r} and {spec.name!r} both map to {name!r}; one of them has to be renamed or dropped"
                )

    def _first(self, name: str) -> str:
        if name in self._whole:
            return self._whole[name].name
        if name in self._cuts:
            return self._cuts[name][0].name
        if name in self._fused:
            return self._fused[name].arrivals[0].spec.name
        return self._moved[name][0].name

    def _convert(self, group: str, specs: Mapping[str, TensorSpec]) -> None:
        assert self._router.conversions is not None
        made = self._router.conversions.convert(group, specs)
        first = next(iter(specs.values()))
        if isinstance(made, (Incomplete, Mismatch)):
            self._broken[group] = made
            self._keys.mismatched_keys += [made] if isinstance(made, Mismatch) else []
            return
        if isinstance(made, Operation):
            for name, shape in made.targets.items():
                if not self._targets.at_home(name):
                    raise LoadError(f"{made.title}: makes {name}, which the module does not have")
                self._refuse_second(name, first, (self._whole, self._cuts, self._fused, self._moved))
                if shape != (wanted := self._target(name).shape):
                    self._mismatch(name, f"shape {list(wanted)}", f"shape {list(shape)} made of {first.name}", first)
            self.operations.append(made)
            self._keys.notes.append(f"{made.title}: computed, with its {len(specs)} stored tensors in memory at once")
            return
        for name, moved in made.items():
            if not self._targets.at_home(name) or name in self._targets.recomputed:
                self._left_over(first, Place(name), f"the conversion of {group}")
            else:
                self._refuse_second(name, first, (self._whole, self._cuts, self._fused, self._moved))
                self._moved[name] = (first, moved)

    def _target(self, name: str) -> Target:
        return self._targets.specs[self._targets.aliases.get(name, name)]

    def fitting(self) -> dict[str, list[Placement]]:
        """Placements by the name that they arrived at, of all that fits its target."""
        specs, aliases, new = self._targets.specs, self._targets.aliases, tuple.__new__
        found: dict[str, list[Placement]] = {}
        for name, spec in self._whole.items():
            first = aliases.get(name, name)
            target = specs[first]
            if (spec.shape == target.shape and spec.dtype == target.dtype) or self._fits(target, spec, name):
                found[name] = [new(Placement, (spec, first, None, None))]
        for name, (spec, place) in self._cuts.items():
            if (placement := self._cut(name, spec, place)) is not None:
                found[name] = [placement]
        wrong = dict(cut_otherwise(self._fused.values()))
        for name, fused in self._fused.items():
            found |= self._parts(name, fused, wrong.get(fused.target.name))
        self._keys.notes += notes_on_sizes(self._fused.values())
        for name, (sample, moved) in self._moved.items():
            found |= self._blocks(name, sample, moved)
        return found

    def _cut(self, name: str, spec: TensorSpec, place: Place) -> Placement | None:
        """The part of a spread tensor that belongs to ``name``."""
        shapes = [self._target(each).shape for each in place.among]
        sizes = [shape[0] if shape else 1 for shape in shapes]
        which = place.among.index(name)
        wanted = (sum(sizes), *shapes[which][1:])
        if spec.shape != wanted:
            self._mismatch(
                name, f"shape {list(wanted)} to be spread over {', '.join(place.among)}", f"{list(spec.shape)}", spec
            )
            return None
        if not self._may_cast(self._target(name), spec, name):
            return None
        rows = (cut(sizes, which), *((0, size) for size in spec.shape[1:]))
        return Placement(spec, self._target(name).name, rows, None)

    def _parts(self, name: str, fused: Fused, wrong: tuple[str, str] | None) -> dict[str, list[Placement]]:
        if (wrong := fused.misfit() or wrong) is not None:
            self._mismatch(name, *wrong, fused.arrivals[0].spec)
            return {}
        kinds = {arrival.spec.dtype: arrival.spec for arrival in fused.arrivals}
        fits = [self._may_cast(fused.target, spec, name) for spec in kinds.values()]
        tensor = self._targets.tensors.get(fused.target.name)
        if fused.incomplete() is not None and tensor is not None and tensor.is_meta:
            return {}  # what is not filled would be raw memory; so it stays on meta, where it cannot be mistaken
        made = fused.placements()
        return {name: made} if all(fits) and made else {}

    def _blocks(self, name: str, first: TensorSpec, moved: Moved) -> dict[str, list[Placement]]:
        target = self._target(name)
        if moved.shape != target.shape:
            found = f"shape {list(moved.shape)} made of {first.name} and others"
            self._mismatch(name, f"shape {list(target.shape)}", found, first)
            return {}
        if not moved.blocks:  # it has no element, but has to be there
            return {name: [Placement(first._replace(shape=target.shape, nbytes=0, strides=None), target.name)]}
        kinds = {spec.dtype: spec for spec, _ in moved.blocks}
        if not all(self._may_cast(target, spec, name) for spec in kinds.values()):
            return {}
        whole = tuple((0, size) for size in target.shape)
        return {
            name: [
                Placement(spec, target.name, None, None if region == whole else region) for spec, region in moved.blocks
            ]
        }

    def _fits(self, target: Target, spec: TensorSpec, name: str) -> bool:
        """Whether ``spec``, which is not exactly like ``target``, can fill it; notes casts and mismatches."""
        if spec.shape != target.shape and {spec.shape, target.shape} != {(), (1,)}:
            self._mismatch(name, f"shape {list(target.shape)}", f"shape {list(spec.shape)}", spec)
            return False
        if spec.shape != target.shape:
            self._keys.notes.append(f"{name}: one element, stored as {list(spec.shape)}, put into {list(target.shape)}")
        return self._may_cast(target, spec, name)

    def _may_cast(self, target: Target, spec: TensorSpec, name: str) -> bool:
        if spec.dtype == target.dtype:
            return True
        if not castable(spec.dtype, target.dtype):
            self._mismatch(name, target.dtype, f"{spec.dtype} (only plain floats are converted unasked)", spec)
            return False
        self._keys.casts.append(Cast(name, spec.dtype, target.dtype, narrows(spec.dtype, target.dtype)))
        return True

    def _mismatch(self, name: str, expected: str, found: str, spec: TensorSpec) -> None:
        self._keys.mismatched_keys.append(Mismatch(name, expected, found, spec.file))


def transposed(spec: TensorSpec) -> TensorSpec:
    """``spec`` with its last two dimensions swapped; the bytes stay where they are."""
    if len(spec.shape) < 2:
        return spec
    if spec.dtype == "F4":
        raise LoadError(f"{spec.name}: F4 packs two elements into a byte, so it cannot be transposed on the way")
    strides = spec.strides if spec.strides is not None else row_major(spec.shape)
    shape = (*spec.shape[:-2], spec.shape[-1], spec.shape[-2])
    return spec._replace(shape=shape, strides=(*strides[:-2], strides[-1], strides[-2]))

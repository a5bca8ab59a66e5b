"""Check what arrives at a target against its shape and dtype, and turn it into placements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from streamload.checkpoint import TensorSpec
from streamload.checkpoint.dtypes import castable, narrows
from streamload.loading.fused import Fused, cut
from streamload.loading.keys import Cast, Keys, Mismatch
from streamload.loading.matching import Arrival, Blocks, Cut
from streamload.loading.operation import Operation
from streamload.loading.partitions import cut_otherwise, notes_on_sizes
from streamload.loading.placement import Placement
from streamload.loading.targets import Target, Targets


class Fitter:
    """Makes placements of what arrives. What does not fit, and casts, go into ``keys``, each once."""

    def __init__(self, keys: Keys, targets: Targets) -> None:
        self._keys, self._targets = keys, targets
        self._casts: dict[str, dict[Cast, None]] = defaultdict(dict)
        self._misfits: set[str] = set()

    def fit_all(self, arrived: Mapping[str, Arrival]) -> dict[str, list[Placement]]:
        """Placements by the name that they arrived at, of all that fits its target."""
        specs, aliases, new = self._targets.specs, self._targets.aliases, tuple.__new__
        found: dict[str, list[Placement]] = {}
        self.compare([each for each in arrived.values() if isinstance(each, Fused)])
        for name, arrival in arrived.items():
            if type(arrival) is TensorSpec:  # most are, and a checkpoint can have 100,000
                first = aliases.get(name, name)
                target = specs[first]
                if arrival.shape == target.shape and arrival.dtype == target.dtype:
                    found[name] = [new(Placement, (arrival, first, None, None))]
                    continue
            if made := self.fit(name, arrival):
                found[name] = made
        self.publish()
        return found

    def publish(self) -> None:
        """Write down the casts of what fits."""
        self._keys.casts += [cast for casts in self._casts.values() for cast in casts]

    def compare(self, fused: list[Fused]) -> None:
        """Compare the sizes of the parts of fused parameters with each other."""
        for name, (expected, found) in cut_otherwise(fused):
            first = next(each for each in fused if each.target.name == name).arrivals[0].spec
            self._mismatch(name, expected, found, first)
        self._keys.notes += notes_on_sizes(fused)

    def refuses(self, name: str) -> bool:
        """Whether something that does not fit has arrived at ``name``."""
        return name in self._misfits or self._targets.first(name).name in self._misfits

    def fit(self, name: str, arrival: Arrival, *, latest: bool = False) -> list[Placement]:
        """Placements for as much of ``arrival`` as has a known place in ``name``; none when it does not fit.

        ``latest``: of an arrival that comes in parts, those placements that its last part can have an influence on.
        """
        target = self._targets.first(name)
        if self.refuses(name):
            return []
        if isinstance(arrival, TensorSpec):
            return [Placement(arrival, target.name)] if self._fits(target, arrival, name) else []
        if isinstance(arrival, Cut):
            return self._cut(target, name, arrival)
        if isinstance(arrival, Fused):
            return self._parts(target, name, arrival, [arrival.latest] if latest else None)
        if isinstance(arrival, Blocks):
            return self._blocks(target, name, arrival)
        self._check_made(target, name, arrival)
        return []

    def _cut(self, target: Target, name: str, arrival: Cut) -> list[Placement]:
        """The part of a spread tensor that belongs to ``name``."""
        spec, place = arrival
        shapes = [self._targets.first(each).shape for each in place.among]
        sizes = [shape[0] if shape else 1 for shape in shapes]
        which = place.among.index(name)
        wanted = (sum(sizes), *shapes[which][1:])
        if spec.shape != wanted:
            expected = f"shape {list(wanted)} to be spread over {', '.join(place.among)}"
            self._mismatch(name, expected, f"{list(spec.shape)}", spec)
            return []
        if not self.may_cast(target, spec, name):
            return []
        rows = (cut(sizes, which), *((0, size) for size in spec.shape[1:]))
        return [Placement(spec, target.name, rows, None)]

    def _parts(self, target: Target, name: str, fused: Fused, numbers: Sequence[int | None] | None) -> list[Placement]:
        if (wrong := fused.misfit(numbers)) is not None:
            self._mismatch(name, *wrong, fused.arrivals[0].spec)
            return []
        arrivals = fused.arrivals if numbers is None else fused.arrivals[-1:]
        kinds = {arrival.spec.dtype: arrival.spec for arrival in arrivals}
        fits = [self.may_cast(target, spec, name) for spec in kinds.values()]
        return fused.placements(numbers) if all(fits) else []

    def _blocks(self, target: Target, name: str, arrival: Blocks) -> list[Placement]:
        first, moved = arrival
        if moved.shape != target.shape:
            found = f"shape {list(moved.shape)} made of {first.name} and others"
            self._mismatch(name, f"shape {list(target.shape)}", found, first)
            return []
        if not moved.blocks:  # it has no element, but has to be there
            return [Placement(first._replace(shape=target.shape, nbytes=0, strides=None), target.name)]
        kinds = {spec.dtype: spec for spec, _ in moved.blocks}
        if not all(self.may_cast(target, spec, name) for spec in kinds.values()):
            return []
        whole = tuple((0, size) for size in target.shape)
        return [
            Placement(spec, target.name, None, None if region == whole else region) for spec, region in moved.blocks
        ]

    def _check_made(self, target: Target, name: str, operation: Operation) -> None:
        shape, first = operation.targets[name], next(iter(operation.sources.values()))
        if shape != target.shape:
            self._mismatch(name, f"shape {list(target.shape)}", f"shape {list(shape)} made of {first.name}", first)

    def _fits(self, target: Target, spec: TensorSpec, name: str) -> bool:
        """Whether ``spec`` can fill ``target``; notes casts and mismatches."""
        if spec.shape != target.shape and {spec.shape, target.shape} != {(), (1,)}:
            self._mismatch(name, f"shape {list(target.shape)}", f"shape {list(spec.shape)}", spec)
            return False
        if spec.shape != target.shape:
            self._keys.notes.append(f"{name}: one element, stored as {list(spec.shape)}, put into {list(target.shape)}")
        return self.may_cast(target, spec, name)

    def may_cast(self, target: Target, spec: TensorSpec, name: str) -> bool:
        """Whether the elements of ``spec`` may become those of ``target``; notes casts and mismatches."""
        if spec.dtype == target.dtype:
            return True
        if not castable(spec.dtype, target.dtype):
            self._mismatch(name, target.dtype, f"{spec.dtype} (only plain floats are converted unasked)", spec)
            return False
        self._casts[name][Cast(name, spec.dtype, target.dtype, narrows(spec.dtype, target.dtype))] = None
        return True

    def _mismatch(self, name: str, expected: str, found: str, spec: TensorSpec) -> None:
        self.refuse(Mismatch(name, expected, found, spec.file))

    def refuse(self, mismatch: Mismatch) -> None:
        """From now on nothing is put into the target that ``mismatch`` is about."""
        if mismatch.name not in self._misfits:
            self._misfits.add(mismatch.name)
            self._keys.mismatched_keys.append(mismatch)
            self._casts.pop(mismatch.name, None)  # of a part that came before

"""A parameter that several stored tensors fill, part by part: q, k and v; gate and up; stacked experts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from streamload.checkpoint import TensorSpec
from streamload.errors import MappingError
from streamload.loading.keys import Incomplete, short
from streamload.loading.placement import Placement, Region
from streamload.loading.targets import Target
from streamload.mapping.rules import Expert, Part, ShardId, Stacked, order_of_parts


class _Arrival(NamedTuple):
    spec: TensorSpec
    parts: tuple[Part, ...]
    number: int | None
    """Which expert."""


class Fused:
    """The parts of one parameter as they arrive, in whatever order."""

    def __init__(
        self, target: Target, rules: Sequence[Stacked], sizes: Sequence[int] | None, name: str | None = None
    ) -> None:
        """``name``: that under which the parts arrive, where it is another name of ``target``."""
        self.target = target
        self._name = target.name if name is None else name
        self._rules = [rule for rule in rules if _made_by(rule, self._name)]
        self._order = _in_order(target.name, [part for rule in self._rules for part in rule.own_parts])
        self._sizes = dict(zip(self._order, sizes, strict=False)) if sizes and len(sizes) == len(self._order) else {}
        self.unused_sizes = 0 if sizes is None or len(sizes) == len(self._order) else len(sizes)
        """How many sizes the module tells, where it is not one for each part."""
        self._experts = any(rule.many_experts for rule in self._rules)
        self._arrived: dict[tuple[int | None, Part | None], _Arrival] = {}
        self.arrivals: list[_Arrival] = []
        self._of: dict[int | None, list[_Arrival]] = defaultdict(list)

    def add(self, spec: TensorSpec, shard: ShardId) -> None:
        """Book ``spec`` as (a part of) this parameter. Raises MappingError when that part has arrived already."""
        number = shard.number if isinstance(shard, Expert) else None
        own: Any = shard.shard if isinstance(shard, Expert) else shard
        for span in own if isinstance(own, list) else [own]:
            parts: tuple[Part, ...] = tuple(span) if isinstance(span, tuple) else () if span is None else (span,)
            arrival = _Arrival(spec, parts, number)
            self.arrivals.append(arrival)
            self._of[number].append(arrival)
            for part in parts or (None,):
                first = self._arrived.setdefault((number, part), arrival)
                if first is not arrival:
                    raise MappingError(
                        f"{first.spec.name!r} and {spec.name!r} both map to {_place(self.target.name, number, part)}; one of "
                        "their rules names the wrong part, or one of them has to be dropped"
                    )

    def misfit(self, numbers: Sequence[int | None] | None = None) -> tuple[str, str] | None:
        """What was expected and what was found, when the sizes of what has arrived cannot be right.

        ``numbers``: look at these experts only, and not at how they compare with others.
        """
        shape = self.target.shape[1:] if self._experts else self.target.shape
        if self._experts and not self.target.shape:
            return "a number for each expert", "a parameter that is a single number"
        for arrival in self._some(numbers):
            if arrival.number is not None and arrival.number >= self.target.shape[0]:
                return f"{self.target.shape[0]} experts", f"number {arrival.number} ({arrival.spec.name})"
            if self._axis(arrival) is None:
                return _any_part_of(shape, arrival), f"{arrival.spec.name} of shape {list(arrival.spec.shape)}"
        for number in self._of if numbers is None else numbers:
            if (wrong := self._wrong_sum(number, shape)) is not None:
                return wrong
        return self._cut_otherwise() if numbers is None else None

    def _cut_otherwise(self) -> tuple[str, str] | None:
        """The first expert whose parts are not as long as those of the one before it."""
        cuts = [(number, cut) for number in self._of if (cut := self.partition(number))]
        for (one, first), (other, second) in pairwise(cuts):
            if first != second:
                names = ", ".join(each.spec.name for each in self._of[other])
                return f"parts cut as those of expert {one} ({show(first)})", f"{show(second)} ({names})"
        return None

    @property
    def count(self) -> int:
        """How many parts there are, or of each expert."""
        return len(self._order)

    @property
    def told(self) -> bool:
        """Whether the module told the sizes of the parts."""
        return bool(self._sizes)

    def partition(self, number: int | None = None) -> dict[tuple[Part, ...], int]:
        """The length of every part along the dimension in which they lie, in order; empty when some have not arrived."""
        arrivals = [each for each in self._of.get(number, ()) if each.parts]
        if {part for each in arrivals for part in each.parts} != set(self._order):
            return {}
        arrivals.sort(key=lambda each: self._order.index(each.parts[0]))
        axes = [self._axis(each) or 0 for each in arrivals]
        return {
            each.parts: each.spec.shape[axis] if each.spec.shape else 1
            for each, axis in zip(arrivals, axes, strict=True)
        }

    def _some(self, numbers: Sequence[int | None] | None) -> Iterable[_Arrival]:
        return self.arrivals if numbers is None else [each for number in numbers for each in self._of[number]]

    def expects(self, name: str) -> int:
        """How many parts the stored tensor ``name`` fills."""
        return sum(each.spec.name == name for each in self._of[self.latest])

    @property
    def latest(self) -> int | None:
        """The number of the expert of which a part arrived last."""
        return self.arrivals[-1].number if self.arrivals else None

    def placements(self, numbers: Sequence[int | None] | None = None) -> list[Placement]:
        """A placement for everything whose place is known, of some experts only or of all."""
        regions = [(arrival.spec, self._region(arrival)) for arrival in self._some(numbers)]
        return [_placed(spec, self.target.name, region) for spec, region in regions if region is not None]

    def incomplete(self) -> Incomplete | None:
        """What is still missing."""
        wanted = self._expected()
        missing = [key for key in wanted if key not in self._arrived]
        if not missing:
            return None
        present = [_title(*key) for key in wanted if key in self._arrived]
        sources = dict.fromkeys(source for number, part in missing for source in self._sources(number, part))
        return Incomplete(self.target.name, short(present), short([_title(*key) for key in missing]), short([*sources]))

    def _expected(self) -> list[tuple[int | None, Part | None]]:
        numbers: Iterable[int | None] = range(*self.target.shape[:1] or [0]) if self._experts else [None]
        parts: Sequence[Part | None] = self._order or [None]
        return [(number, part) for number in numbers for part in parts]

    def _sources(self, number: int | None, part: Part | None) -> list[str]:
        names = []
        for rule in self._rules:
            if part in rule.own_parts or (part is None and rule.shard is None):
                own = [str(number) if each == "*" else each for each in rule.parts]
                names.append(self._spelled(own) or _replaced(self._name, rule.target, own))
        return names

    def _spelled(self, parts: Sequence[str]) -> str:
        """The stored name with ``parts``, spelled as that of a part which has arrived."""
        for arrival in self.arrivals[:1]:
            for rule in self._rules:
                own = [str(arrival.number) if each == "*" else each for each in rule.parts]
                if (name := _replaced(arrival.spec.name, own, parts)) != arrival.spec.name:
                    return name
        return ""

    def _axis(self, arrival: _Arrival) -> int | None:
        """The dimension along which the parts lie; ``None`` when the shape cannot be a part's."""
        found, shape = arrival.spec.shape, self.target.shape[1:] if self._experts else self.target.shape
        if not found and len(shape) == 1:  # one number for each part
            return 0
        if len(found) != len(shape):
            return None
        apart = [axis for axis, (ours, theirs) in enumerate(zip(found, shape, strict=True)) if ours != theirs]
        if not arrival.parts:
            return 0 if not apart else None
        if not apart:
            return 0
        return apart[0] if len(apart) == 1 and found[apart[0]] < shape[apart[0]] else None

    def _known_sizes(self, number: int | None) -> dict[Part, int]:
        sizes = dict(self._sizes)
        for arrival in self._of[number]:
            axis = self._axis(arrival)
            if len(arrival.parts) == 1 and axis is not None:
                sizes[arrival.parts[0]] = arrival.spec.shape[axis] if arrival.spec.shape else 1
        return sizes

    def _wrong_sum(self, number: int | None, shape: Sequence[int]) -> tuple[str, str] | None:
        """What is wrong with the sizes of the parts together."""
        arrivals = [each for each in self._of[number] if each.parts]
        axes = {
            axis for each in arrivals if (axis := self._axis(each)) is not None and list(each.spec.shape) != list(shape)
        }
        if len(axes) > 1:
            return "parts along one dimension", ", ".join(
                f"{each.spec.name} {list(each.spec.shape)}" for each in arrivals
            )
        axis = next(iter(axes), 0)
        sizes = [each.spec.shape[axis] if each.spec.shape else 1 for each in arrivals]
        complete = {part for each in arrivals for part in each.parts} >= set(self._order)
        if arrivals and (sum(sizes) > shape[axis] or (complete and sum(sizes) != shape[axis])):
            found = " + ".join(f"{size} ({each.spec.name})" for size, each in zip(sizes, arrivals, strict=True))
            return f"{shape[axis]} along dimension {axis} for all parts", f"{found} = {sum(sizes)}"
        for part, size in self._sizes.items():
            for each, own in zip(arrivals, sizes, strict=True):
                if each.parts == (part,) and own != size:
                    return f"{size} along dimension {axis} for part {part!r}", f"{own} ({each.spec.name})"
        return None

    def _region(self, arrival: _Arrival) -> Region | None:
        """Where ``arrival`` goes; ``None`` while sizes that decide it are not known."""
        shape = self.target.shape
        lead: Region = () if arrival.number is None else ((arrival.number, arrival.number + 1),)
        inner = shape[len(lead) :]
        axis = self._axis(arrival)
        if axis is None:
            return None
        if not arrival.parts:
            return (*lead, *((0, size) for size in inner))
        size = arrival.spec.shape[axis] if arrival.spec.shape else 1
        start = self._start(arrival, inner[axis], size)
        if start is None:
            return None
        return (*lead, *((start, start + size) if d == axis else (0, n) for d, n in enumerate(inner)))

    def _start(self, arrival: _Arrival, total: int, size: int) -> int | None:
        """Where its parts begin: after all parts before them, or before all after them."""
        sizes = self._known_sizes(arrival.number)
        order = self._order
        first, last = order.index(arrival.parts[0]), order.index(arrival.parts[-1])
        before, after = (
            self._extent(order[:first], arrival.number, sizes),
            self._extent(order[last + 1 :], arrival.number, sizes),
        )
        if before is not None:
            return before
        return None if after is None else total - size - after

    def _extent(self, parts: Sequence[Part], number: int | None, sizes: dict[Part, int]) -> int | None:
        """How long ``parts`` are together, where that is known."""
        total, left = 0, list(parts)
        for arrival in self._of[number]:
            if len(arrival.parts) > 1 and set(arrival.parts) <= set(left):
                axis = self._axis(arrival)
                total += arrival.spec.shape[axis] if axis is not None else 0
                left = [part for part in left if part not in arrival.parts]
        if any(part not in sizes for part in left):
            return None
        return total + sum(sizes[part] for part in left)


def _placed(spec: TensorSpec, target: str, region: Region) -> Placement:
    """``spec`` in the shape of ``region``, which has a dimension more for an expert, or one for a single number."""
    shape = tuple(stop - start for start, stop in region)
    if shape != spec.shape and spec.strides is not None:
        spec = spec._replace(strides=(*(0,) * (len(shape) - len(spec.shape)), *spec.strides))
    return Placement(spec._replace(shape=shape), target, None, region)


def sizes_of(module: Any, name: str) -> Sequence[int] | None:
    """The sizes of the parts of the parameter ``name``, where its module tells them as ``output_sizes``."""
    path = name.rpartition(".")[0]
    owner = module.get_submodule(path) if module is not None and path else module
    sizes = getattr(owner, "output_sizes", None)
    fine = isinstance(sizes, (list, tuple)) and all(isinstance(size, int) for size in sizes)
    return sizes if fine else None


def could_fill(name: str, rules: Sequence[Stacked]) -> bool:
    """Whether stacked rules make parts of the parameter ``name``."""
    return any(_made_by(rule, name) for rule in rules)


def cut(sizes: Sequence[int], which: int) -> tuple[int, int]:
    """The interval of number ``which`` when things of these ``sizes`` lie one after the other."""
    ends = [0, *accumulate(sizes)]
    return ends[which], ends[which + 1]


def _made_by(rule: Stacked, name: str) -> bool:
    return _replaced(name, rule.target, rule.parts) != name


def _replaced(name: str, old: Sequence[str], new: Sequence[str]) -> str:
    """``name`` with the components ``old`` replaced by ``new``; what follows an underscore in the last one is kept."""
    parts, count = name.split("."), len(old)
    for at in range(len(parts) - count + 1):
        last = parts[at + count - 1]
        tail = last[len(old[-1]) :]
        if parts[at : at + count - 1] == list(old[:-1]) and last.startswith(old[-1]) and (not tail or tail[0] == "_"):
            return ".".join([*parts[:at], *new[:-1], new[-1] + tail, *parts[at + count :]])
    return name


def _in_order(name: str, parts: Iterable[Part]) -> list[Part]:
    """The parts of ``name`` in the order in which they lie. Raises MappingError when that is not known."""
    found, why = order_of_parts(parts)
    if why:
        raise MappingError(
            f"the stacked rules fill {name!r} with parts {', '.join(map(repr, found))}, so their order is not known: {why}"
        )
    return found


def _any_part_of(shape: Sequence[int], arrival: _Arrival) -> str:
    """What shape ``arrival`` may have: a part may be of any length along one dimension, mostly the first."""
    if not arrival.parts or not shape:
        return f"shape {list(shape)}"
    return f"a part of shape [{', '.join(['*', *map(str, shape[1:])])}]"


def show(partition: Mapping[tuple[Part, ...], int]) -> str:
    """``q 4 + k 2 + v 2``."""
    return " + ".join(f"{'/'.join(map(str, parts))} {size}" for parts, size in partition.items())


def _place(name: str, number: int | None, part: Part | None) -> str:
    return f"part {_title(number, part)} of {name!r}" if (number, part) != (None, None) else repr(name)


def _title(number: int | None, part: Part | None) -> str:
    if number is None:
        return str(part)
    return f"expert {number}" if part is None else f"{part} of expert {number}"

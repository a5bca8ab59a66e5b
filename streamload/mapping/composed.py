"""What every mapper offers, and several mappers one after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from streamload.errors import MappingError
from streamload.mapping.engine import Reading
from streamload.mapping.explain import Explanation, explain
from streamload.mapping.rules import AtHome, Mapped, Place, Split, Stacked, Step

if TYPE_CHECKING:
    from typing import Any

Value = TypeVar("Value")


class Named(ABC):
    """The ways to ask a mapper."""

    @abstractmethod
    def read(self, name: str, at_home: AtHome | None = None) -> Reading:
        """What becomes of ``name`` and how."""

    def places(self, name: str, at_home: AtHome) -> tuple[list[Place], list[Step]]:
        """Where the stored tensor ``name`` goes in a module, nowhere when it is dropped, and what led there."""
        reading = self.read(name, at_home)
        if reading.mapped is None:
            return [], reading.steps
        transposed = self.transposes(name)
        if not at_home(reading.mapped.name):
            for rule in self.split_rules:
                among = rule.put(reading.mapped.name)
                if among and all(map(at_home, among)):
                    return [Place(each, None, among, transposed) for each in among], reading.steps
        return [Place(*reading.mapped, (), transposed)], reading.steps

    @property
    def split_rules(self) -> Sequence[Split]:
        """Rules that spread a stored tensor over several parameters."""
        return ()

    @property
    def stacked_rules(self) -> Sequence[Stacked]:
        """Rules that put a stored tensor into a part of a parameter."""
        return ()

    def transposes(self, name: str) -> bool:
        """Whether the last two dimensions of the stored tensor ``name`` are to be swapped."""
        return False

    def map(self, name: str) -> Mapped | None:
        """The parameter that ``name`` goes to and which part of it; ``None`` when it is dropped."""
        return self.read(name).mapped

    def map_name(self, name: str) -> str | None:
        """The parameter that ``name`` goes to; ``None`` when it is dropped."""
        mapped = self.read(name).mapped
        return None if mapped is None else mapped.name

    def __call__(self, name: str) -> str | None:
        return self.map_name(name)

    def explain(self, name: str, module: Any = None) -> Explanation:
        """Which rule did what to ``name``; ``module`` (a module, its state_dict, or names) tells what is at home."""
        return explain(self, name, module)

    def apply_list(self, names: Iterable[str]) -> list[str]:
        """``names`` mapped, without those that are dropped."""
        return [mapped for name in names if (mapped := self.map_name(name)) is not None]

    def apply_dict(self, table: Mapping[str, Value]) -> dict[str, Value]:
        """``table`` under mapped names. Raises MappingError when two names become one."""
        mapped: dict[str, Value] = {}
        sources: dict[str, str] = {}
        for name, value in table.items():
            if (new := self.map_name(name)) is None:
                continue
            if new in sources:
                raise MappingError(f"{sources[new]!r} and {name!r} both map to {new!r}")
            mapped[new], sources[new] = value, name
        return mapped


class Composed(Named):
    """Mappers one after the other, each applied once."""

    def __init__(self, mappers: Sequence[Named]) -> None:
        self.mappers = list(mappers)

    def read(self, name: str, at_home: AtHome | None = None) -> Reading:
        """What becomes of ``name``. Raises MappingError when two of the mappers put it into a part."""
        steps: list[Step] = []
        mapped, held = Mapped(name), set[tuple[str, int]]()
        for number, mapper in enumerate(self.mappers, 1):
            reading = mapper.read(mapped.name, at_home if number == len(self.mappers) else None)
            steps += reading.steps
            if reading.mapped is None:
                return Reading(None, steps, held)
            if reading.mapped.shard is not None and mapped.shard is not None:
                raise MappingError(
                    f"{name!r} is put into part {mapped.shard!r} by one mapper and then, as {mapped.name!r}, into part "
                    f"{reading.mapped.shard!r} by the next; a tensor can be fused once"
                )
            shard = reading.mapped.shard if mapped.shard is None else mapped.shard
            mapped, held = Mapped(reading.mapped.name, shard), held.union(reading.held)
        return Reading(mapped, steps, held)

    @property
    def split_rules(self) -> Sequence[Split]:
        """Rules that spread a stored tensor over several parameters."""
        return [rule for mapper in self.mappers for rule in mapper.split_rules]

    @property
    def stacked_rules(self) -> Sequence[Stacked]:
        """Rules that put a stored tensor into a part of a parameter."""
        return [rule for mapper in self.mappers for rule in mapper.stacked_rules]

    def transposes(self, name: str) -> bool:
        """Whether the last two dimensions of the stored tensor ``name`` are to be swapped."""
        return any(mapper.transposes(name) for mapper in self.mappers)

    def then(self, other: Named) -> Composed:
        """First these mappers, then ``other``."""
        return Composed([*self.mappers, other])

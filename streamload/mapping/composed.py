"""What every mapper offers, and several mappers one after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from streamload.errors import MappingError
from streamload.mapping.engine import Reading
from streamload.mapping.explain import Explanation, explain
from streamload.mapping.rules import AtHome, Mapped, Place, Split, Stacked, Step

if TYPE_CHECKING:
    from streamload.mapping.lint import Finding

Value = TypeVar("Value")


class Named(ABC):
    """The ways to ask a mapper."""

    @abstractmethod
    def read(self, name: str, at_home: AtHome | None = None) -> Reading:
        """What becomes of ``name`` and how."""

    def places(self, name: str, at_home: AtHome | None = None) -> tuple[list[Place], list[Step]]:
        """Where the stored tensor ``name`` goes, nowhere when it is dropped, and what led there.

        ``at_home`` tells which names the module has; without it no tensor is spread.
        """
        reading = self.read(name, at_home)
        mapped, steps = reading.mapped, reading.steps
        if mapped is None:
            return [], steps
        transposed = self.transposes(name)
        for rule in self.split_rules if at_home is None or not at_home(mapped.name) else ():
            among = rule.put(mapped.name)
            if lacking := [each for each in among if at_home is None or not at_home(each)]:
                where = "where the module has them" if at_home is None else f"the module has no {lacking[0]!r}"
                steps = [*steps, Step("split", str(rule), mapped.name, mapped.name, where)]
            elif among:
                steps = [*steps, Step("split", str(rule), mapped.name, ", ".join(among))]
                return [Place(each, None, among, transposed) for each in among], steps
        return [Place(*mapped, (), transposed)], steps

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

    def then(self, other: Any) -> Composed:
        """First this mapper, then ``other`` on what it gives: ``a.then(b)(name) == b(a(name))``.

        ``other``: a mapper, or a callable from a name to a name or ``None``. Raises MappingError when it is neither.
        """
        return Composed([*self.mappers, named(other)])

    @property
    def mappers(self) -> Sequence[Named]:
        """Those that are asked one after the other."""
        return [self]

    def lint(self, names: Iterable[str] = (), module: Any = None) -> list[Finding]:
        """What is suspicious about the mapper; nothing where its rules cannot be seen."""
        return []

    def __or__(self, other: Any) -> Any:
        raise MappingError(
            f"| merges the rules of two WeightsMappers, found {type(self).__name__} | {type(other).__name__}; "
            "use first.then(second) to ask one after the other"
        )

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


class Called(Named):
    """A function, or another library's mapper whose rules are not known."""

    def __init__(self, function: Callable[[str], Any]) -> None:
        self._function = function

    def read(self, name: str, at_home: AtHome | None = None) -> Reading:
        """What the function says of ``name``. Raises MappingError when that is neither a name nor ``None``."""
        try:
            after = self._function(name)
        except Exception as error:
            raise MappingError(f"the mapper fails on {name!r}: {type(error).__name__}: {error}") from error
        if not (after is None or isinstance(after, str)):
            raise MappingError(f"the mapper turns {name!r} into {after!r:.80}; expected a name, or None to drop it")
        steps = [] if after == name else [Step("mapper", _title(self._function), name, after)]
        return Reading(None if after is None else Mapped(after), steps, ())


class Composed(Named):
    """Mappers one after the other, each applied once."""

    def __init__(self, mappers: Sequence[Named]) -> None:
        self._mappers = list(mappers)

    @property
    def mappers(self) -> Sequence[Named]:
        """Those that are asked one after the other."""
        return self._mappers

    def lint(self, names: Iterable[str] = (), module: Any = None) -> list[Finding]:
        """What is suspicious about each mapper, judged by what those before it make of ``names``."""
        findings, current = [], list(names)
        for mapper in self._mappers:
            findings += mapper.lint(current, module if mapper is self._mappers[-1] else None)
            current = mapper.apply_list(current)
        return findings

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
        if not any(getattr(mapper, "transposed", ()) for mapper in self.mappers):
            return False
        swapped, current = False, name
        for mapper in self.mappers:  # each at the name that it sees; twice is not at all
            swapped ^= mapper.transposes(current)
            after = mapper.map_name(current)
            if after is None:
                break
            current = after
        return swapped


def named(mapper: Any) -> Named:
    """``mapper`` as one that can be asked. Raises MappingError when it is none."""
    from streamload.mapping.mapper import WeightsMapper

    if isinstance(mapper, Named):
        return mapper
    if hasattr(mapper, "orig_to_new_prefix") and hasattr(mapper, "orig_to_new_substr"):
        return WeightsMapper.like(mapper)
    function = getattr(mapper, "map_name", None) or getattr(mapper, "_map_name", None) or mapper
    if not callable(function):
        raise MappingError(
            f"mapper: expected a WeightsMapper, an object with map_name or a callable, found {type(mapper).__name__}"
        )
    return Called(function)


def _title(function: Callable[[str], Any]) -> str:
    owner = getattr(function, "__self__", function)
    return getattr(owner, "__name__", "") or type(owner).__name__

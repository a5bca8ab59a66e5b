"""Find the mapper of a module and ask it where stored tensors go: every mapper once, at its own level."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from streamload.checkpoint import TensorSpec
from streamload.errors import LoadError, MappingError
from streamload.loading.keys import Incomplete, Mismatch
from streamload.loading.operation import Operation
from streamload.loading.targets import Targets
from streamload.loading.tracing import Moved
from streamload.mapping import WeightsMapper
from streamload.mapping.composed import Named
from streamload.mapping.rules import AtHome, Place, Stacked, Step

#: Libraries whose models bring conversions of their own: package -> where to ask for them.
_INTEGRATIONS = {"transformers": ("streamload.integrations.conversions", "conversions_of")}


class Route(NamedTuple):
    """Where a stored tensor goes."""

    places: Sequence[Place] = ()
    rule: str = ""
    """The rule that drops it, or that renamed it last."""
    group: str = ""
    """The group of tensors that are converted together, where it belongs to one; ``places`` is empty then."""


class Conversions(Protocol):
    """What a library knows about the layouts of its models' checkpoints."""

    def sort(self, names: Sequence[str]) -> list[str]:
        """The order in which ``route`` has to be asked."""

    def route(self, name: str) -> Route:
        """Where the stored tensor ``name`` goes."""

    def convert(
        self, group: str, specs: Mapping[str, TensorSpec]
    ) -> dict[str, Moved] | Operation | Incomplete | Mismatch:
        """Where the tensors of a group go: moves of rectangles, or an operation to be run; or what is wrong with them."""

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
        self.at_home = targets.at_home
        self.conversions: Conversions | None = None
        module = targets.module
        if mapper is None and module is not None:
            mapper = getattr(module, "hf_to_vllm_mapper", None)
            if mapper is None:
                self.conversions = _conversions_of(module, targets)
        root = as_mapper(mapper) if mapper is not None else None
        self._root = self.conversions.route if self.conversions is not None else _ask(root, self.at_home)
        below = {dotted: as_mapper(own) for dotted, own in targets.mappers if dotted}
        self._below = {dotted: own for dotted, own in below.items() if own is not root}
        named = [each for each in (root, *self._below.values()) if isinstance(each, Named)]
        self.stacked_rules: list[Stacked] = [rule for mapper in named for rule in mapper.stacked_rules]
        """Those of all mappers."""

    @property
    def trivial(self) -> bool:
        """Whether every name stays as it is."""
        return self._root is None and not self._below

    def route(self, name: str) -> Route:
        """Where the stored tensor ``name`` goes."""
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
                each._replace(name=dotted + each.name, shard=each.shard if place.shard is None else place.shard)
                for each in found.places
            ]
            places = [each._replace(among=tuple(dotted + other for other in each.among)) for each in places]
            route = Route(places, found.rule or route.rule)
        return route


def as_mapper(mapper: Any) -> Named | Callable[[str], str | None]:
    """``mapper`` as something to ask. Raises LoadError when it is no mapper."""
    if isinstance(mapper, Named):
        return mapper
    if hasattr(mapper, "orig_to_new_prefix") and hasattr(mapper, "orig_to_new_substr"):
        return WeightsMapper.like(mapper)
    found = getattr(mapper, "map_name", None) or getattr(mapper, "_map_name", None) or mapper
    if not callable(found):
        raise LoadError(f"mapper: expected a callable or an object with map_name, found {type(mapper).__name__}")
    return found  # type: ignore[no-any-return]


def _ask(mapper: Named | Callable[[str], str | None] | None, at_home: AtHome) -> Callable[[str], Route] | None:
    if mapper is None:
        return None
    if isinstance(mapper, Named):
        return lambda name: _route_of(*mapper.places(name, at_home))
    return lambda name: _foreign(mapper, name)


def _route_of(places: Sequence[Place], steps: Sequence[Step]) -> Route:
    step = next((step for step in reversed(steps) if step.after != step.before), None)
    return Route(places, f"{step.stage} rule {step.rule}" if step is not None else "")


def _foreign(mapper: Callable[[str], str | None], name: str) -> Route:
    mapped = mapper(name)
    if mapped is None:
        return Route((), "mapper")
    if not isinstance(mapped, str):
        raise MappingError(f"the mapper turns {name!r} into {mapped!r:.80}; expected a name, or None to drop it")
    return Route([Place(mapped)], "" if mapped == name else "mapper")


def _conversions_of(module: Any, targets: Targets) -> Conversions | None:
    packages = {each.__module__.partition(".")[0] for each in type(module).__mro__}
    for package in packages & _INTEGRATIONS.keys():
        room, function = _INTEGRATIONS[package]
        found: Conversions | None = getattr(import_module(room), function)(module, targets)
        return found
    return None

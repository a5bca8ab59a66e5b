"""Say which rule did what to a name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from streamload.mapping.rules import Mapped, Step

if TYPE_CHECKING:
    from streamload.mapping.composed import Named


@dataclass(frozen=True)
class Explanation:
    """The way of one name; ``str()`` of it reads line by line."""

    name: str
    mapped: Mapped | None
    """``None`` when it is dropped."""
    steps: tuple[Step, ...]
    at_home: bool | None = None
    """Whether the module has the result; ``None`` where the module is not known."""
    closest: tuple[str, ...] = ()
    """Names of the module that come close, when it has not."""
    among: tuple[str, ...] = ()
    """The parameters that the tensor is spread over, when it is."""
    transposed: bool = False
    """Whether its last two dimensions are swapped."""

    @property
    def fired(self) -> list[Step]:
        """The steps that changed something."""
        return [step for step in self.steps if step.after != step.before]

    def __str__(self) -> str:
        lines = [self.name, *(f"  {_line(step)}" for step in self.steps)]
        if self.mapped is None:
            return "\n".join([*lines, "= dropped"])
        part = "" if self.mapped.shard is None else f", part {self.mapped.shard!r}"
        swapped = ", transposed" if self.transposed else ""
        name = f"spread over {', '.join(self.among)}" if self.among else self.mapped.name
        lines.append(f"= {name}{part}{swapped}{'' if self.steps else ' (no rule fired)'}")
        if self.at_home is False:
            close = f"; close to it: {', '.join(self.closest)}" if self.closest else ""
            lines.append(f"  NOT in the module{close}")
        return "\n".join(lines)


def explain(mapper: Named, name: str, module: Any = None) -> Explanation:
    """How ``mapper`` reads ``name``, in a ``module`` if given."""
    names = names_of(module)
    places, steps = mapper.places(name, None if names is None else names.__contains__)
    if not places:
        return Explanation(name, None, tuple(steps))
    first = places[0]
    mapped = mapper.read(name, None if names is None else names.__contains__).mapped
    found = Explanation(name, mapped, tuple(steps), among=first.among, transposed=first.transposed)
    if names is None:
        return found
    at_home = first.name in names
    return replace(found, at_home=at_home, closest=() if at_home else close_to(first.name, names))


def close_to(name: str, names: Iterable[str], count: int = 3) -> tuple[str, ...]:
    """Those of ``names`` that look most like ``name``, which ends like few of them."""
    ending = name.rpartition(".")[2]
    likely = [each for each in names if each.endswith(ending)] or list(names)
    return tuple(get_close_matches(name, likely[:2000], n=count, cutoff=0.5))


def names_of(module: Any) -> set[str] | None:
    """The names of a module's parameters and buffers, or those of a table or a list; ``None`` for ``None`` and for
    a class, which has none yet.
    """
    if module is None or isinstance(module, type):
        return None
    if not isinstance(module, (str, Mapping)) and hasattr(module, "named_parameters"):
        tensors: list[Callable[..., Iterable[tuple[str, Any]]]] = [module.named_parameters, module.named_buffers]
        return {name for each in tensors for name, _ in each(remove_duplicate=False)}
    return set(module)


def _line(step: Step) -> str:
    if step.after is None:
        return f"{step.stage} {step.rule}: dropped"
    if step.after == step.before:
        return f"{step.stage} {step.rule}: {step.why}"
    return f"{step.stage} {step.rule}: {step.after}{' (hit inside a component)' if step.inside else ''}"

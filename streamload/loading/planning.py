"""The plan: which stored tensor goes where, worked out from headers before one weight is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from streamload.checkpoint import Checkpoint, TensorSpec
from streamload.checkpoint.spec import Stamp
from streamload.loading.buffers import stranded
from streamload.loading.fitting import Fitter
from streamload.loading.fused import Fused, could_fill
from streamload.loading.ignore import Ignore
from streamload.loading.keys import Keys
from streamload.loading.matching import Matched
from streamload.loading.naming import Router
from streamload.loading.operation import Operation
from streamload.loading.placement import Placement
from streamload.loading.targets import Targets


class Forecast(NamedTuple):
    """Host memory that a load will take, in bytes."""

    params_bytes: int
    """Parameters and buffers that will be filled, in the dtypes that they will have; not those on an accelerator."""
    staging_bytes: int
    """Beyond them: windows for reading, threads, the books. Files that lie in the page cache are read without windows,
    so ``plan`` looks there; if the cache loses them meanwhile, a load takes ``threads`` times ``window`` bytes more."""

    @property
    def peak_bytes(self) -> int:
        """Both together."""
        return self.params_bytes + self.staging_bytes

    def to_dict(self) -> dict[str, int]:
        """All three numbers."""
        return {**self._asdict(), "peak_bytes": self.peak_bytes}


class Copy(NamedTuple):
    """A second copy of (a part of) a tied parameter in the checkpoint: it is compared with the first, not written."""

    placement: Placement
    alias: str

    @property
    def target(self) -> str:
        """The name that was written."""
        return self.placement.target


class Difference(NamedTuple):
    """A stored copy of a tied parameter that is not what was written."""

    copy: Copy
    largest: float


@dataclass(repr=False)
class LoadPlan(Keys):
    """All placements of a load, and what will be missing, unexpected, dropped or tied."""

    placements: list[Placement] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    """Groups of stored tensors whose values have to be computed."""
    handed: dict[str, TensorSpec] = field(default_factory=dict)
    """Stored tensors that modules' own ``load_weights`` or parameters' own ``weight_loader`` take."""
    hooked: list[str] = field(default_factory=list)
    """Targets that those fill."""
    forecast: Forecast = field(default_factory=lambda: Forecast(0, 0))
    threads: int = 1
    stamps: dict[str, Stamp | None] = field(default_factory=dict)
    """Of the shards, when their headers were read."""
    window: int = 0
    """Bytes of one thread's staging buffer."""

    def _amounts(self) -> list[str]:
        return [f"{len(self.placements)} placements", f"{self.bytes_to_read:,} bytes to read", f"{self.forecast}"]

    def filled(self) -> dict[str, None]:
        """The targets that are written, in order."""
        names = dict.fromkeys([placement.target for placement in self.placements])
        return names | dict.fromkeys(
            [*(name for operation in self.operations for name in operation.targets), *self.hooked]
        )

    def wanted(self) -> dict[str, None]:
        """The stored tensors of which something is read."""
        computed = [spec.name for operation in self.operations for spec in operation.sources.values()]
        copies = [copy.placement.spec.name for copy in self.copies]
        placed = [placement.spec.name for placement in self.placements]
        return dict.fromkeys([*placed, *copies, *computed, *self.handed])

    @property
    def bytes_to_read(self) -> int:
        """Bytes wanted from the files, copies to compare included."""
        computed = sum(spec.nbytes for each in self.operations for spec in each.sources.values())
        return (
            computed
            + sum(spec.nbytes for spec in self.handed.values())
            + sum(placement.nbytes for placement in self.placements)
            + sum(copy.placement.nbytes for copy in self.copies)
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything but the placements, which are counted, as JSON can hold it."""
        return self.keys_to_dict() | {
            "placements": len(self.placements),
            "bytes_to_read": self.bytes_to_read,
            "forecast": self.forecast.to_dict(),
            "threads": self.threads,
        }


def make_plan(
    checkpoint: Checkpoint,
    targets: Targets,
    *,
    mapper: Any = None,
    ignore_unexpected: Iterable[str] = (),
    ignore_missing: Iterable[str] = (),
) -> LoadPlan:
    """Match the catalog of ``checkpoint`` with ``targets``.

    Raises MappingError when two stored tensors land in one place, LoadError when an ignore list names something that
    must not be ignored. Everything else that does not fit is listed in the plan.
    """
    plan = LoadPlan(notes=list(checkpoint.notes), known=targets.known(), stamps=checkpoint.stamps)
    plan.stranded = stranded(targets)
    unexpected, missing = Ignore("ignore_unexpected", ignore_unexpected), Ignore("ignore_missing", ignore_missing)
    unexpected.refuse_exact(plan.known)
    router = Router(targets, mapper)
    matched = Matched(plan, targets, router, unexpected)
    matched.take(checkpoint.tensors)
    fitting = Fitter(plan, targets).fit_all(matched.arrived)
    plan.operations = matched.operations
    plan.handed = {name: checkpoint.tensors[name] for name in matched.handed}
    plan.hooked = sorted(matched.hooked)
    plan.notes += matched.hook_notes()
    _place(plan, targets, _without_raw_memory(fitting, targets, matched))
    conclude(plan, targets, matched, router, (unexpected, missing))
    return plan


def conclude(
    plan: LoadPlan, targets: Targets, matched: Matched, router: Router, ignores: tuple[Ignore, Ignore]
) -> None:
    """Say in ``plan`` what is missing, and what else there is to say once all names have been seen."""
    unexpected, missing = ignores
    _find_missing(plan, targets, matched, missing, router)
    if router.conversions is not None:
        plan.prefix = router.conversions.prefix
        plan.notes += router.conversions.notes()
    plan.prefix = plan.prefix or router.prefix
    plan.notes += router.notes()
    plan.notes += [*unexpected.unused(), *missing.unused()]
    if router.overridden and not plan.ok:
        plan.notes.append(f"mapper= stands in for the conversions of checkpoints that {router.library} has of its own")


def _without_raw_memory(
    fitting: dict[str, list[Placement]], targets: Targets, matched: Matched
) -> dict[str, list[Placement]]:
    """``fitting`` without parts of targets on meta that will not be filled: the rest of them would be raw memory."""
    lacking = [name for name in matched.lacking() if name in targets.tensors and targets.tensors[name].is_meta]
    return (
        {name: made for name, made in fitting.items() if targets.first(name).name not in lacking}
        if lacking
        else fitting
    )


def _place(plan: LoadPlan, targets: Targets, fitting: Mapping[str, list[Placement]]) -> None:
    """Of a tied parameter one stored copy is written: that of its first name, else of the first alias, in module order."""
    aliases = targets.aliases
    computed = {name for operation in plan.operations for name in operation.targets}
    writers: dict[str, str] = {}
    for alias, first in aliases.items():
        if first not in fitting and alias in fitting:
            writers.setdefault(first, alias)
    for name, placements in fitting.items():
        first = aliases.get(name, name) if aliases else name
        writer = writers.get(first, first)
        if name == writer:
            plan.placements += placements
        elif writer not in fitting or [*map(_where, placements)] != [*map(_where, fitting[writer])]:
            plan.copies += [Copy(placement, name) for placement in placements]
    filled = fitting.keys() | writers.keys() | computed
    plan.tied = {alias: first for alias, first in aliases.items() if first in filled}


def _where(placement: Placement) -> tuple[Any, ...]:
    spec = placement.spec
    return spec.file, spec.offset, spec.strides, placement.source_region, placement.target_region


def _find_missing(plan: LoadPlan, targets: Targets, matched: Matched, ignore: Ignore, router: Router) -> None:
    filled = {targets.aliases.get(name, name) for name in matched.names()}
    rules, lacking = router.stacked_rules, matched.lacking()
    for name in targets.specs:
        if name in filled:
            continue
        real = name not in targets.tensors or not targets.tensors[name].is_meta
        rule = ignore.match(name)
        if rule is None and real and router.conversions is not None:
            rule = router.conversions.allow_missing(name)
        if rule is not None and not real:
            plan.notes.append(f"{rule}: {name} is on the meta device, so it has no value that could be kept")
            rule = None
        if rule is not None:
            plan.dropped[name] = rule
        else:
            plan.missing_keys.append(name)
        if name in lacking:
            plan.incomplete.append(lacking[name])
            if real and lacking[name].present:
                kept = ", ".join(lacking[name].missing)
                plan.notes.append(f"{name}: only parts of it are written, part {kept} keeps the values that it has")
        elif rule is None and could_fill(name, rules):
            nothing = Fused(targets.specs[name], rules, None).incomplete()
            plan.incomplete += [nothing] if nothing is not None else []

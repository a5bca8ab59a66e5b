"""The plan: which stored tensor goes where, worked out from headers before one weight is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from streamload.checkpoint import Checkpoint, TensorSpec
from streamload.checkpoint.dtypes import castable, narrows
from streamload.checkpoint.spec import Stamp
from streamload.errors import LoadError, MappingError
from streamload.loading.keys import Cast, Keys, Mismatch, summarise
from streamload.loading.placement import Placement
from streamload.loading.targets import Target, Targets

#: Rule under which a tensor is dropped that the module holds as a non-persistent buffer.
RECOMPUTED = "recomputed buffer"

NameMap = Callable[[str], str | None]


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
    """A second copy of a tied parameter in the checkpoint: it is compared with the first, not written."""

    spec: TensorSpec
    alias: str
    target: str


@dataclass
class LoadPlan(Keys):
    """All placements of a load, and what will be missing, unexpected, dropped or tied."""

    placements: list[Placement] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    forecast: Forecast = field(default_factory=lambda: Forecast(0, 0))
    threads: int = 1
    stamps: dict[str, Stamp | None] = field(default_factory=dict, repr=False)
    """Of the shards, when their headers were read."""
    window: int = 0
    """Bytes of one thread's staging buffer."""

    @property
    def bytes_to_read(self) -> int:
        """Bytes wanted from the files, copies to compare included."""
        return sum(placement.nbytes for placement in self.placements) + sum(copy.spec.nbytes for copy in self.copies)

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
    name_map: NameMap | None = None,
    ignore_unexpected: Iterable[str] = (),
    ignore_missing: Iterable[str] = (),
) -> LoadPlan:
    """Match the catalog of ``checkpoint`` with ``targets``.

    Raises MappingError when two stored tensors land in one place, LoadError when an ignore list names something that
    must not be ignored. Everything else that does not fit is listed in the plan.
    """
    plan = LoadPlan(notes=list(checkpoint.notes), known=targets.known(), stamps=checkpoint.stamps)
    unexpected, missing = _Ignore("ignore_unexpected", ignore_unexpected), _Ignore("ignore_missing", ignore_missing)
    unexpected.refuse_exact(plan.known)
    arrived: dict[str, TensorSpec] = {}
    for spec in checkpoint.tensors.values():
        name = spec.name if name_map is None else name_map(spec.name)
        if name is None:
            plan.dropped[spec.name] = "mapper"
        elif not isinstance(name, str):
            raise MappingError(f"the mapper turns {spec.name!r} into {name!r:.80}; expected a name, or None to drop it")
        elif name in targets.specs or name in targets.aliases:
            if (first := arrived.setdefault(name, spec)) is not spec:
                raise MappingError(
                    f"{first.name!r} and {spec.name!r} both map to {name!r}; one of them has to be renamed or dropped"
                )
        elif name in targets.recomputed:
            plan.dropped[spec.name] = RECOMPUTED
        elif rule := unexpected.match(spec.name) or unexpected.match(name):
            plan.dropped[spec.name] = rule
        else:
            plan.unexpected_keys.append(spec.name)
    _place(plan, targets, arrived)
    _find_missing(plan, targets, arrived, missing)
    plan.notes += [*unexpected.unused(), *missing.unused()]
    return plan


def _place(plan: LoadPlan, targets: Targets, arrived: dict[str, TensorSpec]) -> None:
    specs, aliases, new = targets.specs, targets.aliases, tuple.__new__
    fitting: dict[str, TensorSpec] = {}
    for name, spec in arrived.items():
        target = specs[aliases.get(name, name)]
        if (spec.shape == target.shape and spec.dtype == target.dtype) or _fits(plan, target, spec, name):
            fitting[name] = spec
    # Of a tied parameter one stored copy is written: that of its first name, else of the first alias, in module order.
    writers: dict[str, str] = {}
    for alias, first in aliases.items():
        if first not in fitting and alias in fitting:
            writers.setdefault(first, alias)
    for name, spec in fitting.items():
        first = aliases.get(name, name) if aliases else name
        writer = fitting[writers.get(first, first)]
        if spec is writer:
            plan.placements.append(new(Placement, (spec, first, None, None)))
        elif (spec.file, spec.offset, spec.strides) != (writer.file, writer.offset, writer.strides):
            plan.copies.append(Copy(spec, name, first))
    plan.tied = {alias: first for alias, first in targets.aliases.items() if first in fitting or first in writers}


def _fits(plan: LoadPlan, target: Target, spec: TensorSpec, name: str) -> bool:
    """Whether ``spec``, which is not exactly like ``target``, can fill it; notes casts and mismatches."""
    if spec.shape != target.shape and {spec.shape, target.shape} != {(), (1,)}:
        plan.mismatched_keys.append(
            Mismatch(name, f"shape {list(target.shape)}", f"shape {list(spec.shape)}", spec.file)
        )
        return False
    if spec.shape != target.shape:
        plan.notes.append(f"{name}: one element, stored as {list(spec.shape)}, put into {list(target.shape)}")
    if spec.dtype == target.dtype:
        return True
    if not castable(spec.dtype, target.dtype):
        plan.mismatched_keys.append(
            Mismatch(name, target.dtype, f"{spec.dtype} (only plain floats are converted unasked)", spec.file)
        )
        return False
    plan.casts.append(Cast(name, spec.dtype, target.dtype, narrows(spec.dtype, target.dtype)))
    return True


def _find_missing(plan: LoadPlan, targets: Targets, arrived: dict[str, TensorSpec], ignore: _Ignore) -> None:
    filled = {targets.aliases.get(name, name) for name in arrived}
    for name in targets.specs:
        if name in filled:
            continue
        rule = ignore.match(name)
        if rule is None:
            plan.missing_keys.append(name)
        elif name in targets.tensors and targets.tensors[name].is_meta:
            raise LoadError(f"{rule}: {name} is on the meta device, so it has no value that could be kept")
        else:
            plan.dropped[name] = rule


class _Ignore:
    """Exact names and globs, with a count of hits for each."""

    def __init__(self, title: str, patterns: Iterable[str]) -> None:
        if isinstance(patterns, (str, bytes)) or not isinstance(patterns, Iterable):
            found = "a single string" if isinstance(patterns, str) else type(patterns).__name__
            raise LoadError(f"{title}={patterns!r:.80}: expected a list of names or globs, found {found}")
        patterns = list(patterns)
        if wrong := [pattern for pattern in patterns if not isinstance(pattern, str)]:
            raise LoadError(f"{title}: expected names or globs, found {wrong[0]!r:.80}")
        self._title = title
        self._exact = dict.fromkeys(patterns, 0)
        self._globs = [pattern for pattern in self._exact if any(sign in pattern for sign in "*?[")]

    def refuse_exact(self, known: Iterable[str]) -> None:
        wrong = [name for name in known if name in self._exact]
        if wrong:
            raise LoadError(
                f"{self._title} names {summarise(wrong)}, which the module has; leave it in, or change the checkpoint's name "
                "with a mapper"
            )

    def match(self, name: str) -> str | None:
        if not self._exact:
            return None
        hit = name if name in self._exact else next((glob for glob in self._globs if fnmatchcase(name, glob)), None)
        if hit is None:
            return None
        self._exact[hit] += 1
        return f"{self._title} {hit!r}"

    def unused(self) -> list[str]:
        return [f"{self._title} {pattern!r} matched nothing" for pattern, hits in self._exact.items() if not hits]

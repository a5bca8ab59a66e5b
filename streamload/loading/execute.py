"""Carry out a plan: make room for what is on meta, read the bytes into place, compare tied copies, keep the books."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from streamload.checkpoint.dtypes import BITS
from streamload.checkpoint.spec import Stamp
from streamload.loading.ledger import Ledger
from streamload.loading.operation import Operation, compute
from streamload.loading.placement import Placement, Region, pieces, run_of
from streamload.loading.planning import Copy, Difference, LoadPlan
from streamload.loading.rectangles import CARRIER, largest_difference
from streamload.loading.room import make_room, untie
from streamload.loading.targets import Target, Targets
from streamload.memory import Meter
from streamload.sources.batches import Read, Sink
from streamload.sources.direct import FileReads, read_files
from streamload.sources.dtypes import torch_dtype
from streamload.sources.file import file_in_cache
from streamload.sources.staging import Staging, StagingPool
from streamload.sources.system import BLOCK


def needs_windows(plan: LoadPlan, targets: Targets, device: torch.device | None) -> bool:
    """Whether carrying out ``plan`` would go through staging windows, as the page cache is now."""
    to_device = device is not None and device.type != "cpu"
    cut = (_is_cut(placement, targets.specs[placement.target]) for placement in plan.placements)
    if plan.casts or plan.copies or to_device or any(cut):
        return True
    if any(not (tensor.is_meta or targets.specs[name].address) for name, tensor in targets.tensors.items()):
        return True
    return not all(file_in_cache(path) for path in {placement.spec.file for placement in plan.placements})


def _is_cut(placement: Placement, target: Target) -> bool:
    """Whether it is more than one run of bytes, in the file or in its target."""
    spec, _, source_region, target_region = placement
    whole = source_region is None and target_region is None
    return spec.strides is not None or not (whole or _runs(placement, target.shape))


def _inputs(operation: Operation) -> list[Placement]:
    return [Placement(spec, name) for name, spec in operation.sources.items()]


class Execution:
    """One run of a plan. ``ledger`` tells how far it came, also after a failure."""

    clones = 0
    clone_bytes = 0

    def __init__(
        self,
        plan: LoadPlan,
        targets: Targets,
        device: torch.device | None,
        on_progress: Callable[[Ledger], None] | None,
    ) -> None:
        self.plan = plan
        self.targets = targets
        self._device = device
        self.compared = [copy.placement for copy in plan.copies]
        self.ledger = Ledger([*plan.placements, *self.compared])
        self._computed = [self._expect(_inputs(operation)) for operation in plan.operations]
        self.spoilt: list[str] = []
        self.differences: list[Difference] = []
        """Stored copies of tied parameters that differ from what was written."""
        self._meter: Meter | None = None
        self._on_progress = on_progress

    def names(self) -> Collection[str]:
        """The targets that are written."""
        return self.plan.filled()

    def touched(self) -> Collection[str]:
        """The same: they get their memory before anything is read."""
        return self.names()

    def passes_on(self, error: BaseException) -> bool:
        """None of its errors is the user's."""
        return False

    def run(self, meter: Meter) -> None:
        """Make room for the targets, read everything, and compare."""
        self._meter = meter
        make_room(self.targets, self.names(), self._device, keep={each.name for each in self.plan.incomplete})
        with self._pool() as pool:
            self.targets.touched = True
            self._read(pool, _reads(self.plan.placements, 0, self.targets, self.plan.stamps, self.plan.window))
            for operation, first in zip(self.plan.operations, self._computed, strict=True):
                self._compute(pool, operation, first)
            if self.compared:
                self.differences = self._compare(pool)

    def _expect(self, placements: Sequence[Placement]) -> int:
        """Open accounts for ``placements``; returns the number of the first."""
        first = len(self.ledger.placements)
        self.ledger.expect(placements)
        return first

    def _compute(self, pool: StagingPool, operation: Operation, first: int) -> None:
        """Read what an operation needs, run it, and put its results in place."""
        inputs = Targets()
        for name, spec in operation.sources.items():
            tensor = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
            inputs.specs[name] = Target(name, spec.dtype, spec.shape, tensor.data_ptr())
            inputs.tensors[name] = tensor
        self._read(pool, _reads(_inputs(operation), first, inputs, self.plan.stamps, self.plan.window))
        tensors, inputs.tensors = inputs.tensors, {}
        compute(operation, tensors, self.targets)
        if self._meter is not None:
            self._meter.sample()  # while what it needed is still there

    def untie(self, copies: Sequence[Copy]) -> None:
        """Give the aliases of ``copies`` memory of their own and read their values into it."""
        for alias in dict.fromkeys(copy.alias for copy in copies):
            self.plan.notes.append(untie(self.targets, alias))
            del self.plan.tied[alias]
        more = [copy.placement._replace(target=copy.alias) for copy in copies]
        first = self._expect(more)
        with self._pool() as pool:
            self._read(pool, _reads(more, first, self.targets, self.plan.stamps, self.plan.window))

    def _pool(self) -> StagingPool:
        return StagingPool(self.plan.threads, self.plan.window, pinned=bool(self.targets.on_device))

    def _read(self, pool: StagingPool, reads: Iterable[FileReads]) -> None:
        pause = 0.01 if self._on_progress is None else 0.0
        read_files(reads, pool.windows, self._book, pause=pause, keep=self.targets)
        if self._meter is not None:
            self._meter.sample()  # while the windows are still there

    def _book(self, path: str, reads: list[Read], bytes_read: int) -> None:
        self.ledger.book(reads, bytes_read)
        if self._on_progress is not None:
            self._on_progress(self.ledger)

    def _compare(self, pool: StagingPool) -> list[Difference]:
        largest: list[float | None] = [None] * len(self.compared)
        first = len(self.plan.placements)

        def sink(number: int, source: _Source, target: Tensor) -> Sink:
            return _Compare(source, target, largest, number - first)

        # Smaller pieces: a difference is worked out in double precision.
        self._read(pool, _reads(self.compared, first, self.targets, self.plan.stamps, self.plan.window // 8, sink))
        found = zip(self.plan.copies, largest, strict=True)
        return [Difference(copy, difference) for copy, difference in found if difference is not None]


def _reads(
    placements: Sequence[Placement],
    first: int,
    targets: Targets,
    stamps: Mapping[str, Stamp | None],
    window: int,
    make_sink: Callable[[int, _Source, Tensor], Sink] | None = None,
) -> Iterator[FileReads]:
    """The reads that carry out ``placements``, numbered from ``first``: file by file, in the order of their offsets."""
    by_file: dict[str, list[tuple[int, Placement]]] = defaultdict(list)
    for number, placement in enumerate(placements, first):
        if placement.spec.nbytes:
            by_file[placement.spec.file].append((number, placement))
    limit = window - 4 * BLOCK  # a direct read begins and ends on blocks
    for path, members in by_file.items():
        members.sort(key=lambda member: member[1].spec.offset)
        end = max(placement.spec.offset + placement.spec.span for _, placement in members)
        yield FileReads(path, end, _reads_of(members, targets, limit, make_sink), stamps.get(path))


def _reads_of(
    members: list[tuple[int, Placement]],
    targets: Targets,
    limit: int,
    make_sink: Callable[[int, _Source, Tensor], Sink] | None,
) -> Iterator[Read]:
    specs, new = targets.specs, tuple.__new__
    for number, placement in members:
        spec, name, source_region, target_region = placement
        _, dtype, _, address = specs[name]
        straight = address and make_sink is None and spec.dtype == dtype and spec.strides is None
        if straight and source_region is None and target_region is None:
            yield new(Read, (spec.offset, spec.nbytes, address, None, number))
        elif straight and (runs := _runs(placement, specs[name].shape)) is not None:
            yield new(Read, (spec.offset + runs[0], placement.nbytes, address + runs[1], None, number))
        else:
            yield from _staged(number, placement, targets.tensors[name].detach(), limit, make_sink or _copy_sink)


def _runs(placement: Placement, shape: Sequence[int]) -> tuple[int, int] | None:
    """Where the bytes of both regions begin, when each is one run of bytes; elements are of whole bytes then."""
    spec, _, source_region, target_region = placement
    item = BITS[spec.dtype] // 8
    source, target = run_of(spec.shape, source_region), run_of(shape, target_region)
    return None if not item or source is None or target is None else (source * item, target * item)


def _staged(
    number: int, placement: Placement, tensor: Tensor, limit: int, make_sink: Callable[[int, _Source, Tensor], Sink]
) -> Iterator[Read]:
    spec, _, source_region, target_region = placement
    target = tensor
    if target_region is not None:
        target = target[tuple(slice(start, stop) for start, stop in target_region)]
    shape = spec.shape if source_region is None else tuple(stop - start for start, stop in source_region)
    dtype = torch_dtype(spec.dtype)
    if spec.dtype == "F4":  # bytes of two elements: cut by bytes, which is what the file holds
        shape = (*shape[:-1], shape[-1] // 2)
        spec = spec._replace(dtype="U8", shape=shape)
        dtype, target = torch.uint8, target.view(torch.uint8)
    if target.shape != shape:
        target = target.view(shape)  # [] and [1]
    for piece in pieces(spec, source_region, limit, BLOCK):
        part = target[tuple(slice(start, stop) for start, stop in piece.region)]
        source = _Source(dtype, piece.span, piece.region, piece.strides)
        yield Read(piece.offset, piece.span, 0, make_sink(number, source, part), number)


class _Source(NamedTuple):
    """How the bytes of a piece lie in a window."""

    dtype: torch.dtype
    span: int
    region: Region
    strides: tuple[int, ...]

    @property
    def wanted(self) -> int:
        return prod(stop - start for start, stop in self.region) * self.dtype.itemsize

    def view(self, window: Staging, start: int) -> Tensor:
        flat = window.view(start, self.span, self.dtype.itemsize).view(self.dtype)
        return flat.as_strided([stop - start for start, stop in self.region], self.strides)


class _CopyInto:
    """Copies a piece from a window into its part of a target, converting where the dtypes differ."""

    __slots__ = ("_source", "_target", "wanted")

    def __init__(self, source: _Source, target: Tensor) -> None:
        self._source, self._target = _carried(source, target)
        self.wanted = source.wanted

    def __call__(self, window: Staging, start: int) -> None:
        with torch.inference_mode(self._target.is_inference()):  # a thread has modes of its own
            self._target.copy_(self._source.view(window, start))


def _copy_sink(_: int, source: _Source, target: Tensor) -> Sink:
    return _CopyInto(source, target)


class _Compare:
    """Compares a piece with what is already in its target, and keeps the largest difference."""

    __slots__ = ("_largest", "_number", "_source", "_target", "wanted")

    def __init__(self, source: _Source, target: Tensor, largest: list[float | None], number: int) -> None:
        self._source, self._target, self.wanted = source, target, source.wanted
        self._largest, self._number = largest, number

    def __call__(self, window: Staging, start: int) -> None:
        largest = largest_difference(self._source.view(window, start), self._target)
        if largest is not None:
            self._largest[self._number] = max(self._largest[self._number] or 0.0, largest)


def _carried(source: _Source, target: Tensor) -> tuple[_Source, Tensor]:
    """The same bytes as integers, where nothing is to be converted."""
    carrier = CARRIER.get(source.dtype.itemsize)
    if source.dtype != target.dtype or carrier is None:
        return source, target
    return source._replace(dtype=carrier), target.view(carrier)

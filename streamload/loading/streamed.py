"""Carry out a plan with whole tensors that a source gives, in whatever order it gives them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from streamload.checkpoint.spec import TensorSpec
from streamload.errors import LoadError
from streamload.loading.held import Held
from streamload.loading.operation import compute
from streamload.loading.placement import Placement, row_major
from streamload.loading.planning import Copy, LoadPlan
from streamload.loading.rectangles import rectangle
from streamload.loading.room import adopt
from streamload.loading.targets import Targets
from streamload.loading.written import Written
from streamload.memory import Meter
from streamload.sources.source import Source

#: Tensors, or parts of them, that a computation waits for are held under names that begin so.
_COMPUTED = "computation "


class Streamed:
    """One run of ``plan``. ``catalog``: every stored tensor. ``share``: let parameters take over tensors that fit as they are."""

    def __init__(
        self,
        plan: LoadPlan,
        targets: Targets,
        written: Written,
        source: Source,
        catalog: Mapping[str, TensorSpec],
        held: Held,
        *,
        share: bool = False,
    ) -> None:
        self.plan, self.targets = plan, targets
        self.ledger, self.differences = written.ledger, written.differences
        self.spoilt: list[str] = []
        self._adoptions = 0
        self._written, self._source, self._held, self._share = written, source, held, share
        self._filled = plan.filled()
        self._early: dict[str, list[tuple[str, Placement]]] = defaultdict(list)
        """Copies of tied parameters that came before all parts of the first had; they are compared at the end."""
        self._uses: dict[str, list[tuple[str, Placement]]] = defaultdict(list)
        for target, placement in [
            *((placement.target, placement) for placement in plan.placements),
            *((copy.alias, copy.placement) for copy in plan.copies),
        ]:
            inside = _inside(placement.spec, catalog)
            self._uses[inside.name].append((target, placement._replace(spec=inside)))
        self._needs: dict[str, dict[int, None]] = defaultdict(dict)
        for number, operation in enumerate(plan.operations):
            for spec in operation.sources.values():
                self._needs[spec.name][number] = None
        plan.copies = []  # those that are compared come back as they are
        self._inputs = [
            {name: Placement(_inside(spec, catalog), name) for name, spec in operation.sources.items()}
            for operation in plan.operations
        ]
        self._as_views = {name for name, spec in catalog.items() if spec.strides is not None}

    @property
    def clones(self) -> int:
        """Tensors that were cloned because others had to come first."""
        return self._held.count

    @property
    def clone_bytes(self) -> int:
        """Bytes of those, all together."""
        return self._held.total

    def names(self) -> Collection[str]:
        """The targets that are written."""
        return self._filled

    def touched(self) -> Collection[str]:
        """The targets that have been written to."""
        return self._written.touched

    def passes_on(self, error: BaseException) -> bool:
        """None of its errors is the user's."""
        return False

    def untie(self, copies: Sequence[Copy]) -> None:
        """Ties come apart while the tensors come, if they may."""

    def run(self, meter: Meter) -> None:
        """Take in every tensor of the source."""
        with self._source as source:
            for stored, tensor in source:
                self._take(stored, tensor)
                del tensor  # a source that reuses its memory looks whether anybody holds it
            meter.sample()
        for stored, uses in self._early.items():
            for target, placement in uses:
                if (kept := self._held.get(stored)) is not None:
                    self._written.put(target, placement, kept)
                    self._held.release(stored, target)
        if self._adoptions:
            self.plan.notes.append(f"{self._adoptions} parameters share the pages of the files")
        self.ledger.bytes_read = source.bytes_read
        self.plan.notes += source.notes
        if left := [*self._uses, *self._needs]:
            raise LoadError(f"{len(left)} tensors have not come, {left[0]!r} first, which is a fault of streamload")

    def _take(self, stored: str, tensor: Tensor) -> None:
        waiting: list[str] = []
        if stored in self._as_views:  # as it lies in the file
            tensor = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
        uses, needs = self._uses.pop(stored, []), self._needs.pop(stored, {})
        for target, placement in uses:
            if self._share and self._adopted(target, placement, tensor):
                continue
            if not self._written.put(target, placement, tensor):
                waiting.append(target)
                self._early[stored].append((target, placement))
        if waiting:
            self._held.keep(stored, tensor, waiting)
        for number in needs:
            for key, placement in self._inputs[number].items():
                if placement.spec.name == stored:
                    self._held.keep(
                        f"{_COMPUTED}{number} {key}", rectangle(tensor, placement), [f"{_COMPUTED}{number}"]
                    )
            self._compute(number)

    def _adopted(self, target: str, placement: Placement, tensor: Tensor) -> bool:
        """Whether the parameter has taken over ``tensor`` as it is."""
        if target in self.targets.aliases or placement.source_region is not None or placement.target_region is not None:
            return False
        if self._written.elements.get(target) or not adopt(self.targets, target, tensor):
            return False
        self._written.adopted(target, placement)
        self._adoptions += 1
        return True

    def _compute(self, number: int) -> None:
        operation, waiting = self.plan.operations[number], f"{_COMPUTED}{number}"
        tensors = {key: self._held.get(f"{waiting} {key}") for key in operation.sources}
        found = {key: tensor for key, tensor in tensors.items() if tensor is not None}
        if len(found) < len(tensors):
            return
        for target in operation.targets:
            self._written.computed(target)
        compute(operation, found, self.targets)
        for key, spec in operation.sources.items():
            self.ledger.add(Placement(spec, key))
            self._held.release(f"{waiting} {key}", waiting)


def _inside(spec: TensorSpec, catalog: Mapping[str, TensorSpec]) -> TensorSpec:
    """``spec``, (a part of) a stored tensor, counted from that tensor's first byte."""
    stored = catalog[spec.name]
    strides = spec.strides if stored.strides is None or spec.strides else row_major(spec.shape)
    return spec._replace(offset=spec.offset - stored.offset, strides=strides)

"""Run a load: mark the module meanwhile, settle ties, fill in the report, say where it broke off."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol

from torch import nn

from streamload.errors import BudgetError, LoadError, MappingError
from streamload.loading.failure import where
from streamload.loading.keys import Keys, summarise
from streamload.loading.ledger import Ledger
from streamload.loading.mark import mark, marked, put, settle
from streamload.loading.observed import tell_watchers
from streamload.loading.planning import Copy, Difference, LoadPlan
from streamload.loading.report import LoadReport
from streamload.loading.targets import Targets
from streamload.memory import Meter
from streamload.memory.meter import trim


class Progress(NamedTuple):
    """How far a load has come; what a progress callback gets."""

    bytes_done: int
    bytes_total: int
    """Of a one-pass stream: what the module takes, or what has come if that is more."""
    tensors_done: int
    tensors_total: int
    tensor: str
    """The tensor that was written to last."""
    file: str


class Work(Protocol):
    """What fills a module: a plan that is carried out, or a stream that is taken in."""

    plan: LoadPlan
    targets: Targets
    ledger: Ledger
    differences: list[Difference]
    spoilt: list[str]
    """Targets that were written to and turned out not to fit."""

    @property
    def clones(self) -> int:
        """Tensors that were cloned."""

    @property
    def clone_bytes(self) -> int:
        """Their bytes."""

    def run(self, meter: Meter) -> None:
        """Do it."""

    def untie(self, copies: Sequence[Copy]) -> None:
        """Give the aliases of ``copies`` memory of their own and their values, and note it."""

    def names(self) -> Collection[str]:
        """The targets that are filled, or will be."""

    def touched(self) -> Collection[str]:
        """The targets that may have been written to."""

    def passes_on(self, error: BaseException) -> bool:
        """Whether ``error`` is the user's own, or says by itself all there is to say."""


@dataclass
class Run:
    """A load of ``model`` under way."""

    work: Work
    model: nn.Module
    report: LoadReport
    resident: int
    """Bytes of the targets that are in host memory already."""
    started: float
    teller: Teller | None
    refuse_late: bool = False
    """Whether names that do not fit are an error that can be told only after the work."""

    def __call__(self, *, untie: bool) -> None:
        """Do the work. After a failure that left the module partly written it is marked."""
        model, targets = self.model, self.work.targets
        earlier, meter, told = marked(model), None, False
        names = self.work.names()
        try:
            mark(model, "its load has not ended", names)
            with Meter() as meter:
                self.work.run(meter)
                self._settle_ties(untie)
                if self.refuse_late:
                    told = not self.work.plan.ok
                    refuse_misfits(self.work.plan, model, self.report, "what fits was written")
                if unwritten := self.work.ledger.unwritten():
                    raise LoadError(
                        f"not every byte was written once, which is a fault of streamload: {summarise(unwritten)}"
                    )
        except BaseException as error:
            place = where(error, self.work.ledger)
            if targets.touched:
                misfit = f"the stream did not fit, {self.work.plan.problems()[0]}" if told else ""
                mark(model, misfit or f"{type(error).__name__} {place}", self.work.touched())
            else:
                put(model, earlier)
            self._fill(self.resident + (meter.growth if meter else 0))
            if told:
                raise
            if not self._is_ours(error):
                state = f"is only partly loaded: it broke off {place}" if targets.touched else "has not been touched"
                error.add_note(f"streamload: this {type(model).__name__} {state}")
                raise
            raise LoadError(f"load broke off {place}: {error}", report=self.report) from error
        finally:
            trim()
        put(model, earlier)
        filled = self.work.names()
        loaded = {*filled, *(alias for alias, first in targets.aliases.items() if first in filled)}
        for prefix, module in [*targets.marked, ("", model)]:
            settle(module, loaded, prefix)
        tell_watchers(targets.tensors[name] for name in filled if name in targets.tensors)
        if spoilt := self.work.spoilt:
            mark(model, f"{spoilt[0]} was written to before the stream showed that it does not fit", spoilt)
        # Memory that the allocator had at hand is no growth; but all targets are there now.
        self._fill(max(self.resident + meter.growth, self.work.plan.forecast.params_bytes))

    def _fill(self, peak: int) -> None:
        report, work = self.report, self.work
        for each in fields(Keys):
            setattr(report, each.name, getattr(work.plan, each.name))
        report.bytes_read, report.bytes_wanted = work.ledger.bytes_read, work.ledger.bytes_wanted
        report.clones, report.clone_bytes = work.clones, work.clone_bytes
        report.peak_host_bytes = peak
        report.seconds = time.perf_counter() - self.started

    def _settle_ties(self, untie: bool) -> None:
        plan, differences = self.work.plan, self.work.differences
        apart = {difference.copy.alias for difference in differences}
        equal = {copy.alias: copy.target for copy in plan.copies if copy.alias not in apart}
        plan.notes += [
            f"{alias}: stored as well as {first}, with equal values; they stay tied" for alias, first in equal.items()
        ]
        if differences and not untie:
            copy, largest = differences[0]
            amount = f"by up to {largest:g}" if largest else "in their bits"
            many = f"; {len(apart)} such tensors" if len(apart) > 1 else ""
            raise LoadError(
                f"{copy.alias} and {copy.target} are tied in the module but differ in the checkpoint ({amount}{many}); "
                "untie=True gives each its own memory",
                report=self.report,
            )
        if differences:
            self.work.untie([copy for copy in plan.copies if copy.alias in apart])

    def _is_ours(self, error: BaseException) -> bool:
        """Whether ``error`` is to be told as a LoadError: not what the user's code raised, and not Ctrl-C."""
        return (
            isinstance(error, Exception)
            and not isinstance(error, (BudgetError, MappingError))
            and not self.work.passes_on(error)
            and (self.teller is None or error is not self.teller.failure)
        )


class Teller:
    """Turns the books into calls of the user's callback, and remembers whether that failed."""

    def __init__(self, callback: Callable[[Progress], None], bytes_total: int = 0) -> None:
        self._callback, self._bytes_total = callback, bytes_total
        self.failure: BaseException | None = None

    def __call__(self, ledger: Ledger) -> None:
        spec = ledger.placements[ledger.last].spec
        bytes_total = max(self._bytes_total, ledger.bytes_wanted)
        state = Progress(
            ledger.bytes_written, bytes_total, ledger.written, len(ledger.placements), spec.name, spec.file
        )
        try:
            self._callback(state)
        except BaseException as error:
            self.failure = error
            raise


def refuse_misfits(made: LoadPlan, model: nn.Module, report: LoadReport, state: str = "nothing was read") -> None:
    """Raise LoadError when names do not fit; ``state`` says what has become of the module."""
    if made.ok:
        return
    counts = (
        (len(made.missing_keys), "missing"),
        (len(made.unexpected_keys), "unexpected"),
        (len(made.mismatched_keys), "mismatched"),
        (len(made.stranded), "on meta"),
    )
    head = ", ".join(f"{count} {what}" for count, what in counts if count)
    lines = "".join(f"\n  {line}" for line in made.problems())
    raise LoadError(
        f"the checkpoint does not fit {type(model).__name__} ({head}); {state}{lines}\n"
        "  ignore_missing and ignore_unexpected let names pass; strict=False loads what fits",
        report=report,
    )

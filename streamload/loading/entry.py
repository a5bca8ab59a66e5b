"""``plan`` and ``load``: the two calls that everything else serves."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import nn

from streamload.checkpoint import Checkpoint
from streamload.errors import BudgetError, LoadError, SourceError
from streamload.loading.execute import Execution, needs_windows
from streamload.loading.keys import Keys, summarise
from streamload.loading.ledger import Ledger
from streamload.loading.mark import mark, marked, put, settle
from streamload.loading.planning import Forecast, LoadPlan, NameMap, make_plan
from streamload.loading.report import LoadReport
from streamload.loading.targets import Targets, dtype_code, is_solid, module_targets, table_targets
from streamload.memory import Limits, Meter, resolve_budget
from streamload.memory.collector import quiet_collector
from streamload.memory.meter import resident_bytes, trim
from streamload.sources.staging import FIXED_OVERHEAD, MIN_WINDOW, split_budget

Table = Mapping[str, tuple[Any, Sequence[int]]]
"""``{name: (dtype, shape)}``; the dtype is torch's, or its name, or a code such as ``"BF16"``."""

_BACKENDS = ("auto", "direct")


class Progress(NamedTuple):
    """How far a load has come; what a progress callback gets."""

    bytes_done: int
    bytes_total: int
    tensors_done: int
    tensors_total: int
    tensor: str
    """The tensor that was written to last."""
    file: str


def plan(
    model: nn.Module | Table,
    weights: str | os.PathLike[str] | Checkpoint,
    *,
    mapper: Any = None,
    strict: bool = True,
    ignore_unexpected: Iterable[str] = (),
    ignore_missing: Iterable[str] = (),
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    memory_limit: int | str = "auto",
    backend: str = "auto",
    threads: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    recorder: None = None,
    untie: bool = False,
) -> LoadPlan:
    """What ``load`` with the same arguments would do, from headers alone: no weight is read, ``model`` is not changed.

    ``model`` may also be a table ``{name: (dtype, shape)}``. Names that do not fit are listed in the plan, not raised.
    Raises CheckpointError, MappingError, and BudgetError when ``memory_limit`` is too small to work with.
    """
    options = _Options(
        mapper, ignore_unexpected, ignore_missing, device, dtype, memory_limit, backend, threads, progress, recorder
    )
    prepared = _prepare(model, weights, options)
    made = prepared.plan
    if not needs_windows(made, prepared.targets, prepared.device):
        made.forecast = made.forecast._replace(staging_bytes=FIXED_OVERHEAD)
    return made


def load(
    model: nn.Module,
    weights: str | os.PathLike[str] | Checkpoint,
    *,
    mapper: Any = None,
    strict: bool = True,
    ignore_unexpected: Iterable[str] = (),
    ignore_missing: Iterable[str] = (),
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    memory_limit: int | str = "auto",
    backend: str = "auto",
    threads: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    recorder: None = None,
    untie: bool = False,
) -> LoadReport:
    """Read the weights of a checkpoint into ``model``, straight from the files into its parameters.

    ``model``: any module, built as usual or inside ``skeleton()``. ``weights``: a folder, a file, the name of a model in the
    Hugging Face cache, or an open Checkpoint. ``mapper``: a callable, or anything with ``map_name``, from a stored name to
    the module's name, or to ``None``, which drops the tensor.

    ``strict``: a missing, unexpected or mismatched name is an error, raised before a byte is read; otherwise it is
    only reported, and what does not fit is left out. ``ignore_unexpected`` and ``ignore_missing``: exact names or globs
    to let pass; each hit is in ``report.dropped``. ``device`` and ``dtype``: where the weights go and what plain floats
    become; ``None`` leaves parameters where and what they are (meta goes to the CPU). ``memory_limit``: host bytes beyond
    the parameters, as a number, ``"32MiB"``, ``"10%"`` or ``"auto"`` (the smaller of 64 MiB and a quarter of what the host
    leaves). ``threads``: reading threads. ``progress``: called in this thread with a Progress as bytes arrive; an exception
    in it cancels the load. ``untie``: give a tied parameter memory of its own where the checkpoint stores two different
    values for it, which is an error otherwise.

    Raises CheckpointError, MappingError, BudgetError; LoadError, with ``.report``, when names do not fit, tied copies
    differ or reading fails. After a failure that left the module partly written it refuses to run until it is loaded
    again. Hooks of ``load_state_dict`` and modules' own ``_load_from_state_dict`` are not run: the bytes go straight into
    the parameters. An exception of the progress callback and KeyboardInterrupt are passed on, with a note that says how
    far the load had come. The frames of streamload that such an exception holds are cleared, so that it pins no memory.
    """
    try:
        options = (
            mapper,
            ignore_unexpected,
            ignore_missing,
            device,
            dtype,
            memory_limit,
            backend,
            threads,
            progress,
            recorder,
        )
        return _load(model, weights, _Options(*options), strict=strict, untie=untie)
    except BaseException as error:
        del model, weights, mapper, progress, options
        _clear_frames(error)
        raise


@dataclass(frozen=True)
class _Options:
    """What ``plan`` and ``load`` have in common."""

    mapper: Any
    ignore_unexpected: Iterable[str]
    ignore_missing: Iterable[str]
    device: torch.device | str | None
    dtype: torch.dtype | str | None
    memory_limit: int | str
    backend: str
    threads: int | None
    progress: Callable[[Progress], None] | None
    recorder: None

    def __post_init__(self) -> None:
        if self.backend not in _BACKENDS:
            raise LoadError(f"backend={self.backend!r}: expected one of {', '.join(_BACKENDS)}")
        if self.recorder is not None:
            raise LoadError("recorder: the flight recorder is not part of this version yet")
        if self.threads is not None and not (isinstance(self.threads, int) and self.threads > 0):
            raise LoadError(f"threads={self.threads!r}: expected a number from one on")
        if self.progress is not None and not callable(self.progress):
            raise LoadError(f"progress: expected a callable that takes a Progress, found {self.progress!r}")

    @property
    def where(self) -> torch.device | None:
        """The device, checked."""
        if self.device is None:
            return None
        try:
            device = torch.device(self.device)
        except (RuntimeError, TypeError) as error:
            raise LoadError(f"device {self.device!r} is not known: {error}") from error
        if device.type == "meta":
            raise LoadError("device 'meta': holds no values, so nothing can be loaded there; see streamload.plan")
        return device

    @property
    def code(self) -> str | None:
        """The dtype's code, checked."""
        return None if self.dtype is None else dtype_code(self.dtype)

    @property
    def name_map(self) -> NameMap | None:
        """The mapper as a function."""
        mapper = self.mapper
        if mapper is None:
            return None
        found = getattr(mapper, "map_name", None) or getattr(mapper, "_map_name", None) or mapper
        if not callable(found):
            raise LoadError(f"mapper: expected a callable or an object with map_name, found {type(mapper).__name__}")
        return found  # type: ignore[no-any-return]


class _Prepared(NamedTuple):
    plan: LoadPlan
    targets: Targets
    device: torch.device | None
    resident: int
    """Bytes of the targets that are in host memory already."""
    started: float


def _prepare(model: nn.Module | Table, weights: str | os.PathLike[str] | Checkpoint, options: _Options) -> _Prepared:
    started = time.perf_counter()
    device = options.where
    with quiet_collector():
        targets = _targets(model, options.code)
        made = make_plan(
            weights if isinstance(weights, Checkpoint) else _open(weights),
            targets,
            name_map=options.name_map,
            ignore_unexpected=options.ignore_unexpected,
            ignore_missing=options.ignore_missing,
        )
        already = _resident(made, targets)
    _forecast(made, targets, already, options)
    return _Prepared(made, targets, device, already, started)


def _targets(model: nn.Module | Table, dtype: str | None) -> Targets:
    if isinstance(model, nn.Module):
        return module_targets(model, dtype)
    if isinstance(model, Mapping):
        return table_targets(model, dtype)
    raise LoadError(f"model: expected an nn.Module or a table of names, found {type(model).__name__}")


def _open(weights: str | os.PathLike[str]) -> Checkpoint:
    if not isinstance(weights, (str, os.PathLike)):
        raise LoadError(f"weights: expected a path, a name or a Checkpoint, found {type(weights).__name__}")
    return Checkpoint.open(weights)


def _forecast(made: LoadPlan, targets: Targets, already: int, options: _Options) -> None:
    """Divide the budget into windows and say what the load will take; ``already`` bytes of the targets are there."""
    params = _host_bytes(made, targets, options.where)
    left = Limits.read().available - max(0, params - already)
    budget = resolve_budget(options.memory_limit, max(0, left))
    if options.memory_limit == "auto":
        budget = max(budget, FIXED_OVERHEAD + 4 * MIN_WINDOW)  # hardly anything is left; with less it would crawl
    made.threads, made.window = split_budget(budget, options.threads or default_threads())
    made.forecast = Forecast(params, made.threads * made.window + FIXED_OVERHEAD)


def _host_bytes(made: LoadPlan, targets: Targets, device: torch.device | None) -> int:
    """Bytes that the targets to be filled will take of host memory."""
    if device is not None and device.type != "cpu":
        return 0
    if device is None and targets.on_device:
        names = (placement.target for placement in made.placements)
        return sum(targets.specs[name].nbytes for name in names if name not in targets.on_device)
    return sum(placement.spec.nbytes for placement in made.placements) + made.cast_growth


def default_threads() -> int:
    """Reading threads: one for each core that this process may use, at least two and at most eight."""
    return min(8, max(2, len(os.sched_getaffinity(0))))


def _load(
    model: nn.Module, weights: str | os.PathLike[str] | Checkpoint, options: _Options, *, strict: bool, untie: bool
) -> LoadReport:
    if not isinstance(model, nn.Module):
        raise LoadError(f"model: expected an nn.Module to load into, found {type(model).__name__}")
    with quiet_collector() as spare:
        _check_device(options.where)
        prepared = _prepare(model, weights, options)
        spare()
        report = _report(prepared.plan)
        if strict:
            _refuse_misfits(prepared.plan, prepared.targets, model, report)
        _execute(prepared, model, report, options.progress, untie)
    return report


def _check_device(device: torch.device | None) -> None:
    """Raise LoadError when ``device`` cannot be used, before anything is changed."""
    if device is not None and device.type != "cpu":
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:  # torch built without it; no driver
            raise LoadError(f"device {str(device)!r} cannot be used here: {str(error).splitlines()[0]}") from error


def _execute(
    prepared: _Prepared,
    model: nn.Module,
    report: LoadReport,
    progress: Callable[[Progress], None] | None,
    untie: bool,
) -> None:
    made, targets, device, already, started = prepared
    teller = _Teller(made, progress) if progress is not None else None
    execution = Execution(made, targets, teller)
    names = dict.fromkeys(placement.target for placement in made.placements)
    earlier, meter = marked(model), None
    try:
        mark(model, "its load has not ended", names)
        with Meter() as meter:
            execution.run(names, device, meter)
            _settle_ties(execution, report, untie)
            _check_written(execution.ledger)
    except BaseException as error:
        place = _where(error, execution)
        if targets.touched:
            mark(model, f"{type(error).__name__} {place}", ())
        else:
            put(model, earlier)
        _fill(report, execution.ledger, already + (meter.growth if meter else 0), started)
        if not _is_ours(error, teller):
            state = f"is only partly loaded: it broke off {place}" if targets.touched else "has not been touched"
            error.add_note(f"streamload: this {type(model).__name__} {state}")
            raise
        raise LoadError(f"load broke off {place}: {error}", report=report) from error
    finally:
        trim()
    loaded = {*names, *(alias for alias, first in targets.aliases.items() if first in names)}
    for prefix, module in targets.marked:
        settle(module, loaded, prefix)
    settle(model, loaded)
    # Memory that the allocator had at hand is no growth; but all targets are there now.
    _fill(report, execution.ledger, max(already + meter.growth, made.forecast.params_bytes), started)


def _report(made: LoadPlan) -> LoadReport:
    return LoadReport(**{field.name: getattr(made, field.name) for field in fields(Keys)})


def _fill(report: LoadReport, ledger: Ledger, peak: int, started: float) -> None:
    report.bytes_read, report.bytes_wanted = ledger.bytes_read, ledger.bytes_wanted
    report.peak_host_bytes = peak
    report.seconds = time.perf_counter() - started


def _refuse_misfits(made: LoadPlan, targets: Targets, model: nn.Module, report: LoadReport) -> None:
    if not made.ok:
        counts = (
            (len(made.missing_keys), "missing"),
            (len(made.unexpected_keys), "unexpected"),
            (len(made.mismatched_keys), "mismatched"),
        )
        head = ", ".join(f"{count} {what}" for count, what in counts if count)
        lines = "".join(f"\n  {line}" for line in made.problems())
        raise LoadError(
            f"the checkpoint does not fit {type(model).__name__} ({head}); nothing was read{lines}\n"
            "  ignore_missing and ignore_unexpected let names pass; strict=False (--lenient) loads what fits",
            report=report,
        )
    if targets.stranded:
        raise LoadError(
            f"{len(targets.stranded)} buffers of {type(model).__name__} are on the meta device and no checkpoint stores them: "
            f"{summarise(targets.stranded)}; build the module inside streamload.skeleton(), which keeps buffers real",
            report=report,
        )


def _settle_ties(execution: Execution, report: LoadReport, untie: bool) -> None:
    differences = execution.differences
    apart = {difference.copy.alias for difference in differences}
    report.notes += [
        f"{copy.alias}: stored as well as {copy.target}, with equal values; they stay tied"
        for copy in execution.plan.copies
        if copy.alias not in apart
    ]
    if differences and not untie:
        copy, largest = differences[0]
        many = f"; {len(differences)} such tensors" if len(differences) > 1 else ""
        raise LoadError(
            f"{copy.alias} and {copy.target} are tied in the module but differ in the checkpoint (by up to {largest:g}{many}); "
            "untie=True gives each its own memory",
            report=report,
        )
    if differences:
        execution.untie([difference.copy for difference in differences])
        for alias in apart:
            report.notes.append(
                f"{alias}: untied from {report.tied.pop(alias)}, since the checkpoint stores two values"
            )


def _check_written(ledger: Ledger) -> None:
    if unwritten := ledger.unwritten():
        raise LoadError(f"not every byte was written once, which is a fault of streamload: {summarise(unwritten)}")


def _resident(made: LoadPlan, targets: Targets) -> int:
    """Bytes of the targets to be filled that are in host memory already; 0 for a table.

    Raises LoadError when two targets share memory without being one tensor: whichever came last would win.
    """
    if targets.module is None:
        return 0
    specs = targets.specs
    ranges = [(specs[name].address, spec.nbytes, name) for spec, name, _, _ in made.placements if specs[name].address]
    loose: list[tuple[int, int]] = []
    if len(ranges) < len(made.placements):
        for _, name, _, _ in made.placements:
            tensor = targets.tensors[name]
            if not specs[name].address and tensor.is_cpu:
                place = (tensor.data_ptr(), tensor.numel() * tensor.element_size())
                if is_solid(tensor):
                    ranges.append((*place, name))
                else:
                    loose.append(place)
    ranges.sort()
    end, before = 0, ""
    for address, nbytes, name in ranges:
        if address < end and nbytes:
            raise LoadError(
                f"{before} and {name} share memory but are not the same view of it, so both cannot be loaded; give one of "
                "them memory of its own, or ignore it"
            )
        end, before = address + nbytes, name
    return resident_bytes([*(each[:2] for each in ranges), *loose])


class _Teller:
    """Turns the books into calls of the user's callback, and remembers whether that failed."""

    def __init__(self, made: LoadPlan, callback: Callable[[Progress], None]) -> None:
        self._specs = [*(placement.spec for placement in made.placements), *(copy.spec for copy in made.copies)]
        self._callback = callback
        self.failure: BaseException | None = None

    def __call__(self, ledger: Ledger) -> None:
        spec = self._specs[ledger.last]
        state = Progress(
            ledger.bytes_written, ledger.bytes_wanted, ledger.written, len(self._specs), spec.name, spec.file
        )
        try:
            self._callback(state)
        except BaseException as error:
            self.failure = error
            raise


def _is_ours(error: BaseException, teller: _Teller | None) -> bool:
    """Whether ``error`` is to be told as a LoadError: not what the user's code raised, and not Ctrl-C."""
    return (
        isinstance(error, Exception)
        and not isinstance(error, BudgetError)
        and (teller is None or error is not teller.failure)
    )


def _where(error: BaseException, execution: Execution) -> str:
    """At which tensor, of which file, after how much."""
    ledger, placements = execution.ledger, execution.placements
    amount = f"after {ledger.bytes_written:,} of {ledger.bytes_wanted:,} bytes"
    number = ledger.last
    if isinstance(error, SourceError) and error.offset is not None:
        at = error.offset
        touched = (
            number
            for number, placement in enumerate(placements)
            if placement.spec.file == error.path and placement.spec.offset + placement.spec.span > at
        )
        number = next(touched, number)
    if not placements:
        return amount
    spec = placements[number].spec
    return f"at tensor {spec.name!r} ({number + 1} of {len(placements)}) of {spec.file}, {amount}"


def _clear_frames(error: BaseException) -> None:
    """Clear the finished frames of streamload and torch that ``error`` and its causes hold."""
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        link = chain.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        chain += [link.__cause__, link.__context__]
        for frame, _ in traceback.walk_tb(link.__traceback__):
            if frame.f_globals.get("__name__", "").partition(".")[0] in ("streamload", "torch"):
                with suppress(RuntimeError):  # it is still running: ours, which has let go of everything itself
                    frame.clear()

"""``plan`` and ``load``: the two calls that everything else serves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import nn

from streamload.checkpoint import Checkpoint
from streamload.errors import BudgetError, LoadError
from streamload.loading.execute import Execution, needs_windows
from streamload.loading.failure import clear_frames, where
from streamload.loading.forecast import forecast, resident
from streamload.loading.keys import Keys, summarise
from streamload.loading.ledger import Ledger
from streamload.loading.mark import mark, marked, put, settle
from streamload.loading.planning import LoadPlan, make_plan
from streamload.loading.report import LoadReport
from streamload.loading.targets import Targets, dtype_code, module_targets, table_targets
from streamload.memory import Meter
from streamload.memory.collector import quiet_collector
from streamload.memory.meter import trim
from streamload.sources.staging import FIXED_OVERHEAD

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
    Hugging Face cache, or an open Checkpoint. ``mapper``: a WeightsMapper, vLLM's, anything with ``map_name``, or a callable,
    from a stored name to the module's name, or to ``None``, which drops the tensor. ``None`` means the module's own
    ``hf_to_vllm_mapper``, else the conversions of the library that it comes from, else that names stay.

    ``strict``: a missing, unexpected or mismatched name is an error, raised before a byte is read; otherwise it is
    only reported, and what does not fit is left out. ``ignore_unexpected`` and ``ignore_missing``: exact names or globs
    to let pass; each hit is in ``report.dropped``. ``device`` and ``dtype``: where the weights go and what plain floats
    become; ``None`` leaves parameters where and what they are (meta goes to the CPU). ``memory_limit``: host bytes beyond
    the parameters, as a number, ``"32MiB"``, ``"10%"`` or ``"auto"`` (the smaller of 64 MiB and a quarter of what the host
    leaves). ``threads``: reading threads, at most 64. ``progress``: called in this thread with a Progress as bytes arrive;
    an exception in it cancels the load. ``untie``: give a tied parameter memory of its own where the checkpoint stores two
    different values for it, which is an error otherwise.

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
        clear_frames(error)
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
            mapper=options.mapper,
            ignore_unexpected=options.ignore_unexpected,
            ignore_missing=options.ignore_missing,
        )
        already = resident(made, targets)
    forecast(made, targets, already, device, options.memory_limit, options.threads)
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
            _refuse_misfits(prepared.plan, model, report)
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
    teller = _Teller(progress) if progress is not None else None
    execution = Execution(made, targets, teller)
    names = made.filled()
    earlier, meter = marked(model), None
    try:
        mark(model, "its load has not ended", names)
        with Meter() as meter:
            execution.run(names, device, meter)
            _settle_ties(execution, report, untie)
            _check_written(execution.ledger)
    except BaseException as error:
        place = where(error, execution)
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
    for prefix, module in [*targets.marked, ("", model)]:
        settle(module, loaded, prefix)
    # Memory that the allocator had at hand is no growth; but all targets are there now.
    _fill(report, execution.ledger, max(already + meter.growth, made.forecast.params_bytes), started)


def _report(made: LoadPlan) -> LoadReport:
    return LoadReport(**{field.name: getattr(made, field.name) for field in fields(Keys)})


def _fill(report: LoadReport, ledger: Ledger, peak: int, started: float) -> None:
    report.bytes_read, report.bytes_wanted = ledger.bytes_read, ledger.bytes_wanted
    report.peak_host_bytes = peak
    report.seconds = time.perf_counter() - started


def _refuse_misfits(made: LoadPlan, model: nn.Module, report: LoadReport) -> None:
    if not made.ok:
        counts = (
            (len(made.missing_keys), "missing"),
            (len(made.unexpected_keys), "unexpected"),
            (len(made.mismatched_keys), "mismatched"),
            (len(made.stranded), "on meta"),
        )
        head = ", ".join(f"{count} {what}" for count, what in counts if count)
        lines = "".join(f"\n  {line}" for line in made.problems())
        raise LoadError(
            f"the checkpoint does not fit {type(model).__name__} ({head}); nothing was read{lines}\n"
            "  ignore_missing and ignore_unexpected let names pass; strict=False loads what fits",
            report=report,
        )


def _settle_ties(execution: Execution, report: LoadReport, untie: bool) -> None:
    differences = execution.differences
    apart = {difference.copy.alias for difference in differences}
    equal = {copy.alias: copy.target for copy in execution.plan.copies if copy.alias not in apart}
    report.notes += [
        f"{alias}: stored as well as {first}, with equal values; they stay tied" for alias, first in equal.items()
    ]
    if differences and not untie:
        copy, largest = differences[0]
        amount = f"by up to {largest:g}" if largest else "in their bits"
        many = f"; {len(apart)} such tensors" if len(apart) > 1 else ""
        raise LoadError(
            f"{copy.alias} and {copy.target} are tied in the module but differ in the checkpoint ({amount}{many}); "
            "untie=True gives each its own memory",
            report=report,
        )
    if differences:
        execution.untie([copy for copy in execution.plan.copies if copy.alias in apart])
        for alias in apart:
            report.notes.append(
                f"{alias}: untied from {report.tied.pop(alias)}, since the checkpoint stores two values"
            )


def _check_written(ledger: Ledger) -> None:
    if unwritten := ledger.unwritten():
        raise LoadError(f"not every byte was written once, which is a fault of streamload: {summarise(unwritten)}")


class _Teller:
    """Turns the books into calls of the user's callback, and remembers whether that failed."""

    def __init__(self, callback: Callable[[Progress], None]) -> None:
        self._callback = callback
        self.failure: BaseException | None = None

    def __call__(self, ledger: Ledger) -> None:
        spec = ledger.placements[ledger.last].spec
        state = Progress(
            ledger.bytes_written, ledger.bytes_wanted, ledger.written, len(ledger.placements), spec.name, spec.file
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

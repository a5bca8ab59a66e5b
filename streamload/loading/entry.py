"""``plan`` and ``load``: the two calls that everything else serves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from streamload.checkpoint import Checkpoint
from streamload.errors import LoadError
from streamload.loading.buffers import stranded
from streamload.loading.execute import Execution, needs_windows
from streamload.loading.failure import clear_frames
from streamload.loading.forecast import budget_for, forecast, host_bytes, resident
from streamload.loading.held import Held
from streamload.loading.ignore import Ignore
from streamload.loading.keys import Keys
from streamload.loading.naming import Router
from streamload.loading.onepass import OnePass, Order
from streamload.loading.options import Options, check_device
from streamload.loading.planning import Forecast, LoadPlan, make_plan
from streamload.loading.report import LoadReport
from streamload.loading.run import Progress, Run, Teller, refuse_misfits
from streamload.loading.streamed import Streamed
from streamload.loading.targets import Targets, module_targets, table_targets
from streamload.loading.written import Written
from streamload.memory.collector import quiet_collector
from streamload.sources.guard import guard
from streamload.sources.source import Source
from streamload.sources.staging import FIXED_OVERHEAD
from streamload.sources.stream import stream

Table = Mapping[str, tuple[Any, Sequence[int]]]
"""``{name: (dtype, shape)}``; the dtype is torch's, or its name, or a code such as ``"BF16"``."""

Stream = Iterable[tuple[str, Tensor]] | Mapping[str, Tensor]
"""Tensors by name that are in memory, or come by one after the other; each is used before the next is asked for."""


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
    share: bool = False,
) -> LoadPlan:
    """What ``load`` with the same arguments would do, from headers alone: no weight is read, ``model`` is not changed.

    ``model`` may also be a table ``{name: (dtype, shape)}``. Names that do not fit are listed in the plan, not raised.
    Raises CheckpointError, MappingError, and BudgetError when ``memory_limit`` is too small to work with.
    """
    options = Options(
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
        share,
    )
    prepared = _prepare(model, weights, options)
    made = prepared.plan
    if options.is_direct and not made.handed and not needs_windows(made, prepared.targets, prepared.device):
        made.forecast = made.forecast._replace(staging_bytes=FIXED_OVERHEAD)
    return made


def load(
    model: nn.Module,
    weights: str | os.PathLike[str] | Checkpoint | Stream,
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
    share: bool = False,
) -> LoadReport:
    """Read the weights of a checkpoint into ``model``, straight from the files into its parameters.

    ``model``: any module, built as usual or inside ``skeleton()``. ``weights``: a folder, a file, the name of a model in the
    Hugging Face cache, or an open Checkpoint; or a state_dict, or any iterable of (name, tensor). Such a stream is taken in one
    tensor at a time, each before the next is asked for, so it may reuse its memory; what cannot be put in place before
    others have come is cloned meanwhile, within ``memory_limit``, and counted in the report. Names that do not fit are told
    once it has passed. ``mapper``: a WeightsMapper, vLLM's, anything with ``map_name``, or a callable,
    from a stored name to the module's name, or to ``None``, which drops the tensor. ``None`` means the module's own
    ``hf_to_vllm_mapper``, else the conversions of the library that it comes from, else that names stay.

    ``strict``: a missing, unexpected or mismatched name is an error, raised before a byte is read; otherwise it is
    only reported, and what does not fit is left out. ``ignore_unexpected`` and ``ignore_missing``: exact names or globs
    to let pass; each hit is in ``report.dropped``. ``device`` and ``dtype``: where the weights go and what plain floats
    become; ``None`` leaves parameters where and what they are (meta goes to the CPU). ``memory_limit``: host bytes beyond
    the parameters, as a number, ``"32MiB"``, ``"10%"`` or ``"auto"`` (the smaller of 64 MiB and a quarter of what the host
    leaves). ``threads``: reading threads, at most 64. ``progress``: called in this thread with a Progress as bytes arrive;
    an exception in it cancels the load. ``backend``: how the bytes come, see ``streamload.stream``; ``"auto"`` reads them
    straight into place, others give whole tensors that are copied. ``share``: with ``backend="mmap"``, let parameters take over
    pages of the files where dtype and layout allow: no anonymous memory, and pages are read when they are used; what is
    written to them stays in this process. ``untie``: give a tied parameter memory of its own where the checkpoint stores two
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
            share,
        )
        return _load(model, weights, Options(*options), strict=strict, untie=untie)
    except BaseException as error:
        del model, weights, mapper, progress, options
        clear_frames(error)
        raise


class _Prepared(NamedTuple):
    plan: LoadPlan
    checkpoint: Checkpoint
    targets: Targets
    device: torch.device | None
    resident: int
    """Bytes of the targets that are in host memory already."""
    started: float


def _prepare(model: nn.Module | Table, weights: str | os.PathLike[str] | Checkpoint, options: Options) -> _Prepared:
    started = time.perf_counter()
    device = options.where
    with quiet_collector():
        targets = _targets(model, options.code)
        checkpoint = weights if isinstance(weights, Checkpoint) else _open(weights)
        made = make_plan(
            checkpoint,
            targets,
            mapper=options.mapper,
            ignore_unexpected=options.ignore_unexpected,
            ignore_missing=options.ignore_missing,
        )
        already = resident(made.filled(), targets)
    how = (options.memory_limit, options.threads, options.backend, checkpoint.tensors)
    forecast(made, targets, already, device, *how, share=options.share)
    return _Prepared(made, checkpoint, targets, device, already, started)


def _targets(model: nn.Module | Table, dtype: str | None) -> Targets:
    if isinstance(model, nn.Module):
        return module_targets(model, dtype)
    if isinstance(model, Mapping):
        return table_targets(model, dtype)
    raise LoadError(f"model: expected an nn.Module or a table of names, found {type(model).__name__}")


def _open(weights: str | os.PathLike[str]) -> Checkpoint:
    if not isinstance(weights, (str, os.PathLike)):
        raise LoadError(
            f"weights: expected a path, a name or a Checkpoint, found {type(weights).__name__}; a stream of tensors can be "
            "loaded but not planned, since its names are known only once it has passed"
        )
    return Checkpoint.open(weights)


def _load(
    model: nn.Module,
    weights: str | os.PathLike[str] | Checkpoint | Stream,
    options: Options,
    *,
    strict: bool,
    untie: bool,
) -> LoadReport:
    if not isinstance(model, nn.Module):
        raise LoadError(f"model: expected an nn.Module to load into, found {type(model).__name__}")
    if not isinstance(weights, (str, os.PathLike, Checkpoint)):
        if not isinstance(weights, Iterable):
            raise LoadError(
                "weights: expected a path, a name, a Checkpoint, a state_dict or an iterable of (name, tensor), found "
                f"{type(weights).__name__}"
            )
        return _take_in(model, weights, options, strict=strict, untie=untie)
    with quiet_collector() as spare:
        check_device(options.where)
        prepared = _prepare(model, weights, options)
        spare()
        report = _report(prepared.plan)
        if strict:
            refuse_misfits(prepared.plan, model, report)
        if prepared.targets.loaders or prepared.targets.writers:
            return _through_hooks(model, prepared, options, strict=strict, untie=untie)
        teller = Teller(options.progress) if options.progress is not None else None
        work = (
            Execution(prepared.plan, prepared.targets, prepared.device, teller)
            if options.is_direct
            else _streamed(prepared, options, teller, untie=untie)
        )
        Run(work, model, report, prepared.resident, prepared.started, teller)(untie=untie)
    return report


def _streamed(prepared: _Prepared, options: Options, teller: Teller | None, *, untie: bool) -> Streamed:
    """The same plan, with whole tensors that another reader gives."""
    made, checkpoint = prepared.plan, prepared.checkpoint
    written = Written(made, prepared.targets, prepared.device, teller, may_untie=untie)
    source = stream(checkpoint, names=made.wanted(), backend=options.backend, memory_limit=made.window or "auto")
    held = Held(max(made.window, made.forecast.staging_bytes))
    return Streamed(made, prepared.targets, written, source, checkpoint.tensors, held, share=options.share)


def _through_hooks(model: nn.Module, prepared: _Prepared, options: Options, *, strict: bool, untie: bool) -> LoadReport:
    """A hook takes whole tensors, for as long as it likes: they are mapped, unless another reader is asked for."""
    made = prepared.plan
    backend = "mmap" if options.is_direct else options.backend
    limit = made.window if not options.is_direct and made.window else "auto"
    source = stream(prepared.checkpoint, names=made.wanted(), backend=backend, memory_limit=limit)
    report = _take_in(model, source, options, strict=strict, untie=untie)
    for name in ("dropped", "unexpected_keys", "renamed", "notes"):
        ours = getattr(report, name)
        earlier = getattr(made, name)
        setattr(report, name, earlier | ours if isinstance(ours, dict) else [*dict.fromkeys([*earlier, *ours])])
    return report


def _take_in(model: nn.Module, weights: Stream, options: Options, *, strict: bool, untie: bool) -> LoadReport:
    """Load from a stream, whose names are known only once it has passed."""
    started, device = time.perf_counter(), options.where
    check_device(device)
    targets = module_targets(model, options.code)
    made = LoadPlan(known=targets.known(), stranded=stranded(targets))
    params, already = host_bytes(targets.specs, targets, device), resident(targets.specs, targets)
    if "" in targets.loaders and options.mapper is not None:
        raise LoadError(
            f"mapper=: {type(model).__name__} has a load_weights of its own, which maps the names itself, so they would be "
            "mapped twice; give the mapper to that class (hf_to_vllm_mapper), or rename what the stream gives"
        )
    budget = budget_for(params, already, options.memory_limit)
    made.forecast = Forecast(params, budget)
    unexpected = Ignore("ignore_unexpected", options.ignore_unexpected)
    unexpected.refuse_exact(made.known)
    missing = Ignore("ignore_missing", options.ignore_missing)
    report = _report(made)
    teller = Teller(options.progress, params) if options.progress is not None else None
    order = Order(targets, Router(targets, options.mapper), unexpected, missing, device, budget, untie, teller)
    items = weights.items() if isinstance(weights, Mapping) else weights
    if targets.writers and getattr(weights, "lends", False) and not isinstance(weights, (Source, guard)):
        items = guard(items)  # nobody knows what a weight_loader keeps
    Run(OnePass(items, made, order, weights), model, report, already, started, teller, refuse_late=strict)(untie=untie)
    if isinstance(weights, Source):
        report.bytes_read = weights.bytes_read
        report.notes += weights.notes
    return report


def _report(made: LoadPlan) -> LoadReport:
    return LoadReport(**{field.name: getattr(made, field.name) for field in fields(Keys)})

"""How much host memory a load will take, worked out before it begins."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from streamload.checkpoint import TensorSpec
from streamload.checkpoint.dtypes import BITS
from streamload.errors import BudgetError, LoadError
from streamload.loading.operation import Operation
from streamload.loading.placement import Placement
from streamload.loading.planning import Forecast, LoadPlan
from streamload.loading.targets import Targets, is_solid
from streamload.memory import Limits, resolve_budget
from streamload.memory.meter import resident_bytes
from streamload.sources.direct import default_threads
from streamload.sources.staging import FIXED_OVERHEAD, MIN_WINDOW, split_budget
from streamload.sources.stream import buffers


def forecast(
    made: LoadPlan,
    targets: Targets,
    already: int,
    device: torch.device | None,
    memory_limit: int | str,
    threads: int | None,
    backend: str,
    catalog: Mapping[str, TensorSpec],
    *,
    share: bool,
) -> None:
    """Divide the budget and say what the load will take; ``already`` bytes of the targets are there."""
    params = host_bytes(made.filled(), targets, device)
    if share:
        params -= sum(each.nbytes for each in made.placements if shareable(each, targets, device))
    budget = budget_for(params, already, memory_limit)
    if memory_limit == "auto":
        budget = max(budget, FIXED_OVERHEAD + 4 * MIN_WINDOW)  # hardly anything is left; with less it would crawl
    reading = FIXED_OVERHEAD + MIN_WINDOW
    computing = max([needed_by(each, targets, budget - reading, reading) for each in made.operations], default=0)
    if made.handed and backend in ("auto", "direct"):
        backend = "mmap"  # hooks get whole tensors, for as long as they like
    if backend in ("auto", "direct"):
        made.threads, made.window = split_budget(budget - computing, threads or default_threads())
        staging = made.threads * made.window
    else:
        wanted = {name: catalog[name] for name in made.wanted()}
        staging = made.window = buffers(backend, wanted, budget - computing, raised=memory_limit == "auto")
    made.forecast = Forecast(params, staging + FIXED_OVERHEAD + computing)


def shareable(placement: Placement, targets: Targets, device: torch.device | None) -> bool:
    """Whether a parameter can take over the mapped pages of what fills it: all of it, as it is stored, on the CPU."""
    spec, name, source_region, target_region = placement
    whole = source_region is None and target_region is None and spec.strides is None
    here = (device is None or device.type == "cpu") and name not in targets.on_device
    fits = spec.dtype == targets.specs[name].dtype and spec.shape == targets.specs[name].shape
    return whole and here and fits and not spec.offset % max(1, BITS[spec.dtype] // 8)


def budget_for(params: int, already: int, memory_limit: int | str) -> int:
    """The budget beyond ``params`` bytes of host memory, of which ``already`` are there."""
    left = Limits.read().available - max(0, params - already)
    return resolve_budget(memory_limit, max(0, left))


def needed_by(operation: Operation, targets: Targets, room: int, besides: int = 0) -> int:
    """Bytes that ``operation`` takes at most: what it reads, that in the target's dtype, and its results, the last two once more
    in the making.

    Raises BudgetError when that is more than ``room`` bytes, which the budget leaves after ``besides`` bytes for other things.
    """
    item = max(BITS[targets.first(name).dtype] for name in operation.targets) // 8
    sources = sum(spec.nbytes + 2 * spec.numel * item for spec in operation.sources.values())
    need = sources + 2 * sum(targets.first(name).nbytes for name in operation.targets)
    if need > room:
        raise BudgetError(
            f"{operation.title}: has to be computed with all its tensors in memory, which takes about {need:,} bytes, but the "
            f"budget leaves {max(0, room):,}; give memory_limit at least {need + besides:,} bytes"
        )
    return need


def host_bytes(filled: Iterable[str], targets: Targets, device: torch.device | None) -> int:
    """Bytes that the targets ``filled`` will take of host memory."""
    if device is not None and device.type != "cpu":
        return 0
    elsewhere = targets.on_device if device is None else ()
    return sum(targets.specs[name].nbytes for name in filled if name not in elsewhere)


def resident(filled: Collection[str], targets: Targets) -> int:
    """Bytes of the targets ``filled`` that are in host memory already; 0 for a table.

    Raises LoadError when two targets share memory without being one tensor: whichever came last would win.
    """
    if targets.module is None:
        return 0
    specs, tensors = targets.specs, targets.tensors
    solid = [(specs[name].address, specs[name].nbytes) for name in filled if specs[name].address]
    loose: list[tuple[int, int]] = []
    if len(solid) < len(filled):
        others = (tensors[name] for name in filled if not specs[name].address)
        for tensor in others:
            if tensor.is_cpu:
                place = (tensor.data_ptr(), tensor.numel() * tensor.element_size())
                (solid if is_solid(tensor) else loose).append(place)
    solid.sort()
    end = 0
    for address, nbytes in solid:
        if address < end and nbytes:
            at = (name for name in filled if tensors[name].data_ptr() <= address < _end(tensors[name]))
            raise LoadError(
                f"{' and '.join(at)} share memory but are not the same view of it, so both cannot be loaded; give one of "
                "them memory of its own, or ignore it"
            )
        end = max(end, address + nbytes)
    return resident_bytes(solid + loose)


def _end(tensor: Tensor) -> int:
    return tensor.data_ptr() + tensor.numel() * tensor.element_size() if tensor.is_cpu else 0

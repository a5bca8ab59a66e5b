"""``stream``: the tensors of a checkpoint, one after the other."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches

from streamload.checkpoint import Checkpoint, TensorSpec
from streamload.errors import BudgetError, SourceError
from streamload.memory import Limits, resolve_budget
from streamload.sources.borrowed import BorrowedSource, FastSafetensorsSource, RunaiSource
from streamload.sources.direct import default_threads
from streamload.sources.direct_stream import DirectSource, needed
from streamload.sources.mapped import MappedSource
from streamload.sources.opened import SafetensorsSource
from streamload.sources.source import Source

#: What ``backend`` can be; ``auto`` is ``direct``.
BACKENDS = ("auto", "direct", "mmap", "safetensors", "safetensors-mmap", "runai", "fastsafetensors")


def stream(
    location: str | os.PathLike[str] | Checkpoint,
    *,
    names: Iterable[str] | None = None,
    backend: str = "auto",
    memory_limit: int | str = "auto",
) -> Source:
    """The tensors of the checkpoint at ``location``, lazily, each once: an iterator of (name, tensor) on the CPU.

    ``names``: only these; others are not read. ``memory_limit``: host bytes of all buffers, as a number, ``"32MiB"`` or
    ``"10%"``; ``"auto"`` is the smaller of 64 MiB and a quarter of what the host leaves, or what the largest tensors need.

    ``backend``: ``"direct"`` (the same as ``"auto"``) reads ahead into buffers, which are reused only when nobody holds a tensor
    in them: what is kept stays right, and BudgetError names the first tensor kept when the budget is used up. ``"mmap"``: over
    pages of the files, valid for as long as held, and no anonymous memory. ``"safetensors"`` and ``"safetensors-mmap"``:
    through that library, by reads or mappings. ``"runai"`` and ``"fastsafetensors"``: through those, which lend buffers, so
    that a tensor is valid only until the next is asked for: BorrowError names one that is kept. ``Source.lends`` tells.

    Use it as a context manager, or to its end. Raises CheckpointError, BudgetError when whole tensors do not fit into
    ``memory_limit``, and SourceError when reading fails, also while it is iterated.
    """
    check_backend(backend)
    checkpoint = location if isinstance(location, Checkpoint) else Checkpoint.open(location)
    specs = _chosen(checkpoint, names)
    budget, raised = resolve_budget(memory_limit, Limits.read().available), memory_limit == "auto"
    if backend in ("auto", "direct"):
        budget = max(budget, needed(specs)) if raised else budget
        return DirectSource(specs, checkpoint.stamps, budget, default_threads())
    if backend == "mmap":
        return MappedSource(specs, checkpoint.stamps)
    _check_safetensors(specs, backend)
    room = buffers(backend, {spec.name: spec for spec in specs}, budget, raised=raised)
    if backend == "safetensors":
        return SafetensorsSource(specs, checkpoint.stamps, "pread")
    if backend == "safetensors-mmap":
        return SafetensorsSource(specs, checkpoint.stamps, "mmap")
    kind: type[BorrowedSource] = RunaiSource if backend == "runai" else FastSafetensorsSource
    return kind(specs, checkpoint.stamps, room, checkpoint.skipped)


def buffers(backend: str, specs: Mapping[str, TensorSpec], budget: int, *, raised: bool) -> int:
    """Bytes that ``backend``, which is not ``direct``, takes to give ``specs`` to a consumer that keeps none.

    ``raised``: the budget may be exceeded where the largest tensor needs it; otherwise that is a BudgetError.
    """
    if backend in ("mmap", "safetensors-mmap") or not specs:
        return 0
    largest, total = max(spec.nbytes for spec in specs.values()), sum(spec.nbytes for spec in specs.values())
    if largest > budget and not raised:
        name = max(specs, key=lambda name: specs[name].nbytes)
        raise BudgetError(
            f"memory_limit of {budget:,} bytes is too small for whole tensors, which backend={backend!r} gives: the largest, "
            f"{name!r}, has {largest:,} bytes"
        )
    return largest if backend == "safetensors" else min(total, max(budget, largest))


def check_backend(backend: str) -> None:
    """Raise SourceError when there is no such backend."""
    if backend not in BACKENDS:
        raise SourceError(f"backend={backend!r}: expected one of {', '.join(BACKENDS)}")


def _chosen(checkpoint: Checkpoint, names: Iterable[str] | None) -> Sequence[TensorSpec]:
    if names is None:
        return [*checkpoint.tensors.values()]
    if isinstance(names, str):
        raise SourceError(f"names={names!r}: expected names of tensors, found a single string")
    wanted = set(names)
    if unknown := sorted(map(str, wanted - checkpoint.tensors.keys())):
        close = get_close_matches(unknown[0], checkpoint.tensors, n=3)
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
        many = f" and {len(unknown) - 1} others" if len(unknown) > 1 else ""
        raise SourceError(f"{checkpoint.location}: has no tensor {unknown[0]!r}{many}{hint}", path=checkpoint.location)
    return [spec for name, spec in checkpoint.tensors.items() if name in wanted]


def _check_safetensors(specs: Collection[TensorSpec], backend: str) -> None:
    other = next((spec.file for spec in specs if not _is_safetensors(spec.file)), None)
    if other is not None:
        raise SourceError(
            f"{other}: is no safetensors file, which backend={backend!r} needs; 'direct' and 'mmap' read it", path=other
        )


def _is_safetensors(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(4) != b"PK\x03\x04"

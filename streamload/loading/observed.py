"""What code that we do not know writes into parameters: the writes themselves are watched, whatever it says it has done."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import numpy
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode


class Observed:
    """Which elements of ``tensors``, which have memory, have been written."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._sizes = {name: tensor.numel() for name, tensor in tensors.items()}
        self._runs: dict[str, list[tuple[Any, int]]] = defaultdict(list)
        places = [
            (str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + _span(tensor), name)
            for name, tensor in tensors.items()
        ]
        self._places = sorted(place for place in places if place[1] < place[2])

    def saw(self, written: Tensor) -> None:
        """``written``, which may be a view of one of the tensors, has been written to."""
        if written.is_meta or not written.numel():
            return
        address = written.data_ptr()
        at = bisect_right(self._places, (str(written.device), address, address + (1 << 62), "")) - 1
        if at < 0 or self._places[at][0] != str(written.device) or address >= self._places[at][2]:
            return
        _, start, _, name = self._places[at]
        starts, length = _runs(written)
        self._runs[name].append((starts + (address - start) // written.itemsize, length))

    def writes(self, name: str) -> int:
        """How many writes there were to ``name``."""
        return len(self._runs[name]) if name in self._runs else 0

    def elements(self, name: str) -> int:
        """How many elements of ``name`` have been written, each counted once."""
        runs = self._runs.get(name, [])
        if any(numpy.ndim(starts) == 0 and not starts and length == self._sizes[name] for starts, length in runs):
            return self._sizes[name]
        if not runs:
            return 0
        starts = numpy.concatenate([numpy.atleast_1d(starts) for starts, _ in runs])
        ends = starts + numpy.concatenate([numpy.full(numpy.size(starts), length) for starts, length in runs])
        order = numpy.argsort(starts, kind="stable")
        starts, ends = starts[order], numpy.maximum.accumulate(ends[order])
        before = numpy.concatenate([[starts[0]], ends[:-1]])
        return int((ends - numpy.maximum(starts, before)).sum())

    def touched(self) -> Collection[str]:
        """Everything that was written to."""
        return self._runs.keys()


def _span(tensor: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _runs(tensor: Tensor) -> tuple[Any, int]:
    """Where the stretches of neighbouring elements of ``tensor`` begin, counted from its first element, and how long they are."""
    if tensor.is_contiguous():
        return 0, tensor.numel()
    dims = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    length = 1
    while dims and dims[0][0] == length:
        length *= dims.pop(0)[1]
    starts = numpy.zeros(1, dtype=numpy.int64)
    for stride, size in reversed(dims):
        starts = (starts[:, None] + numpy.arange(size, dtype=numpy.int64) * stride).ravel()
    return starts, length


_watching: ContextVar[tuple[Observed, ...]] = ContextVar("who watches what is written", default=())


@contextmanager
def watching(observed: Observed) -> Iterator[None]:
    """Loads inside the block, which do not write through torch alone, tell ``observed`` what they have filled."""
    token = _watching.set((*_watching.get(), observed))
    try:
        yield
    finally:
        _watching.reset(token)


def tell_watchers(filled: Iterable[Tensor]) -> None:
    """A load has filled these tensors."""
    if watchers := _watching.get():
        for tensor in filled:
            for observed in watchers:
                observed.saw(tensor)


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, what this thread writes is told to ``observed``. Costs about 15 microseconds an operation."""

    def __init__(self, observed: Observed) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observed = observed

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Asked by torch: otherwise the first use imports its compiler, which takes 2 s and 60 MiB."""
        return False

    def __enter__(self) -> Observer:
        """Watch this thread. Torch's own flags are left alone: they are global, and several threads may be watched at once."""
        _push_mode(self)
        return self

    def __exit__(self, *_: object) -> None:
        _pop_mode()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run ``func`` and look at what it has written to."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for position, name in _written_arguments(func):
            written = kwargs.get(name) if name in kwargs else (args[position] if position < len(args) else None)
            for each in _tensors(written):
                self._observed.saw(each)
        return result


@cache
def _written_arguments(func: Any) -> list[tuple[int, str]]:
    arguments = enumerate(func._schema.arguments)
    return [(position, each.name) for position, each in arguments if each.alias_info and each.alias_info.is_write]


def _tensors(written: Any) -> Iterator[Tensor]:
    if isinstance(written, Tensor):
        yield written
    elif isinstance(written, (list, tuple)):
        yield from (each for each in written if isinstance(each, Tensor))

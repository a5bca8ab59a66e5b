"""Sources of other libraries that lend buffers which they reuse. They always run under ``guard``."""

from __future__ import annotations

import inspect
import os
import threading
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from streamload.checkpoint import TensorSpec
from streamload.checkpoint.spec import Stamp
from streamload.errors import SourceError
from streamload.interrupts import postponed
from streamload.sources.guard import guard
from streamload.sources.lent import over_memory_of
from streamload.sources.source import CatalogSource, Tally

_LIMIT = "RUNAI_STREAMER_MEMORY_LIMIT"
_environment = threading.Lock()


class BorrowedSource(CatalogSource):
    """Tensors that are valid only until the next is asked for, in whatever order they come.

    ``budget``: bytes of the library's buffers, at least those of the largest tensor. BorrowError names a tensor that is kept
    past the next but one; what the library raises is told as SourceError.
    """

    lends = True

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        stamps: Mapping[str, Stamp | None],
        budget: int,
        doubled: Sequence[TensorSpec] = (),
    ) -> None:
        super().__init__(specs, stamps)
        self._budget = budget
        self._doubled = {spec.name for spec in doubled}
        """Names that also lie in another file, whose copy must not be read."""

    @staticmethod
    @abstractmethod
    def _read(paths: list[str], names: set[str], budget: int) -> Iterator[tuple[str, Tensor]]:
        """``names`` of ``paths``, through the library."""

    def _stream(self) -> Iterator[tuple[str, Tensor]]:
        return guard(_checked(self._read, self._groups(), self._budget, self.tally))

    def _groups(self) -> list[list[TensorSpec]]:
        """What can be asked for at once: all of it, but file by file when a name lies in two of them."""
        by_file: dict[str, list[TensorSpec]] = {}
        for spec in self._specs:
            by_file.setdefault(spec.file, []).append(spec)
        if self._doubled.isdisjoint(spec.name for spec in self._specs):
            return [self._specs] if self._specs else []
        return [*by_file.values()]


def _checked(
    read: Any, groups: Sequence[Sequence[TensorSpec]], budget: int, tally: Tally
) -> Iterator[tuple[str, Tensor]]:
    """Everything that was asked for, once, of the shape that its header has."""
    for specs in groups:
        left = {spec.name: spec for spec in specs}
        paths = [*dict.fromkeys(spec.file for spec in specs)]
        items = iter(read(paths, set(left), budget))
        try:
            while (item := _next(items, paths)) is not None:
                name, tensor = item
                del item
                spec = left.pop(name, None)
                if spec is None or tensor.numel() * tensor.element_size() != spec.nbytes:
                    raise SourceError(f"{name!r} came from {', '.join(paths)} twice, or not as its header has it")
                tally.bytes_read += spec.nbytes
                lent = [tensor]
                del tensor
                yield name, lent.pop()
        finally:
            with postponed():
                items.close()
        if left:
            raise SourceError(f"{len(left)} tensors did not come, {next(iter(left))!r} first; from {', '.join(paths)}")


def _next(items: Iterator[tuple[str, Tensor]], paths: Sequence[str]) -> tuple[str, Tensor] | None:
    try:
        with postponed():  # Ctrl-C inside leaves these libraries waiting for ever, or their threads behind
            return next(items, None)
    except Exception as error:
        shown = ", ".join(paths[:3]) + (" and others" if len(paths) > 3 else "")
        raise SourceError(f"{shown}: {type(error).__name__}: {error}", path=paths[0]) from error


class RunaiSource(BorrowedSource):
    """Tensors through runai-model-streamer, in the order in which they are read to their end."""

    @staticmethod
    def _read(paths: list[str], names: set[str], budget: int) -> Iterator[tuple[str, Tensor]]:
        from runai_model_streamer import SafetensorsStreamer

        stream = SafetensorsStreamer.stream_files
        # Before 0.17 everything was lent, and there was nothing to choose.
        choice = {"owned": False} if "owned" in inspect.signature(stream).parameters else {}
        with ExitStack() as stack:
            with _limited(
                budget if budget >= max(map(_header_bytes, paths)) else 0
            ):  # it reads headers within it as well
                streamer = stack.enter_context(SafetensorsStreamer())
                streamer.stream_files(paths, device="cpu", tensor_names=names, **choice)
            yield from streamer.get_tensors()


def _header_bytes(path: str) -> int:
    with open(path, "rb") as file:
        return int.from_bytes(file.read(8), "little")


@contextmanager
def _limited(budget: int) -> Iterator[None]:
    """The library takes its limit from the environment only."""
    with _environment:
        before = os.environ.get(_LIMIT)
        os.environ[_LIMIT] = str(budget)
        try:
            yield
        finally:
            if before is None:
                del os.environ[_LIMIT]
            else:
                os.environ[_LIMIT] = before


class FastSafetensorsSource(BorrowedSource):
    """Tensors through fastsafetensors, file by file, in pieces of the budget."""

    @staticmethod
    def _read(paths: list[str], names: set[str], budget: int) -> Iterator[tuple[str, Tensor]]:
        try:
            from fastsafetensors import ParallelLoader
        except ImportError as error:
            raise SourceError(
                "backend='fastsafetensors' needs that package: pip install 'streamload[fastsafetensors]'"
            ) from error
        loader = ParallelLoader(
            None,
            paths,
            queue_size=-1,
            use_tqdm_on_load=False,
            device="cpu",
            nogds=True,
            set_numa=False,
            tensor_filter=names.__contains__,
            max_batch_bytes=budget,
            accumulate_resident=False,
            borrowed_tensors=True,
        )
        try:
            for name, tensor in loader.iterate_weights():
                item = [(name, over_memory_of(tensor, _Keeper))]
                del tensor
                yield item.pop()
        finally:
            loader.close()


class _Keeper:
    """Lets go of a tensor of fastsafetensors where that is safe.

    Its memory is freed by a callback into Python, which must not run while an exception passes: the exception would be
    lost, and SystemError raised in its place. ``__del__`` puts it aside meanwhile.
    """

    def __init__(self, carrier: Any) -> None:
        self._carrier = carrier
        self.__array_interface__ = carrier.__array_interface__

    def __del__(self) -> None:
        self._carrier = None

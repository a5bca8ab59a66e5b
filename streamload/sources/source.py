"""What all sources have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from streamload.checkpoint.spec import Stamp, TensorSpec
from streamload.errors import SourceError
from streamload.interrupts import postponed
from streamload.sources.file import check_same

if TYPE_CHECKING:
    from torch import Tensor


class Tally:
    """What has been read; a stream keeps it, which must not hold its source: one that is dropped has to be collectable."""

    bytes_read = 0


class Source(ABC, Iterator["tuple[str, Tensor]"]):
    """A lazy stream of ``(name, tensor)`` that passes once. It closes when it ends, breaks off or is left as a context."""

    names: Sequence[str] | None = None
    """All names that will come, where they are known beforehand."""
    lends = False
    """Whether a tensor is valid only until the next one is asked for; else it is for as long as it is held."""
    look_ahead_bytes = 0
    """How much may be read before it is asked for."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        """What there is to say about how the bytes come."""
        self.tally = Tally()
        self.closed = False
        self.exhausted = False
        """Whether everything has come."""

    @abstractmethod
    def __next__(self) -> tuple[str, Tensor]:
        """The next tensor. Raises StopIteration at the end, and SourceError when the source was closed before."""

    @property
    def bytes_read(self) -> int:
        """Bytes taken from files so far."""
        return self.tally.bytes_read

    @property
    def pinned_bytes(self) -> int:
        """Bytes of buffers that cannot be reused, because somebody holds a tensor in them."""
        return 0

    def skip(self, names: Collection[str]) -> None:
        """``names`` are not needed. Has to be said before the first tensor is asked for; where it cannot be helped they come."""

    def close(self) -> None:
        """Stop reading; threads are joined, files closed and buffers let go. May be called twice."""
        self.closed = True

    def _end(self) -> NoReturn:
        """Nothing more comes: because all has, or because the source was closed."""
        if self.exhausted or not self.closed:
            self.exhausted = True
            self.close()
            raise StopIteration
        raise SourceError("the source is closed, no more tensors come; open it again")

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class CatalogSource(Source):
    """A stream of the tensors ``specs``, whose files had ``stamps`` when their headers were read."""

    def __init__(self, specs: Sequence[TensorSpec], stamps: Mapping[str, Stamp | None]) -> None:
        super().__init__()
        self._specs, self._stamps = list(specs), stamps
        self._items: Iterator[tuple[str, Tensor]] | None = None

    @property
    def names(self) -> Sequence[str]:  # type: ignore[override]
        """All names that will come."""
        return [spec.name for spec in self._specs]

    def skip(self, names: Collection[str]) -> None:
        """Do not read ``names``. Raises SourceError once a tensor was asked for."""
        if self._items is not None:
            raise SourceError("tensors can be left out only before the first one is asked for")
        left_out = set(names)
        self._specs = [spec for spec in self._specs if spec.name not in left_out]

    @abstractmethod
    def _stream(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors. What it opens, it closes when it is closed."""

    def __next__(self) -> tuple[str, Tensor]:
        if self.closed:
            self._end()
        try:
            if self._items is None:
                for path in dict.fromkeys(spec.file for spec in self._specs):
                    check_same(path, path, self._stamps.get(path))
                self._items = self._stream()
            return next(self._items)
        except StopIteration:
            self._end()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop reading."""
        with postponed():
            super().close()
            items, self._items = self._items, iter(())
            if (close := getattr(items, "close", None)) is not None:
                close()

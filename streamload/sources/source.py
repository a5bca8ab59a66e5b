"""What all sources have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


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
        self.closed = False

    @abstractmethod
    def __next__(self) -> tuple[str, Tensor]:
        """The next tensor. Raises StopIteration at the end, and when the source is closed."""

    @property
    def pinned_bytes(self) -> int:
        """Bytes of buffers that cannot be reused, because somebody holds a tensor in them."""
        return 0

    def close(self) -> None:
        """Stop reading; threads are joined, files closed and buffers let go. May be called twice."""
        self.closed = True

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""Every error that streamload raises on purpose.

    StreamloadError
    ├── CheckpointError   what is stored is damaged, incomplete or ambiguous
    ├── MappingError      a name rule is wrong
    ├── LoadError         the load cannot be done or broke off (carries ``.report``)
    ├── BorrowError       a borrowed tensor was kept past its step
    ├── BudgetError       the memory budget is too small
    └── SourceError       bytes could not be read

The first line of a message says what is wrong, where, what was expected and what was found; what to do comes last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamload.loading.report import LoadReport

__all__ = [
    "BorrowError",
    "BudgetError",
    "CheckpointError",
    "LoadError",
    "MappingError",
    "SourceError",
    "StreamloadError",
]


class StreamloadError(Exception):
    """Base of all errors below."""


class CheckpointError(StreamloadError):
    """The checkpoint is damaged, incomplete or ambiguous; found before any weight is used.

    ``path`` and ``tensor`` say where, when that is known.
    """

    def __init__(self, message: str, *, path: str | None = None, tensor: str | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.tensor = tensor


class MappingError(StreamloadError):
    """Two names land in one place, or a rule cannot do what it says."""


class LoadError(StreamloadError):
    """The load was refused or broke off. ``report`` is what was known then."""

    def __init__(self, message: str, *, report: LoadReport | None = None) -> None:
        super().__init__(message)
        self.report = report


class BorrowError(StreamloadError):
    """A borrowed tensor was kept past the source's next step."""


class BudgetError(StreamloadError):
    """The memory budget, or the host, has no room for what was asked."""


class SourceError(StreamloadError):
    """Bytes could not be read: the file shrank, vanished, or the device failed.

    ``path`` and ``offset`` (in bytes from the start of the file) say where.
    """

    def __init__(self, message: str, *, path: str | None = None, offset: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.offset = offset

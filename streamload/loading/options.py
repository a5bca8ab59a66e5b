"""The options of ``plan`` and ``load``, checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from streamload.errors import LoadError
from streamload.loading.run import Progress
from streamload.sources.dtypes import dtype_code
from streamload.sources.stream import BACKENDS


@dataclass(frozen=True)
class Options:
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
    share: bool

    @property
    def is_direct(self) -> bool:
        """Whether the bytes are read straight into place."""
        return self.backend in ("auto", "direct")

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise LoadError(f"backend={self.backend!r}: expected one of {', '.join(BACKENDS)}")
        if self.share and self.backend != "mmap":
            raise LoadError(
                f"share=True lets parameters take over mapped pages, so it needs backend='mmap', not {self.backend!r}"
            )
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


def check_device(device: torch.device | None) -> None:
    """Raise LoadError when ``device`` cannot be used, before anything is changed."""
    if device is not None and device.type != "cpu":
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:  # torch built without it; no driver
            raise LoadError(f"device {str(device)!r} cannot be used here: {str(error).splitlines()[0]}") from error

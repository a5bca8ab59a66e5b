"""What a load did, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from streamload.loading.keys import Keys


@dataclass(repr=False)
class LoadReport(Keys):
    """The result of ``load``; unpacks as ``missing, unexpected = load(...)``."""

    bytes_read: int = 0
    """Bytes taken from files; direct reads take whole blocks, so this can exceed ``bytes_wanted``."""
    bytes_wanted: int = 0
    """Bytes of the tensors, or parts of tensors, that were asked for."""
    seconds: float = 0.0
    peak_host_bytes: int = 0
    """Most anonymous host memory at once: the targets, and whatever the process took beyond them during the load."""
    clones: int = 0
    """Tensors that streamload copied in order to keep them."""
    clone_bytes: int = 0

    def __iter__(self) -> Iterator[list[str]]:
        return iter((self.missing_keys, self.unexpected_keys))

    def _amounts(self) -> list[str]:
        read = f"{self.bytes_read:,} of {self.bytes_wanted:,} bytes read in {self.seconds:.2f} s"
        return [read, f"peak {self.peak_host_bytes:,} bytes", f"{self.clones} clones"]

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return self.keys_to_dict() | {
            "bytes_read": self.bytes_read,
            "bytes_wanted": self.bytes_wanted,
            "seconds": self.seconds,
            "peak_host_bytes": self.peak_host_bytes,
            "clones": self.clones,
            "clone_bytes": self.clone_bytes,
        }

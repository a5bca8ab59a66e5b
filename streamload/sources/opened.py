"""Tensors through ``safetensors.safe_open``: the library's own reading, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import groupby
from typing import Any, Literal

from torch import Tensor

from streamload.checkpoint import TensorSpec
from streamload.checkpoint.spec import Stamp
from streamload.errors import SourceError
from streamload.sources.source import CatalogSource, Tally


class SafetensorsSource(CatalogSource):
    """Tensors of safetensors files, each in memory of its own (``pread``), or over a mapping of its whole file (``mmap``).

    With ``pread`` a tensor takes memory of its own for as long as it is held; a loop holds up to two. With ``mmap`` none is
    copied, but as long as one tensor is held the pages of its whole file that were touched stay resident.
    """

    def __init__(
        self, specs: Sequence[TensorSpec], stamps: Mapping[str, Stamp | None], how: Literal["mmap", "pread"]
    ) -> None:
        super().__init__(specs, stamps)
        self._how = how

    def _stream(self) -> Iterator[tuple[str, Tensor]]:
        return _opened(self._specs, self._how, self.tally)


def _opened(specs: Sequence[TensorSpec], how: str, tally: Tally) -> Iterator[tuple[str, Tensor]]:
    for path, members in groupby(specs, key=lambda spec: spec.file):
        with closing(_File(path, how)) as file:
            for spec in members:
                tally.bytes_read += spec.nbytes
                yield spec.name, file.tensor(spec)


class _File:
    def __init__(self, path: str, how: str) -> None:
        from safetensors import SafetensorError, safe_open

        self._error = SafetensorError
        try:
            self._file: Any = safe_open(path, framework="pt", backend=how)
        except (SafetensorError, OSError) as error:
            raise SourceError(f"{path}: safetensors cannot open it: {error}", path=path) from error

    def tensor(self, spec: TensorSpec) -> Tensor:
        try:
            tensor: Tensor = self._file.get_tensor(spec.name)
        except (self._error, OSError, KeyError, AttributeError, RuntimeError) as error:
            raise SourceError(
                f"{spec.file}: safetensors cannot give {spec.name!r} ({spec.dtype} {list(spec.shape)}): "
                f"{type(error).__name__}: {error}; backend='direct' reads it without that library",
                path=spec.file,
            ) from error
        return tensor

    def close(self) -> None:
        self._file = None

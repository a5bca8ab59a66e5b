"""Read the catalog of a file that ``torch.save`` wrote (zip format), without torch and without running anything in it.

Such a file is a zip archive of uncompressed records: ``data.pkl`` describes the tensors (see torch_pickle), ``data/0``,
``data/1``, ... hold their bytes. The tensors can then be read like those of any other file, piece by piece.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from math import prod
from typing import IO

from streamload.checkpoint.dtypes import BITS
from streamload.checkpoint.header import not_weights
from streamload.checkpoint.spec import TensorSpec
from streamload.checkpoint.torch_pickle import View, read_pickle
from streamload.errors import CheckpointError

#: What zipfile raises for an archive with wrong bytes in it.
_DAMAGE = (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError, zlib.error)

_COMPRESSED = "the archive is compressed, but torch.save stores records as they are"


def read_torch_zip(path: str) -> tuple[list[TensorSpec], list[str]]:
    """The tensors of the file ``path`` in file order, and notes on what else it holds.

    Only the directory and the pickle are read. Raises CheckpointError when the file is no zip archive, is damaged, or
    names a class that is not part of a plain state_dict.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(512)
            if reason := not_weights(head, path):
                raise CheckpointError(reason, path=path)
            if not head.startswith(b"PK\x03\x04"):
                raise CheckpointError(f"{path}: {_not_zip(head)}", path=path)
            with zipfile.ZipFile(file) as archive:
                return _read_archive(file, archive, path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}", path=path) from error
    except _DAMAGE as error:
        raise CheckpointError(
            f"{path}: the zip archive is damaged or cut short ({error}); was the download interrupted?", path=path
        ) from error


def _not_zip(head: bytes) -> str:
    if not head:
        return "the file is empty, expected a zip archive as torch.save writes it"
    if head[:1] == b"\x80" or b"ustar" in head:
        return (
            "this is torch's old format from before 1.6, which cannot be read in pieces; convert it once with "
            "torch.save(torch.load(path, weights_only=True), path)"
        )
    return f"expected a zip archive as torch.save writes it, found a file that starts with {head[:8]!r}"


def _read_archive(file: IO[bytes], archive: zipfile.ZipFile, path: str) -> tuple[list[TensorSpec], list[str]]:
    pickles = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise CheckpointError(
            f"{path}: expected one data.pkl in the archive, found {len(pickles)}; it was not written by torch.save",
            path=path,
        )
    root = pickles[0].filename.removesuffix("data.pkl")
    _check_order(archive, root, path)
    if pickles[0].compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(f"{path}: {_COMPRESSED}", path=path)
    pickled = archive.read(pickles[0])
    tensors, notes = read_pickle(pickled, path)
    records = _Records(file, archive, root, path)
    specs = [records.spec(name, view) for name, view in tensors.items()]
    return sorted(specs, key=lambda spec: spec.offset), notes


def _check_order(archive: zipfile.ZipFile, root: str, path: str) -> None:
    try:
        info = archive.getinfo(root + "byteorder")
    except KeyError:
        return  # torch wrote none before 2.1
    if info.file_size > 16 or archive.read(info) != b"little":
        raise CheckpointError(f"{path}: not written on a little-endian machine; save it again on one", path=path)


class _Records:
    """Finds the bytes of storages in the archive."""

    def __init__(self, file: IO[bytes], archive: zipfile.ZipFile, root: str, path: str) -> None:
        self._file, self._archive, self._root, self._path = file, archive, root, path
        self._end = os.fstat(file.fileno()).st_size
        self._found: dict[str, tuple[int, int]] = {}

    def spec(self, name: str, view: View) -> TensorSpec:
        if view.storage.key not in self._found:
            self._found[view.storage.key] = self._find(view.storage.key, name)
        start, size = self._found[view.storage.key]
        if view.pending:
            raise self._error(
                f"tensor {name!r} was saved with torch's {' and '.join(view.pending)} bit set, so its bytes are not its "
                "values; save tensor.resolve_conj().resolve_neg() instead",
                name,
            )
        strides = None if _row_major(view) else view.strides
        shape, width = view.shape, max(1, BITS[view.dtype] // 8)
        if view.dtype == "F4":  # torch counts bytes, each of which holds two elements
            if strides or not shape:
                raise self._error(
                    f"tensor {name!r} is an F4 view that cannot be read on its own; save a contiguous copy", name
                )
            shape = (*shape[:-1], shape[-1] * 2)
        nbytes = prod(view.shape) * width
        spec = TensorSpec(name, view.dtype, shape, self._path, start + view.start * width, nbytes, strides)
        if view.start * width + spec.span > size:
            raise self._error(f"tensor {name!r} reaches past its storage of {size:,} bytes; the file is damaged", name)
        return spec

    def _find(self, key: str, tensor: str) -> tuple[int, int]:
        """Offset in the file and length of one storage's bytes."""
        try:
            info = self._archive.getinfo(f"{self._root}data/{key}")
        except KeyError:
            raise self._error(f"tensor {tensor!r} needs the record data/{key}, which is missing", tensor) from None
        if info.compress_type != zipfile.ZIP_STORED:
            raise self._error(_COMPRESSED, tensor)
        self._file.seek(info.header_offset)
        local = self._file.read(30)  # the name and the extra field behind it differ from those in the directory
        if len(local) < 30 or not local.startswith(b"PK\x03\x04"):
            raise self._error(f"the record of tensor {tensor!r} is not where the directory says", tensor)
        start = info.header_offset + 30 + sum(int.from_bytes(local[at : at + 2], "little") for at in (26, 28))
        if start + info.file_size > self._end:
            raise self._error(
                f"the record of tensor {tensor!r} should end at byte {start + info.file_size:,}, but the file has "
                f"{self._end:,}; it is damaged",
                tensor,
            )
        return start, info.file_size

    def _error(self, problem: str, tensor: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {problem}", path=self._path, tensor=tensor)


def _row_major(view: View) -> bool:
    expected = 1
    for size, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if size != 1 and stride != expected and 0 not in view.shape:
            return False
        expected *= size
    return True

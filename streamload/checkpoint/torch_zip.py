"""Read the catalog of a file that ``torch.save`` wrote (zip format), without torch and without running anything in it.

Such a file is a zip archive of uncompressed records: ``data.pkl`` describes the tensors, ``data/0``, ``data/1``, ... hold
their bytes. The pickle is read as ``torch.load(weights_only=True)`` would read it, only stricter: every class and function it
names is either one of the few below, which here build descriptions, or an error. The tensors can then be read like those
of any other file, piece by piece.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import re
import zipfile
import zlib
from collections import OrderedDict
from math import prod
from typing import IO, Any, NamedTuple

from streamload.checkpoint.dtypes import BITS, FROM_TORCH
from streamload.checkpoint.header import not_weights
from streamload.checkpoint.spec import TensorSpec
from streamload.errors import CheckpointError

_STORAGES = {
    "FloatStorage": "F32",
    "DoubleStorage": "F64",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
    "ComplexDoubleStorage": "C128",
    "UntypedStorage": "U8",
}

#: What zipfile raises for an archive with wrong bytes in it.
_DAMAGE = (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError, zlib.error)

_COMPRESSED = "the archive is compressed, but torch.save stores records as they are"

#: Names of torch's dtypes and storages.
_KIND = re.compile(r"\w+Storage|[a-z]+\d+\w*")

#: Where training scripts put the weights when they save more than those.
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")


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
    try:
        _check_memo(pickled)
        content = _Describe(pickled, path).load()
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # a damaged pickle can raise anything; all of it means the same to the reader
        raise CheckpointError(f"{path}: data.pkl is damaged: {type(error).__name__}: {error}", path=path) from error
    tensors, notes = _state_dict(*_unwrap(content, path), path)
    records = _Records(file, archive, root, path)
    specs = [records.spec(name, view) for name, view in tensors.items()]
    return sorted(specs, key=lambda spec: spec.offset), notes


def _check_order(archive: zipfile.ZipFile, root: str, path: str) -> None:
    if root + "byteorder" in archive.namelist() and archive.read(root + "byteorder") != b"little":
        raise CheckpointError(
            f"{path}: written on a big-endian machine; save it again on a little-endian one", path=path
        )


def _check_memo(pickled: bytes) -> None:
    """Refuse numbers in the pickle's memo that no honest one has: Python makes room for all up to the largest."""
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in ("LONG_BINPUT", "PUT") and argument > len(pickled):  # type: ignore[operator]
            raise pickle.UnpicklingError(f"memo number {argument:,} in a pickle of {len(pickled):,} bytes")


class _Storage(NamedTuple):
    key: str
    dtype: str
    numel: int


class _View(NamedTuple):
    """A tensor of the pickle: a view into a storage, counted in elements of ``dtype``."""

    storage: _Storage
    dtype: str
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    pending: tuple[str, ...] = ()
    """What torch has yet to do to the values: ``"conj"``, ``"neg"``."""


class _Describe(pickle.Unpickler):
    """Unpickles to descriptions. Nothing that the file names is imported or called."""

    def __init__(self, pickled: bytes, path: str) -> None:
        super().__init__(io.BytesIO(pickled))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        found = _ALLOWED.get((module, name))
        if found is None and module in ("torch", "torch.storage"):
            found = _STORAGES.get(name) or FROM_TORCH.get(name)
        if found is None:
            raise CheckpointError(
                f"{self._path}: the pickle needs {module}.{name}, {_why_not(module, name)}", path=self._path
            )
        return found

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _device, numel = pid
        if kind != "storage" or type(key) is not str:
            raise pickle.UnpicklingError(f"unknown persistent id {kind!r}, {key!r}")
        return _Storage(key, dtype, numel)


def _why_not(module: str, name: str) -> str:
    if (module == "torch" and _KIND.fullmatch(name)) or (module == "torch._utils" and name.startswith("_rebuild_")):
        return "a dtype or a kind of tensor that cannot be read in pieces; convert it and save it again"
    return (
        "which is not part of a plain state_dict; refused, since unpickling it could run code (load it where you trust "
        "it and save only its state_dict)"
    )


def _tensor(
    storage: _Storage,
    start: int,
    shape: Any,
    strides: Any,
    grad: Any = None,
    hooks: Any = None,
    metadata: Any = None,
) -> _View:
    return _tensor_v3(storage, start, shape, strides, grad, hooks, storage.dtype, metadata)


def _tensor_v3(
    storage: _Storage,
    start: int,
    shape: Any,
    strides: Any,
    _grad: Any,
    _hooks: Any,
    dtype: str,
    metadata: Any = None,
) -> _View:
    numbers = (start, *shape, *strides)
    if not isinstance(storage, _Storage) or dtype not in BITS or len(shape) != len(strides):
        raise pickle.UnpicklingError("a tensor without storage, dtype or strides")
    if any(type(number) is not int or number < 0 for number in numbers):
        raise pickle.UnpicklingError(f"a tensor with sizes and strides {numbers}")
    pending = tuple(str(key) for key, value in (metadata or {}).items() if value)
    if 0 in shape:
        start = 0  # torch lets an empty slice begin past the end of its storage
    return _View(storage, dtype, start, tuple(shape), tuple(strides), pending)


def _same(value: Any, *_: Any) -> Any:
    return value


def _from_type(rebuild: Any, _type: Any, args: Any, _state: Any) -> Any:
    return rebuild(*args)


class _Opaque:
    """Stands for the classes torch.Tensor and Parameter, which only name the type of a tensor."""


_ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _same,
    ("torch._utils", "_rebuild_parameter_with_state"): _same,
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
    ("torch", "Tensor"): _Opaque,
    ("torch", "Size"): tuple,
    ("torch", "device"): lambda *args: args,
    ("torch.nn.parameter", "Parameter"): _Opaque,
}


def _unwrap(content: Any, path: str) -> tuple[Any, list[str]]:
    """The state_dict in ``content``, which may hold it beside other things, and notes on where it was."""
    notes: list[str] = []
    for _ in range(len(_WRAPPERS)):  # a pickle can also hold a dict inside itself
        inner = [key for key in _WRAPPERS if isinstance(content, dict) and _holds_tensors(content.get(key))]
        if len(inner) > 1:
            raise CheckpointError(
                f"{path}: holds weights in several entries ({', '.join(map(repr, inner))}); save only one of them",
                path=path,
            )
        if not inner:
            break
        beside = ", ".join(repr(key) for key in list(content)[:8] if key != inner[0])
        notes.append(
            f"{path}: weights taken from its entry {inner[0]!r}" + (f"; passed over: {beside}" if beside else "")
        )
        content = content[inner[0]]
    return content, notes


def _holds_tensors(value: Any, depth: int = 0) -> bool:
    """Whether ``value`` is a state_dict, or wraps one."""
    if not isinstance(value, dict):
        return False
    if any(isinstance(each, _View) for each in value.values()):
        return True
    return depth < len(_WRAPPERS) and any(_holds_tensors(value.get(key), depth + 1) for key in _WRAPPERS)


def _state_dict(content: Any, notes: list[str], path: str) -> tuple[dict[str, _View], list[str]]:
    """The tensors of an unpickled state_dict by name, and notes on what lies beside them."""
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds {_describe(content)}, expected a state_dict", path=path)
    tensors = {key: value for key, value in content.items() if isinstance(value, _View)}
    if content and not tensors:
        keys = ", ".join(repr(key) for key in list(content)[:8])
        raise CheckpointError(
            f"{path}: holds no tensors at its top level (keys: {keys}); save only the state_dict", path=path
        )
    for key in tensors:
        if not isinstance(key, str):
            raise CheckpointError(f"{path}: a tensor is stored under the key {key!r}, expected a name", path=path)
    others = [key for key in content if key not in tensors]
    notes += [f"{path}: entry {key!r} is {_describe(content[key])}, no tensor; passed over" for key in others]
    return tensors, notes


def _describe(value: Any) -> str:
    if isinstance(value, _View):
        return "a single tensor"
    return f"a {type(value).__name__}" if isinstance(value, (dict, list, tuple)) else repr(value)[:40]


class _Records:
    """Finds the bytes of storages in the archive."""

    def __init__(self, file: IO[bytes], archive: zipfile.ZipFile, root: str, path: str) -> None:
        self._file, self._archive, self._root, self._path = file, archive, root, path
        self._end = os.fstat(file.fileno()).st_size
        self._found: dict[str, tuple[int, int]] = {}

    def spec(self, name: str, view: _View) -> TensorSpec:
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


def _row_major(view: _View) -> bool:
    expected = 1
    for size, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if size != 1 and stride != expected and 0 not in view.shape:
            return False
        expected *= size
    return True

"""What the pickle in a torch file says: which tensors there are, as views into storages. Nothing in it is run.

It is read as ``torch.load(weights_only=True)`` would read it, only stricter: every class and function that it names is
either one of the few below, which here build descriptions, or an error.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from streamload.checkpoint.dtypes import BITS, FROM_TORCH
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

#: Names of torch's dtypes and storages.
_KIND = re.compile(r"\w+Storage|[a-z]+\d+\w*")

#: Parts of a key; honest ones are strings and numbers.
_LARGEST_KEY = 1000
_HASHING = frozenset({"SETITEM", "SETITEMS", "DICT", "ADDITEMS", "FROZENSET"})
_GROWING = frozenset({"SETITEM", "SETITEMS", "ADDITEMS", "APPEND", "APPENDS"})

#: Where training scripts put the weights when they save more than those.
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")


class Storage(NamedTuple):
    """A piece of memory that tensors are views of."""

    key: str
    """Its bytes are the record ``data/<key>``."""
    dtype: str
    numel: int


class View(NamedTuple):
    """A tensor of the pickle: a view into a storage, counted in elements of ``dtype``."""

    storage: Storage
    dtype: str
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    pending: tuple[str, ...] = ()
    """What torch has yet to do to the values: ``"conj"``, ``"neg"``."""


def read_pickle(pickled: bytes, path: str) -> tuple[dict[str, View], list[str]]:
    """The tensors of the state_dict in ``pickled`` by name, and notes on what else it holds.

    Raises CheckpointError when it is damaged, holds no state_dict, or names a class that is not part of a plain one.
    """
    try:
        _check_opcodes(pickled)
        content = _Describe(pickled, path).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise anything; all of it means the same to the reader
        raise CheckpointError(f"{path}: data.pkl is damaged: {type(error).__name__}: {error}", path=path) from error
    return _state_dict(*_unwrap(content, path), path)


def _check_opcodes(pickled: bytes) -> None:
    """Refuse what no honest pickle has and what would take the reader down.

    Python makes room for all numbers of the memo up to the largest. And it hashes every key of a dict: of a tuple of
    tuples of tuples that takes for ever, or more stack than there is. So the size of what may become a key is followed:
    a few cells for each object, the sum of all that it was made of.
    """
    stack: list[list[int]] = []
    marks: list[int] = []
    memo: dict[int, list[int]] = {}
    for opcode, argument, _ in pickletools.genops(pickled):
        name, taken, given = opcode.name, opcode.stack_before, opcode.stack_after
        if name in ("LONG_BINPUT", "PUT") and argument > len(pickled):  # type: ignore[operator]
            raise pickle.UnpicklingError(f"memo number {argument:,} in a pickle of {len(pickled):,} bytes")
        if name == "MARK":
            marks.append(len(stack))
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]  # type: ignore[index]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])  # type: ignore[index]
        else:
            below = taken.index(pickletools.markobject) if pickletools.markobject in taken else len(taken)
            first = marks.pop() if below < len(taken) else len(stack)
            start = max(0, first - below)
            used = stack[start:]
            del stack[start:]
            if name in _HASHING and max((key[0] for key in _keys(name, used)), default=0) > _LARGEST_KEY:
                raise pickle.UnpicklingError("a key that is made of too many parts")
            size = min(1 + sum(each[0] for each in used), _LARGEST_KEY + 1)
            if name in _GROWING:
                used[0][0] = size  # the object stays the same, also where the memo holds it
                stack.append(used[0])
            else:
                stack += [[size] for _ in given]


def _keys(name: str, used: list[list[int]]) -> list[list[int]]:
    """Those of the objects that an opcode ``used`` which it hashes."""
    if name in ("SETITEM", "SETITEMS"):
        return used[1::2]
    return used[::2] if name == "DICT" else used


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

    def persistent_load(self, pid: Any) -> Storage:
        kind, dtype, key, _device, numel = pid
        if kind != "storage" or type(key) is not str:
            raise pickle.UnpicklingError(f"unknown persistent id {kind!r}, {key!r}")
        return Storage(key, dtype, numel)


def _why_not(module: str, name: str) -> str:
    if (module == "torch" and _KIND.fullmatch(name)) or (module == "torch._utils" and name.startswith("_rebuild_")):
        return "a dtype or a kind of tensor that cannot be read in pieces; convert it and save it again"
    return (
        "which is not part of a plain state_dict; refused, since unpickling it could run code (load it where you trust "
        "it and save only its state_dict)"
    )


def _tensor(
    storage: Storage,
    start: int,
    shape: Any,
    strides: Any,
    grad: Any = None,
    hooks: Any = None,
    metadata: Any = None,
) -> View:
    return _tensor_v3(storage, start, shape, strides, grad, hooks, storage.dtype, metadata)


def _tensor_v3(
    storage: Storage,
    start: int,
    shape: Any,
    strides: Any,
    _grad: Any,
    _hooks: Any,
    dtype: str,
    metadata: Any = None,
) -> View:
    numbers = (start, *shape, *strides)
    if (
        not isinstance(storage, Storage)
        or not isinstance(dtype, str)
        or dtype not in BITS
        or len(shape) != len(strides)
    ):
        raise pickle.UnpicklingError("a tensor without storage, dtype or strides")
    if any(type(number) is not int or number < 0 for number in numbers):
        raise pickle.UnpicklingError(f"a tensor with sizes and strides {numbers}")
    pending = tuple(str(key) for key, value in (metadata or {}).items() if value)
    if 0 in shape:
        start = 0  # torch lets an empty slice begin past the end of its storage
    return View(storage, dtype, start, tuple(shape), tuple(strides), pending)


def _same(value: Any, *_: Any) -> Any:
    return value


def _from_type(rebuild: Any, _type: Any, args: Any, _state: Any) -> Any:
    return rebuild(*args)


class _Call:
    """A function that a pickle may call, but not alter: a pickle can set attributes of whatever it holds."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setstate__(self, _: object) -> None:
        raise pickle.UnpicklingError("it tries to alter a function")


class _Dict(dict[Any, Any]):
    """Stands for OrderedDict. What is stored as its attributes (``_metadata``) is of no use here."""

    def __setstate__(self, _: object) -> None:
        pass


_ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _Call(_Dict),
    ("torch._utils", "_rebuild_tensor"): _Call(_tensor),
    ("torch._utils", "_rebuild_tensor_v2"): _Call(_tensor),
    ("torch._utils", "_rebuild_tensor_v3"): _Call(_tensor_v3),
    ("torch._utils", "_rebuild_parameter"): _Call(_same),
    ("torch._utils", "_rebuild_parameter_with_state"): _Call(_same),
    ("torch._tensor", "_rebuild_from_type_v2"): _Call(_from_type),
    ("torch", "Tensor"): "torch.Tensor",
    ("torch", "Size"): _Call(tuple),
    ("torch", "device"): _Call(lambda *args: args),
    ("torch.nn.parameter", "Parameter"): "torch.nn.Parameter",
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
    if any(isinstance(each, View) for each in value.values()):
        return True
    return depth < len(_WRAPPERS) and any(_holds_tensors(value.get(key), depth + 1) for key in _WRAPPERS)


def _state_dict(content: Any, notes: list[str], path: str) -> tuple[dict[str, View], list[str]]:
    """The tensors of an unpickled state_dict by name, and notes on what lies beside them."""
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds {_describe(content)}, expected a state_dict", path=path)
    tensors = {key: value for key, value in content.items() if isinstance(value, View)}
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
    if isinstance(value, View):
        return "a single tensor"
    return repr(value)[:40] if isinstance(value, (str, int, float, type(None))) else f"a {type(value).__name__}"

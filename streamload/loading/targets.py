"""Where weights can go: the parameters and buffers of a module, or a table of names, dtypes and shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from streamload.checkpoint.dtypes import BITS, FLOATS
from streamload.errors import LoadError
from streamload.loading.adapting import ADAPTER, Adapter
from streamload.loading.mark import MARK
from streamload.sources.dtypes import CODES, dtype_code

_COMPLEX = frozenset({"C64", "C128"})

#: Modules lie no deeper than this unless one contains itself.
_DEEPEST = 500

_BARE = frozenset(nn.Module().__dict__)

#: Where classes written for vLLM keep their mapper.
MAPPER = "hf_to_vllm_mapper"

#: The method with which a module loads a stream of (name, tensor) itself.
LOADER = "load_weights"

#: Attribute of classes whose ``load_weights`` is streamload's own, so that it need not be called.
GENERIC = "_streamload_generic"

#: Modules, by id, whose own ``load_weights`` is running: what it loads through streamload is not handed to it again.
RUNNING: ContextVar[frozenset[int]] = ContextVar("modules that are loading themselves", default=frozenset())


class Target(NamedTuple):
    """One parameter or buffer that a load fills."""

    name: str
    dtype: str
    """Code of the safetensors format."""
    shape: tuple[int, ...]
    address: int = 0
    """Where bytes can be written as they are stored; 0 unless it is contiguous host memory of the planned dtype."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, or will take."""
        return prod(self.shape) * BITS[self.dtype] // 8


@dataclass
class Targets:
    """All targets of a load."""

    specs: dict[str, Target] = field(default_factory=dict)
    """Name -> target; of tied names only the first."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Further name of a tied target -> its first name."""
    recomputed: frozenset[str] = frozenset()
    """Non-persistent buffers: the module computes them itself."""
    stranded: list[str] = field(default_factory=list)
    """Those of them that are on meta, where nobody will compute them."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Name -> the module's tensor; empty for a table."""
    on_device: set[str] = field(default_factory=set)
    """Names of those that are on an accelerator, so that they take no host memory."""
    module: nn.Module | None = None
    marked: list[tuple[str, nn.Module]] = field(default_factory=list)
    """Modules below it that an earlier load left unfinished, with their dotted prefixes."""
    mappers: list[tuple[str, Any]] = field(default_factory=list)
    """Mappers of the modules below it (``hf_to_vllm_mapper``), with their dotted prefixes."""
    loaders: dict[str, nn.Module] = field(default_factory=dict)
    """Modules with a ``load_weights`` of their own, by dotted prefix; of nested ones the outermost."""
    writers: dict[str, Callable[..., Any]] = field(default_factory=dict)
    """Parameters with a ``weight_loader`` of their own."""
    adapters: dict[str, Adapter] = field(default_factory=dict)
    """Of modules that were made of others by leaving heads out, by dotted prefix."""
    holders: list[tuple[str, nn.Module]] = field(default_factory=list)
    """Modules with attributes of their own, with their dotted prefixes."""
    touched: bool = False
    """Whether carrying out the load has begun to change them."""

    def at_home(self, name: str) -> bool:
        """Whether there is a parameter or a buffer of that name."""
        return name in self.specs or name in self.aliases or name in self.recomputed

    def first(self, name: str) -> Target:
        """The target that ``name``, which may be an alias, stands for."""
        return self.specs[self.aliases.get(name, name)]

    def loader_of(self, name: str) -> str | None:
        """The dotted prefix of the module that loads ``name`` itself, if there is one."""
        if not self.loaders:
            return None
        if "" in self.loaders:
            return ""
        parts = name.split(".")
        return next(
            (dotted for end in range(1, len(parts)) if (dotted := ".".join(parts[:end]) + ".") in self.loaders), None
        )

    def known(self) -> list[str]:
        """All names, tied ones included."""
        return [*self.specs, *self.aliases]


def table_targets(table: Mapping[str, tuple[torch.dtype | str, Sequence[int]]], dtype: str | None) -> Targets:
    """Targets from ``{name: (dtype, shape)}``. ``dtype`` replaces every plain float dtype."""
    targets = Targets()
    for name, entry in table.items():
        own, shape = _entry(name, entry)
        code = dtype_code(own)
        targets.specs[name] = Target(name, dtype if dtype is not None and code in FLOATS else code, tuple(shape))
    return targets


def _entry(name: object, entry: object) -> tuple[Any, Sequence[int]]:
    """(dtype, shape), checked."""
    if isinstance(name, str) and isinstance(entry, Sequence) and len(entry) == 2:
        shape = entry[1]
        if isinstance(shape, Sequence) and all(type(size) is int and size >= 0 for size in shape):
            return entry[0], shape
    raise LoadError(f"model: {name!r}: expected (dtype, shape) for a name, found {entry!r:.80}")


def module_targets(module: nn.Module, dtype: str | None) -> Targets:
    """Targets of ``module``: parameters and persistent buffers. ``dtype`` replaces every plain float dtype.

    Names that share one tensor, or one piece of memory, are tied: the first is the target, the others its aliases.
    """
    targets = Targets(module=module)
    running = RUNNING.get()
    recomputed: set[str] = set()
    add = _adder(targets, dtype)
    with_mapper: dict[type, bool] = {}
    with_loader: dict[type, bool] = {}
    for dotted, owner in _owners(module):
        if own_attributes(owner):
            targets.holders.append((dotted, owner))
        if ADAPTER in owner.__dict__ and targets.loader_of(dotted) is None:
            targets.adapters[dotted] = owner.__dict__[ADAPTER]
        if MARK in owner.__dict__:
            targets.marked.append((dotted, owner))
        if (kind := type(owner)) not in with_mapper:
            with_mapper[kind] = hasattr(kind, MAPPER)
            with_loader[kind] = hasattr(kind, LOADER) and not getattr(kind, GENERIC, False)
        if with_loader[kind] and id(owner) not in running and targets.loader_of(dotted) is None:
            targets.loaders[dotted] = owner
        if (with_mapper[kind] or MAPPER in owner.__dict__) and (mapper := getattr(owner, MAPPER)) is not None:
            targets.mappers.append((dotted, mapper))
        for key, parameter in owner._parameters.items():
            if parameter is not None:
                add(dotted + key, parameter)
                if (writer := getattr(parameter, "weight_loader", None)) is not None and targets.loader_of(
                    dotted
                ) is None:
                    targets.writers[dotted + key] = writer
        for key, tensor in owner._buffers.items():
            if tensor is None:
                continue
            if key not in owner._non_persistent_buffers_set:
                add(dotted + key, tensor)
            else:
                recomputed.add(dotted + key)
                if tensor.is_meta:
                    targets.stranded.append(dotted + key)
    targets.recomputed = frozenset(recomputed)
    for dotted, adapter in targets.adapters.items():
        for name in adapter.exact:
            own = targets.tensors[dotted + name]
            exact = Target(dotted + name, dtype_code(own.dtype), tuple(own.shape))
            targets.specs[dotted + name] = exact._replace(address=own.data_ptr() if own.is_cpu and is_solid(own) else 0)
    return targets


def own_attributes(module: nn.Module) -> list[str]:
    """The attributes that a bare module does not have, parameters, buffers and children aside."""
    return [key for key in module.__dict__ if key not in _BARE]


def _owners(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module below ``module`` with its dotted prefix; one that is used twice comes twice, as its names do."""
    waiting = [("", module, 0)]
    while waiting:
        dotted, owner, depth = waiting.pop()
        yield dotted, owner
        if owner._modules:
            if depth > _DEEPEST:
                raise LoadError(f"the modules contain themselves: {dotted[:120]}...")
            children = [
                (f"{dotted}{key}.", child, depth + 1) for key, child in owner._modules.items() if child is not None
            ]
            waiting += reversed(children)


def _adder(targets: Targets, dtype: str | None) -> Callable[[str, Tensor], None]:
    firsts: dict[int, str] = {}
    views: dict[tuple[Any, ...], str] = {}
    specs, tensors, codes, new = targets.specs, targets.tensors, CODES, tuple.__new__

    def add(name: str, tensor: Tensor) -> None:
        try:
            pointer = tensor.data_ptr()
        except (RuntimeError, ValueError) as error:
            raise _no_memory(name, tensor) from error
        first = firsts.setdefault(pointer or -id(tensor), name)
        if first is not name and not _is_one(tensor, tensors[first]):  # another view that begins at the same place
            first = views.setdefault((pointer, tensor.shape, tensor.stride(), tensor.dtype), name)
        if first is not name:
            targets.aliases[name] = first
            return
        code = wanted = codes.get(tensor.dtype)
        if code is None:
            raise LoadError(f"{name} has dtype {tensor.dtype}, which no checkpoint stores; it cannot be loaded")
        shape: tuple[int, ...] = tensor.shape
        if code == "F4":  # torch counts bytes that hold two elements
            shape = (*shape[:-1], shape[-1] * 2)
        if dtype is not None and code in FLOATS:
            wanted = dtype
        if tensor.is_neg() or (code in _COMPLEX and tensor.is_conj()):
            raise LoadError(
                f"{name} is a view that negates or conjugates what its memory holds, so stored bytes are not its values; "
                "resolve it first (tensor.resolve_conj().resolve_neg())"
            )
        dense = tensor.is_contiguous()
        if not dense and _overlaps_itself(tensor):
            raise LoadError(
                f"{name} has elements that share memory (shape {list(shape)}, strides {list(tensor.stride())})"
            )
        address = pointer if dense and wanted == code and tensor.is_cpu else 0
        if not address and takes_device_memory(tensor):
            targets.on_device.add(name)
        specs[name] = new(Target, (name, wanted, shape, address))
        tensors[name] = tensor

    return add


def takes_device_memory(tensor: Tensor) -> bool:
    """Whether the memory of ``tensor`` is that of an accelerator."""
    return not (tensor.is_cpu or tensor.is_meta)


def _no_memory(name: str, tensor: Tensor) -> LoadError:
    if is_lazy(tensor):
        return LoadError(f"{name} is a lazy parameter without a shape; run the module once before loading")
    return LoadError(f"{name} is a {type(tensor).__name__}, which has no memory of its own to load into")


def is_solid(tensor: Tensor) -> bool:
    """Whether its elements fill the memory from the first to the last, in whatever order."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return reach == tensor.numel()


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements may share memory, which is so when a stride is less than what lies within it."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach += (size - 1) * stride
    return False


def _is_one(tensor: Tensor, other: Tensor) -> bool:
    """Whether two names hold one tensor: the same object, or the same view of the same memory."""
    if tensor is other:
        return True
    same = tensor.shape == other.shape and tensor.stride() == other.stride() and tensor.dtype == other.dtype
    return same and tensor.device == other.device and not tensor.is_meta and tensor.numel() > 0

"""Where weights can go: the parameters and buffers of a module, or a table of names, dtypes and shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from streamload.checkpoint.dtypes import BITS, FLOATS, FROM_TORCH
from streamload.errors import LoadError

_CODES: dict[torch.dtype, str] = {getattr(torch, name): code for name, code in FROM_TORCH.items() if hasattr(torch, name)}
_DTYPES: dict[str, torch.dtype] = {code: dtype for dtype, code in _CODES.items()}


class Target(NamedTuple):
    """One parameter or buffer that a load fills."""

    name: str
    dtype: str
    """Code of the safetensors format."""
    shape: tuple[int, ...]
    nbytes: int


class Place(NamedTuple):
    """An attribute of a module that holds a parameter or buffer."""

    module: nn.Module
    key: str
    is_parameter: bool


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
    places: dict[str, list[tuple[str, Place]]] = field(default_factory=dict)
    """Name -> every attribute that holds the tensor, each with the name that leads there."""

    @property
    def nbytes(self) -> int:
        """Bytes of all targets."""
        return sum(target.nbytes for target in self.specs.values())

    def known(self) -> list[str]:
        """All names, tied ones included."""
        return [*self.specs, *self.aliases]


def dtype_code(dtype: torch.dtype | str) -> str:
    """The code for a torch dtype, its name (``"bfloat16"``, ``"torch.bfloat16"``), or a code (``"BF16"``)."""
    if isinstance(dtype, torch.dtype):
        if dtype in _CODES:
            return _CODES[dtype]
    elif dtype in BITS:
        return dtype
    elif (name := dtype.removeprefix("torch.")) in FROM_TORCH:
        return FROM_TORCH[name]
    raise LoadError(f"dtype {dtype!r} is not known; expected one of {', '.join(BITS)} or torch's names for them")


def torch_dtype(code: str) -> torch.dtype:
    """The torch dtype for ``code``. Raises LoadError when this torch has none."""
    if code not in _DTYPES:
        raise LoadError(f"torch {torch.__version__} has no dtype for {code}")
    return _DTYPES[code]


def table_targets(table: Mapping[str, tuple[torch.dtype | str, Sequence[int]]], dtype: str | None) -> Targets:
    """Targets from ``{name: (dtype, shape)}``. ``dtype`` replaces every plain float dtype."""
    targets = Targets()
    for name, (own, shape) in table.items():
        targets.specs[name] = _target(name, dtype_code(own), tuple(shape), dtype)
    return targets


def module_targets(module: nn.Module, dtype: str | None) -> Targets:
    """Targets of ``module``: parameters and persistent buffers. ``dtype`` replaces every plain float dtype.

    Names that share one tensor, or one piece of memory, are tied: the first is the target, the others its aliases.
    """
    targets = Targets()
    firsts: dict[object, str] = {}
    recomputed: set[str] = set()
    for prefix, owner in module.named_modules(remove_duplicate=False):
        dotted = prefix + "." if prefix else ""
        # Not named_parameters(): that hides the second names of tied tensors and of modules used twice.
        for key, tensor in owner._parameters.items():
            if tensor is not None:
                _add(targets, firsts, dotted + key, tensor, Place(owner, key, True), dtype)
        for key, tensor in owner._buffers.items():
            if tensor is None:
                continue
            if key in owner._non_persistent_buffers_set:
                recomputed.add(dotted + key)
                if tensor.is_meta:
                    targets.stranded.append(dotted + key)
            else:
                _add(targets, firsts, dotted + key, tensor, Place(owner, key, False), dtype)
    targets.recomputed = frozenset(recomputed)
    return targets


def _add(
    targets: Targets, firsts: dict[object, str], name: str, tensor: Tensor, place: Place, dtype: str | None
) -> None:
    if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
        raise LoadError(f"{name} is a lazy parameter without a shape; run the module once before loading")
    first = firsts.setdefault(_identity(tensor), name)
    if first != name and first in targets.tensors:
        targets.aliases[name] = first
        targets.places[first].append((name, place))
        return
    code = _CODES.get(tensor.dtype)
    if code is None:
        raise LoadError(f"{name} has dtype {tensor.dtype}, which no checkpoint stores; loading into it is not supported")
    shape = tuple(tensor.shape)
    if code == "F4":  # torch counts bytes that hold two elements
        shape = (*shape[:-1], shape[-1] * 2)
    targets.specs[name] = _target(name, code, shape, dtype)
    targets.tensors[name] = tensor
    targets.places[name] = [(name, place)]


def _identity(tensor: Tensor) -> object:
    """Equal for tensors that are one: the same object, or the same view of the same memory."""
    if tensor.is_meta or not tensor.numel() or tensor.layout != torch.strided or tensor.device.type != "cpu":
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _target(name: str, own: str, shape: tuple[int, ...], wanted: str | None) -> Target:
    code = wanted if wanted is not None and own in FLOATS else own
    return Target(name, code, shape, prod(shape) * BITS[code] // 8)

"""Memory for targets: make room for those on meta, give a tied one its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

from streamload.errors import BudgetError, LoadError
from streamload.loading.targets import Targets, takes_device_memory
from streamload.sources.dtypes import torch_dtype


def make_room(targets: Targets, names: Iterable[str], device: torch.device | None, keep: Collection[str] = ()) -> None:
    """Give every target in ``names`` real memory of its planned dtype, without touching it.

    Targets on meta move to ``device`` (the CPU when that is ``None``); real ones only change where device or dtype differ.
    Ties, ``requires_grad``, the class and the attributes of a parameter are kept, and the values of those in ``keep``, which
    will be filled in part. Raises BudgetError when there is no memory.
    """
    wanted = [name for name in names if device is not None or not targets.specs[name].address]
    for number, name in enumerate(wanted, 1):
        old, dtype = targets.tensors[name], torch_dtype(targets.specs[name].dtype)
        where = device or (torch.device("cpu") if old.is_meta else old.device)
        if not old.is_meta and old.dtype == dtype and old.device == where:
            continue
        try:
            memory = torch.empty(old.shape, dtype=dtype, device=where)
        except RuntimeError as error:  # torch reports a failed allocation so
            raise BudgetError(
                f"no memory for {name} ({targets.specs[name].nbytes:,} bytes on {where}; {number} of {len(wanted)}): "
                f"{str(error).splitlines()[0]}"
            ) from error
        if name in keep and not old.is_meta:
            memory.copy_(old.detach())
        _replace(targets, name, memory)


def adopt(targets: Targets, name: str, tensor: Tensor) -> bool:
    """Let the target ``name`` and those tied to it take over ``tensor``, if it is just what they are to be."""
    old, spec = targets.tensors[name], targets.specs[name]
    fits = tensor.dtype == torch_dtype(spec.dtype) and tensor.shape == old.shape and tensor.is_contiguous()
    if not fits or not (old.is_meta or old.is_cpu):
        return False
    _replace(targets, name, tensor)
    return True


def to_meta(targets: Targets, name: str) -> None:
    """Put the target ``name`` back on the meta device."""
    _replace(targets, name, torch.empty_like(targets.tensors[name].detach(), device="meta"))


def _replace(targets: Targets, name: str, memory: Tensor) -> None:
    """Put ``memory`` under ``name`` and every name tied to it."""
    assert targets.module is not None
    targets.touched = True
    made: dict[int, Tensor] = {}  # names can be tied by memory alone, as a parameter and a buffer, or a frozen one
    for each in (name, *(alias for alias, first in targets.aliases.items() if first == name)):
        path, _, key = each.rpartition(".")
        owner = targets.module.get_submodule(path)
        slots: dict[str, Tensor | None] = owner._parameters if key in owner._parameters else owner._buffers  # type: ignore[assignment]
        own = slots[key]
        assert own is not None
        if id(own) not in made:
            made[id(own)] = _like(own, memory)
        slots[key] = made[id(own)]
        if each == name:
            targets.tensors[name] = made[id(own)]
    targets.specs[name] = targets.specs[name]._replace(address=memory.data_ptr() if memory.is_cpu else 0)
    (targets.on_device.add if takes_device_memory(memory) else targets.on_device.discard)(name)


def _like(old: Tensor, memory: Tensor) -> Tensor:
    """``memory`` as a tensor of the same kind and attributes as ``old``."""
    new = memory.detach()
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(memory, requires_grad=old.requires_grad)
        new.__class__ = old.__class__
    new.__dict__.update(old.__dict__)
    return new


def untie(targets: Targets, alias: str, *, keep: bool = False) -> str:
    """Give the tied name ``alias`` memory of its own, with the values that it had if ``keep`` says so; returns what to note.

    Raises LoadError when it is the same module's parameter.
    """
    assert targets.module is not None
    first = targets.aliases[alias]
    (path, _, key), (first_path, _, first_key) = alias.rpartition("."), first.rpartition(".")
    if key == first_key and targets.module.get_submodule(path) is targets.module.get_submodule(first_path):
        raise LoadError(
            f"{alias} and {first} are one parameter of one module that is used twice, but the checkpoint stores two values; "
            "untie=True cannot part them, the module has to be built twice"
        )
    del targets.aliases[alias]
    old = targets.tensors[first]
    targets.specs[alias] = targets.specs[first]._replace(name=alias)
    memory = torch.empty_like(old, requires_grad=False)
    _replace(targets, alias, memory.copy_(old.detach()) if keep else memory)
    return f"{alias}: untied from {first}, since the checkpoint stores two values"
